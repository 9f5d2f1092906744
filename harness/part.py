"""A part of a layer's output channels as a smaller case of its own, for the oracle of large layers.

Each output channel of a LoRA, LoHa or diff depends on its own row of one or two factors; channel i·vp + j
of a LoKr on w1's row i and w2's row j alone. So the first rows of w2, with all of w1, are a smaller LoKr
on the same rows of the base weight. A DoRA whose norm runs over the rows has no such part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from fulldiff.cases.model import RuntimeCase
from fulldiff.harness.realise import Material

# Factors with a row per output channel, and what holds their rows as columns where it is there.
ROWS = {"lora_up.weight": "", "hada_w1_a": "hada_t1", "hada_w2_a": "hada_t2", "diff": "", "diff_b": ""}
W2_ROWS = {"lokr_w2": "", "lokr_w2_a": "lokr_t2"}


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
    """The first ``count`` channels of each w1 row (of the whole, without LoKr); all where there is no such part."""
    whole = Part(body, material, None, body.layer.out)
    splits = {_w1_rows(t) for t in material.adapters} - {None}
    apart = any(adapter.rows for adapter in body.adapters) or any(_norm_over_rows(t) for t in material.adapters)
    if not count or body.layer.groups > 1 or len(splits) > 1 or apart:
        return whole
    up = max((split for split in splits if split), default=1)
    count = min(count, body.layer.out // up)
    channels = (torch.arange(up)[:, None] * (body.layer.out // up) + torch.arange(count)).flatten()
    bias = None if material.bias is None else material.bias[channels]
    adapters = tuple(_cut(t, channels, count) for t in material.adapters)
    layer = msgspec.structs.replace(body.layer, out=len(channels))
    cut = replace(material, weight=material.weight[channels], bias=bias, adapters=adapters)
    return Part(msgspec.structs.replace(body, layer=layer), cut, channels, body.layer.out)


def _w1_rows(t: Mapping[str, Tensor]) -> int | None:
    w1 = t.get("lokr_w1", t.get("lokr_w1_a"))
    return None if w1 is None else w1.shape[0]


def _norm_over_rows(t: Mapping[str, Tensor]) -> bool:
    magnitude = t.get("dora_scale")
    return magnitude is not None and (magnitude.dim() < 2 or magnitude.shape[0] == 1)


def _cut(t: Mapping[str, Tensor], channels: Tensor, count: int) -> dict[str, Tensor]:
    """The adapter's tensors for these output channels, the first ``count`` of each w1 row."""
    first = torch.arange(count)
    cut = dict(t)
    for names, rows in ((ROWS, channels), (W2_ROWS, first), ({"dora_scale": ""}, channels)):
        for name, core in names.items():
            if name in t:
                cut[name] = t[name].index_select(1 if core in t else 0, rows)
    return cut
