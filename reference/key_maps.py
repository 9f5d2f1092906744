"""The names under which adapter files may speak of a model's weights, as the ComfyUI and Forge lineage lists them.

A key map is a dictionary, candidate name → target, in the order in which a loader tries the candidates. It is made
from the names of the model's weights, which the caller gives as plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

MODEL = "diffusion_model."


class Target(NamedTuple):
    """A weight by its state-dict name; ``rows`` [start, end) where only a slice of it is meant (q of a qkv)."""

    weight: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Base:
    """A model's names. ``denoiser`` and ``text`` are state-dict names in order (``diffusion_model.….weight``,
    ``clip_l.transformer.….weight``); ``diffusers`` pairs the diffusers path of each layer that the architecture
    may have with its target, also where this model has no such weight."""

    name: str
    kind: Literal["unet", "transformer"]
    denoiser: tuple[str, ...]
    diffusers: tuple[tuple[str, Target], ...]
    text: tuple[str, ...]


def denoiser_names(base: Base) -> dict[str, Target]:
    """Candidate name → target of the UNet or transformer, in the order that the candidates are tried."""
    names: dict[str, Target] = {}
    for key in base.denoiser:
        if key.endswith(".weight"):
            path = key.removesuffix(".weight")
            names["lora_unet_" + path.removeprefix(MODEL).replace(".", "_")] = Target(key)
            names[path] = Target(key)
        else:
            names[key] = Target(key)
    spelled = unet_spellings if base.kind == "unet" else transformer_spellings
    for path, target in base.diffusers:
        for name in spelled(path):
            names[name] = target
    return names


def unet_spellings(path: str) -> tuple[str, ...]:
    """kohya, LyCORIS, and diffusers with its attention processors, bare and with the part's name."""
    flat, dotted = path.replace(".", "_"), path.replace(".to_", ".processor.to_")
    if dotted.endswith(".to_out.0"):
        dotted = dotted.removesuffix(".0")
    return (f"lora_unet_{flat}", f"lycoris_{flat}", dotted, f"unet.{dotted}")


def transformer_spellings(path: str) -> tuple[str, ...]:
    """diffusers, LyCORIS, OneTrainer."""
    flat = path.replace(".", "_")
    return (f"transformer.{path}", f"lycoris_{flat}", f"lora_transformer_{flat}")


def text_names(base: Base) -> dict[str, Target]:
    """Candidate name → target of the text encoders."""
    names: dict[str, Target] = {}
    for key in base.text:
        encoder, _, path = key.removesuffix(".weight").partition(".transformer.")
        for name in text_spellings(encoder, path):
            names[name] = Target(key)
    return names


def text_spellings(encoder: str, path: str) -> tuple[str, ...]:
    """A layer of the first encoder (clip_l) or the second (clip_g); the projections have names of their own."""
    flat = path.replace(".", "_")
    if path == "text_projection":
        return ("lora_te1_text_projection",) if encoder == "clip_l" else ("lora_prior_te_" + flat, "lora_te2_" + flat)
    if encoder == "clip_l":
        return (f"lora_te_{flat}", f"lora_te1_{flat}", f"text_encoder.{path}")
    return (f"lora_te2_{flat}", f"text_encoder_2.{path}")


def bias_of(target: Target) -> Target:
    """The bias beside a weight."""
    return Target(target.weight.removesuffix(".weight") + ".bias", target.rows)
