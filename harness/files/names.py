"""Tensor names of adapter files, taken apart: which module, which factor, in which family of names.

A factor's canonical name is its kohya / LyCORIS suffix (``lora_up.weight``, ``lokr_w1``, ``alpha``);
`split` gives it for every family. Nothing here knows a model: `fulldiff.harness.files.base` finds the layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Style = Literal["lycoris", "diffusers", "linear layer", "peft", "xlabs", "positional", "any"]
Family = Literal["kohya", "lycoris", "diffusers", "peft", "comfyui", "xlabs", "cloneofsimo"]
Component = Literal["unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "other"]

LORA = ("lora_up.weight", "lora_down.weight", "lora_mid.weight")
LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
DIFF = ("diff", "diff_b")
KIND_FACTORS: dict[str, tuple[str, ...]] = {"lora": LORA, "lokr": LOKR, "loha": LOHA, "diff": DIFF}
# Wrappers that trainers leave around a module's path.
WRAPPERS = ("base_model.model.", "module.")

NAME = r"(?:\.(?!weight$|bias$)(?P<adapter>[^.]+))?"  # a PEFT adapter's name
FACTOR = "|".join(re.escape(name) for name in (*LOKR, *LOHA))
PATTERNS: tuple[tuple[Style, str], ...] = (
    ("positional", r"(?P<module>(?:unet|text_encoder):\d+):(?P<factor>up|down)"),
    ("xlabs", r"(?P<module>.*\bprocessor\.(?:qkv|proj)_lora\d?)\.(?P<factor>up|down)\.weight"),
    ("diffusers", r"(?P<module>.+\.processor\.\w+?)_lora\.(?P<factor>up|down)\.weight"),
    ("diffusers", r"(?P<module>.+)\.lora\.(?P<factor>up|down)\.weight"),
    ("linear layer", r"(?P<module>.+)\.lora_linear_layer\.(?P<factor>up|down)\.weight"),
    ("peft", rf"(?P<module>.+)\.lora_(?P<factor>A|B){NAME}(?:\.weight)?"),
    ("peft", rf"(?P<module>.+)\.(?P<factor>lora_magnitude_vector){NAME}(?:\.weight)?"),
    ("any", r"(?P<module>.+)\.(?P<factor>magnitude)"),
    ("lycoris", r"(?P<module>.+)\.(?P<factor>lora_(?:up|down|mid)\.weight)"),
    ("lycoris", rf"(?P<module>.+)\.(?P<factor>{FACTOR}){NAME}"),
    ("any", r"(?P<module>.+)\.(?P<factor>alpha|scale|dora_scale|diff|diff_b)"),
)
RULES = tuple((style, re.compile(pattern, re.DOTALL)) for style, pattern in PATTERNS)
SYNONYMS = {
    "up": "lora_up.weight",
    "down": "lora_down.weight",
    "B": "lora_up.weight",
    "A": "lora_down.weight",
    "lora_magnitude_vector": "dora_scale",
    "magnitude": "dora_scale",
}
# Kinds that are known and not supported, by the end of a tensor's name.
REFUSED_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(rf"(?P<module>.+)\.(?:{pattern})", re.DOTALL))
    for kind, pattern in (
        ("OFT or BOFT", r"oft_blocks|oft_diag|oft_[rR](?:\..+)?"),
        ("BOFT", r"boft_[RrSs](?:\..+)?|rescale"),
        ("GLoRA", r"(?:a1|a2|b1|b2|bm|bm1|bm2|c1|c2)(?:\.weight)?|glora_.+"),
        ("a replaced weight", r"set_weight|reshape_weight"),
        ("a normalisation layer", r"w_norm|b_norm"),
        ("IA3", r"on_input|ia3_l(?:\..+)?"),
        ("VeRA", r"vera_.+"),
        ("LoRA with a bias", r"lora_B(?:\.[^.]+)?\.bias|lora_(?:up|down)\.bias"),
        ("LoRA of an embedding", r"lora_embedding_[AB](?:\..+)?"),
    )
)
EMBEDDINGS = re.compile(r"<[^<>]+>|emb_params|clip_[lg]|bundle_emb\..+|.+\.string_to_param\..+")
COMPONENTS: tuple[tuple[Component, tuple[str, ...]], ...] = (
    ("text_encoder_2", ("lora_te2_", "text_encoder_2.")),
    ("text_encoder_3", ("lora_te3_", "text_encoder_3.")),
    ("text_encoder", ("lora_te_", "lora_te1_", "text_encoder.", "text_encoder:", "text_model.")),
    ("unet", ("unet.", "unet:", "lora_unet_", "down_blocks.", "up_blocks.", "mid_block.")),
    ("transformer", ("transformer.", "lora_transformer_", "double_blocks.", "single_blocks.")),
)
DOTTED = ("unet.", "transformer.", "text_encoder.", "text_encoder_2.")
STARTS: tuple[tuple[str, Family], ...] = (
    ("lycoris_", "lycoris"),
    ("lora_", "kohya"),
    ("diffusion_model.", "comfyui"),
)


@dataclass(frozen=True)
class TensorName:
    """One tensor's name taken apart. ``prefix`` is the module as the file spells it, ``module`` without
    wrappers; ``adapter`` is the PEFT adapter's name where the file has one; ``refused`` names a kind that
    is known and not supported, and then ``factor`` is empty."""

    prefix: str
    module: str
    factor: str
    style: Style
    adapter: str = ""
    refused: str = ""


def split(name: str) -> TensorName | None:
    """The parts of a tensor's name; None where no family spells a name so."""
    for kind, pattern in REFUSED_KINDS:
        if found := pattern.fullmatch(name):
            return TensorName(found["module"], unwrapped(found["module"]), "", "any", refused=kind)
    for style, pattern in RULES:
        if found := pattern.fullmatch(name):
            parts = found.groupdict()
            factor = SYNONYMS.get(parts["factor"], parts["factor"])
            return TensorName(parts["module"], unwrapped(parts["module"]), factor, style, parts.get("adapter") or "")
    return None


def unwrapped(prefix: str) -> str:
    """A module's path without the wrappers that trainers leave, also behind a component's name."""
    for wrapper in WRAPPERS:
        prefix = re.sub(rf"(^|^(?:unet|transformer|text_encoder(?:_\d)?)\.)(?:{re.escape(wrapper)})+", r"\1", prefix)
    return prefix.removeprefix("model.") if prefix.startswith("model.diffusion_model.") else prefix


def family(name: TensorName) -> Family:
    """The family of names that a module's tensors are spelled in."""
    for start, spelling in STARTS:
        if name.module.startswith(start):
            return spelling
    if name.style in ("positional", "xlabs"):
        return "cloneofsimo" if name.style == "positional" else "xlabs"
    if name.style == "peft" and (name.module != name.prefix or name.adapter or not name.prefix.startswith(DOTTED)):
        return "peft"
    if name.style == "lycoris" and (name.prefix.startswith(WRAPPERS[0]) or name.adapter):
        return "peft"  # its LoKr and LoHa have LyCORIS's names for their factors
    return "lycoris" if name.style == "lycoris" else "diffusers"


def kind_of(factor: str) -> str | None:
    """The adapter kind that a canonical factor belongs to; None for alpha and the like."""
    return next((kind for kind, factors in KIND_FACTORS.items() if factor in factors), None)


def component(module: str) -> Component:
    """Which part of a model a module's name speaks of, as far as the name tells."""
    return next((part for part, starts in COMPONENTS if module.startswith(starts)), "other")


def is_embedding(name: str) -> bool:
    """Whether a tensor is a learned token's embedding, which is no layer's adapter."""
    return EMBEDDINGS.fullmatch(name) is not None
