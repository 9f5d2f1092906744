"""The names in load cases: a model's key maps and shapes for the strategies, and what a file calls a factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from fulldiff.cases.model import Model, Shape
from fulldiff.cases.state_dicts import state_dict
from fulldiff.cases.tables import load_table
from fulldiff.reference.key_maps import Base, Target, denoiser_names, text_names

# A LoRA's up and down by the spelling of an adapter; every other factor is ``.`` and its canonical name.
LORA_SUFFIXES: dict[str, tuple[str, str]] = {
    "lycoris": (".lora_up.weight", ".lora_down.weight"),
    "processor": ("_lora.up.weight", "_lora.down.weight"),
    "peft": (".lora_B.weight", ".lora_A.weight"),
    "diffusers": (".lora.up.weight", ".lora.down.weight"),
    "linear layer": (".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight"),
}
SHRINK = {"sdxl": 160, "sd15": 160, "flux": 384}
# The model that a loader is given first, to see what it remembers of it.
OTHER = {"sdxl": "sd15", "sd15": "sdxl", "flux": "sdxl"}
RESNETS = ("unet.down_blocks.1.resnets.0.conv1", "unet.down_blocks.1.resnets.1.conv2", "unet.mid_block.resnets.0.conv2")
CLIP_L = tuple(f"text_encoder.text_model.encoder.layers.{n}" for n in ("0.mlp.fc1", "0.self_attn.q_proj", "3.mlp.fc2"))
CLIP_G = tuple(f"text_encoder_2.text_model.encoder.layers.{n}" for n in ("0.mlp.fc1", "9.self_attn.v_proj"))
ATTENTION = "unet.down_blocks.1.attentions.0"
UNET = (
    f"{ATTENTION}.transformer_blocks.0.attn1.to_q",
    f"{ATTENTION}.transformer_blocks.0.attn2.to_out.0",
    f"{ATTENTION}.proj_in",
    *RESNETS,
    "unet.up_blocks.0.resnets.0.conv_shortcut",
    "unet.conv_out",
)
# Layers for small models: of every kind, some of them in both UNets, some in one alone.
POOL: dict[str, tuple[str, ...]] = {
    "sdxl": (*UNET, "unet.up_blocks.0.upsamplers.0.conv", "unet.add_embedding.linear_1",
             f"{ATTENTION}.transformer_blocks.1.attn1.to_k", *CLIP_L, *CLIP_G, "text_encoder_2.text_projection"),
    "sd15": (*UNET, "unet.down_blocks.3.resnets.0.conv1", "unet.down_blocks.0.attentions.0.proj_out",
             "unet.up_blocks.3.resnets.2.conv1", *CLIP_L),
    "flux": tuple(row.part + "." + row.name for row in load_table("flux")
                  if row.name.startswith(("transformer_blocks.0.attn.", "single_transformer_blocks.0.", "x_embedder",
                                          "transformer_blocks.1.ff.net"))) + CLIP_L[:2],
}  # fmt: skip


@dataclass(frozen=True)
class Spot:
    """A candidate name, its target, and the shape that an adapter of it has; () where the model has no weight."""

    name: str
    target: Target
    shape: Shape


def base_names(model: Model) -> Base:
    """A model's names as loaders get them."""
    made = state_dict(model)
    return Base(
        model.name,
        "unet" if model.name in ("sd15", "sdxl") else "transformer",
        tuple(made.denoiser),
        tuple((path, Target(weight, rows)) for path, weight, rows in made.diffusers),
        tuple(made.text),
    )


def other(model: Model) -> Model:
    """Another base model, as small as this one."""
    name = OTHER[model.name]
    return replace(model, name=name, layers=POOL[name] if model.layers else ())


def spots(model: Model) -> list[Spot]:
    """Every candidate name of a model."""
    base, shapes = base_names(model), state_dict(model).shapes
    names: Mapping[str, Target] = denoiser_names(base) | text_names(base)
    return [Spot(name, target, _shape(shapes.get(target.weight, ()), target)) for name, target in names.items()]


def _shape(shape: Shape, target: Target) -> Shape:
    return (target.rows[1] - target.rows[0], *shape[1:]) if target.rows and shape else shape


def factor_key(module: str, spelling: str, factor: str) -> str:
    """A factor's name in a file, by the adapter's spelling."""
    up, down = LORA_SUFFIXES.get(spelling, LORA_SUFFIXES["lycoris"])
    return module + {"lora_up.weight": up, "lora_down.weight": down}.get(factor, f".{factor}")
