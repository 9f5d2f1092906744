"""From diffusers' layer paths to those of the original checkpoints (ldm, OpenCLIP, BFL, Z-Image).

A rule is (pattern, replacement); rules apply in turn, each to the result of those before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
UNET_NAMES = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
FLUX_NAMES = (
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^time_text_embed\.timestep_embedder", "time_in"),
    (r"^time_text_embed\.guidance_embedder", "guidance_in"),
    (r"^time_text_embed\.text_embedder", "vector_in"),
    (r"_in\.linear_1$", "_in.in_layer"),
    (r"_in\.linear_2$", "_in.out_layer"),
    # BFL stores (shift, scale), diffusers (scale, shift).
    (r"^norm_out\.linear$", "final_layer.adaLN_modulation.1[3072:6144+0:3072]"),
    (r"^proj_out$", "final_layer.linear"),
    (r"^single_transformer_blocks\.(\d+)\.", r"single_blocks.\1."),
    (r"^transformer_blocks\.(\d+)\.", r"double_blocks.\1."),
    (r"^(single.*)\.norm\.linear$", r"\1.modulation.lin"),
    (r"^(single.*)\.attn\.to_q$", r"\1.linear1[0:3072]"),
    (r"^(single.*)\.attn\.to_k$", r"\1.linear1[3072:6144]"),
    (r"^(single.*)\.attn\.to_v$", r"\1.linear1[6144:9216]"),
    (r"^(single.*)\.proj_mlp$", r"\1.linear1[9216:21504]"),
    (r"^(single.*)\.proj_out$", r"\1.linear2"),
    (r"\.norm1\.linear$", ".img_mod.lin"),
    (r"\.norm1_context\.linear$", ".txt_mod.lin"),
    (r"\.attn\.to_out\.0$", ".img_attn.proj"),
    (r"\.attn\.to_add_out$", ".txt_attn.proj"),
    (r"\.attn\.(to_q|to_k|to_v)$", r".img_attn.\1"),
    (r"\.attn\.add_([qkv])_proj$", r".txt_attn.to_\1"),
    (r"_attn\.to_q$", "_attn.qkv[0:3072]"),
    (r"_attn\.to_k$", "_attn.qkv[3072:6144]"),
    (r"_attn\.to_v$", "_attn.qkv[6144:9216]"),
    (r"\.ff\.net\.(0|2)(\.proj)?$", r".img_mlp.\1"),
    (r"\.ff_context\.net\.(0|2)(\.proj)?$", r".txt_mlp.\1"),
)
ZIMAGE_NAMES = (
    (r"^all_x_embedder\.2-1", "x_embedder"),
    (r"^all_final_layer\.2-1", "final_layer"),
    (r"\.attention\.to_q$", ".attention.qkv[0:3840]"),
    (r"\.attention\.to_k$", ".attention.qkv[3840:7680]"),
    (r"\.attention\.to_v$", ".attention.qkv[7680:11520]"),
    (r"\.attention\.to_out\.0$", ".attention.out"),
)
CLIP_G_NAMES = (
    (r"^text_projection$", "text_projection[T]"),
    (r"^text_model\.encoder\.layers", "transformer.resblocks"),
    (r"\.self_attn\.q_proj$", ".attn.in_proj_weight[0:1280]"),
    (r"\.self_attn\.k_proj$", ".attn.in_proj_weight[1280:2560]"),
    (r"\.self_attn\.v_proj$", ".attn.in_proj_weight[2560:3840]"),
    (r"\.self_attn\.out_proj$", ".attn.out_proj"),
    (r"\.mlp\.fc1$", ".mlp.c_fc"),
    (r"\.mlp\.fc2$", ".mlp.c_proj"),
)


def replaced(rules: tuple[tuple[str, str], ...], prefix: str = "") -> Callable[[str], str]:
    """A translation that applies each rule (pattern, replacement) in turn."""

    def translate(name: str) -> str:
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        return prefix + name

    return translate


def unet_original(config: dict[str, Any]) -> Callable[[str], str]:
    """The ldm paths of a UNet: ldm numbers ResNets and samplers in one list of blocks."""
    crossed = [kind.startswith("CrossAttn") for kind in config["up_block_types"]]

    def translate(name: str) -> str:
        found = re.match(r"(down|up|mid)_block(?:s\.(\d))?\.(\w+)\.(\d)\.(.+)", name)
        if not found:
            return "model.diffusion_model." + UNET_NAMES[name]
        side, block, role, index, rest = found.groups()
        rest = "op" if role == "downsamplers" else RESNET.get(rest, rest)
        place = ldm_place(side, int(block or 0), role, int(index), crossed)
        return f"model.diffusion_model.{place}.{rest}"

    return translate


def ldm_place(side: str, block: int, role: str, index: int, crossed: list[bool]) -> str:
    """``input_blocks.N.M`` and the like; a level takes three numbers, ``conv_in`` the first."""
    inner = 1 if role == "attentions" else 0
    if side == "mid":
        return f"middle_block.{inner or 2 * index}"
    if role == "downsamplers":
        return f"input_blocks.{3 * block + 3}.0"
    if role == "upsamplers":
        return f"output_blocks.{3 * block + 2}.{2 if crossed[block] else 1}"
    first = f"input_blocks.{3 * block + 1 + index}" if side == "down" else None
    return f"{first or f'output_blocks.{3 * block + index}'}.{inner}"
