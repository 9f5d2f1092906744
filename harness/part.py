"""A part of a layer's output channels as a smaller case of its own, for the oracle of large layers.

Output channel i·vp + j depends on w1's row i and w2's row j alone, so the first rows of w2 (of a LoRA's
up), with all of w1, are a smaller adapter on the same rows of the base weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from fulldiff.cases.model import RuntimeCase
from fulldiff.harness.realise import Material


@dataclass(frozen=True)
class Part:
    """The smaller case and its tensors, and which output channels of the whole layer it computes."""

    body: RuntimeCase
    material: Material
    channels: Tensor | None
    whole: int

    def of(self, y: Tensor) -> Tensor:
        """The part's channels of the whole layer's output; an output of another size as it is."""
        axis = 1 if self.body.layer.kernel else -1
        if self.channels is None or y.dim() < 2 or y.shape[axis] != self.whole:
            return y
        return y.index_select(axis, self.channels)


def part_of(body: RuntimeCase, material: Material, count: int) -> Part:
    """The first ``count`` channels of each w1 row; the whole layer where it has no such part."""
    splits = {_rows(t, body.layer.out) for t in material.adapters}
    parted = any(adapter.rows for adapter in body.adapters)
    if not count or parted or body.layer.groups > 1 or len(splits) != 1 or None in splits:
        return Part(body, material, None, body.layer.out)
    ((up, vp),) = [split for split in splits if split]
    count = min(count, vp)
    channels = (torch.arange(up)[:, None] * vp + torch.arange(count)).flatten()
    bias = None if material.bias is None else material.bias[channels]
    adapters = tuple(_cut(t, count) for t in material.adapters)
    layer = msgspec.structs.replace(body.layer, out=len(channels))
    cut = replace(material, weight=material.weight[channels], bias=bias, adapters=adapters)
    return Part(msgspec.structs.replace(body, layer=layer), cut, channels, body.layer.out)


def _rows(t: Mapping[str, Tensor], out: int) -> tuple[int, int] | None:
    """(rows of w1, rows of w2) of a LoKr, (1, out) of a LoRA, None of any other kind."""
    if {"dora_scale", "diff_b"} & t.keys():
        return None
    if "lora_up.weight" in t:
        return (1, out)
    w1 = t.get("lokr_w1", t.get("lokr_w1_a"))
    return None if w1 is None else (w1.shape[0], out // w1.shape[0])


def _cut(t: Mapping[str, Tensor], count: int) -> Mapping[str, Tensor]:
    """The factors with the first ``count`` rows of w2, or of up."""
    name = next(name for name in ("lora_up.weight", "lokr_w2", "lokr_w2_a") if name in t)
    transposed = "lokr_t2" in t
    return {**t, name: t[name][:, :count] if transposed else t[name][:count]}
