"""Headers without files: shape-true replicas of real listings, and what a match made of each tensor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from shared_files import shared

from fulldiff.cases.factors import factorization
from fulldiff.cases.model import Shape
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import Header, TensorInfo
from fulldiff.harness.files.match import Match, matched
from fulldiff.harness.files.names import split

RANK = 4
DOWN = "down_blocks.1.attentions.0.transformer_blocks.0."
LAYER = "lora_unet_" + DOWN.replace(".", "_") + "attn1_to_q"
"""An SDXL layer, 640 × 640."""
WIDE = "lora_unet_" + DOWN.replace(".", "_") + "attn2_to_k"
"""An SDXL layer, 640 × 2048."""
BLOCK = "diffusion_model.double_blocks.0.img_attn.qkv"


def header(shapes: Mapping[str, Shape], dtype: str = "BF16", metadata: Mapping[str, str] | None = None) -> Header:
    """A file's header, alphas in f32."""
    tensors = {
        name: TensorInfo("F32" if name.endswith(".alpha") else dtype, shape, 0, 0) for name, shape in shapes.items()
    }
    return Header(Path("made.safetensors"), tensors, metadata or {}, 0)


def listing(name: str, model: str) -> Header:
    """A listing's header; shapes that it does not know are made from the layer its name means."""
    shapes = json.loads(shared("state_dicts", f"{name}.json").read_text())
    made = {tensor: real(tensor, model) if shape is None else tuple(shape) for tensor, shape in shapes.items()}
    return header(made)


def real(tensor: str, model: str) -> Shape:
    """The shape that a tensor of this name has on its layer."""
    part = split(tensor)
    assert part, tensor
    if part.factor == "alpha":
        return ()
    found = table(model).find(part.module)
    out, inp = (found[0].layer.out, found[0].layer.inp) if found else (8, 8)
    kernel = found[0].layer.kernel if found else ()
    (up, vp), (uq, vq) = factorization(out, 8), factorization(inp, 8)
    sizes: dict[str, Shape] = {
        "lora_up.weight": (out, RANK, *(1 for _ in kernel)),
        "lora_down.weight": (RANK, inp, *kernel),
        "lokr_w1": (up, uq),
        "lokr_w2": (vp, vq, *kernel),
    }
    return sizes[part.factor]


def pair(module: str, out: int, inp: int, rank: int = RANK) -> dict[str, Shape]:
    """A kohya LoRA's shapes, with alpha."""
    return {
        f"{module}.lora_up.weight": (out, rank),
        f"{module}.lora_down.weight": (rank, inp),
        f"{module}.alpha": (),
    }


def fates(found: Match) -> Counter[str]:
    """How often each tensor's fate is told: every one exactly once, if all is right."""
    told: list[str] = [*found.unmatched, *(skipped.tensor for skipped in found.skipped)]
    told += [tensor for refused in found.refused for tensor in refused.tensors]
    return Counter(told + matched_tensors(found))


def matched_tensors(found: Match) -> list[str]:
    """The tensors that the targets read."""
    sources = [target.adapter.source for target in found.targets]
    return [name for source in sources if source for name in source.tensors.values()]


def totals(found: Match) -> Counter[str]:
    """Tensors by fate, over all parts of the model."""
    return sum(found.counts.values(), Counter[str]())  # type: ignore[arg-type]


def account(found: Match, names: Iterable[str]) -> None:
    """Fail unless every tensor of the file was told of exactly once, and the counts say the same."""
    told = fates(found)
    assert {name: count for name, count in told.items() if count != 1} == {}
    assert sorted(told) == sorted(names)
    counts = totals(found)
    assert counts["matched"] == len(matched_tensors(found))
    assert counts["unmatched"] == len(found.unmatched)
    assert counts["skipped"] == len(found.skipped)
    assert counts["refused"] == sum(len(refused.tensors) for refused in found.refused)


GOOD = pair(WIDE, 640, 2048)


def only_refusal(shapes: dict[str, Shape], model: str = "sdxl", **rest: object) -> str:
    """The reason why the one bad module beside a good one is refused; every tensor of it is in the refusal."""
    head = header(GOOD | shapes if model == "sdxl" else shapes, **rest)  # type: ignore[arg-type]
    found = matched(head, table(model))
    account(found, head.tensors)
    (refused,) = found.refused
    assert sorted(refused.tensors) == sorted(shapes)
    return refused.reason
