"""Merging the patches of one weight: W + Σ strength · alpha / rank · ΔW, summed in f32 and cast once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulldiff.harness.subjects import factors, full_diff
from fulldiff.harness.subjects.base import Adapter, Refused
from fulldiff.reference.load import LoadError, Patch
from fulldiff.reference.merge import UNMERGED

PLAIN = {"lora_up.weight", "lora_down.weight", "alpha"}
Rows = tuple[int, int] | None


def one_by_one(weight: Tensor, patches: Sequence[Patch]) -> Tensor:
    """As the lineage does it: each delta made whole, scaled, and added to the sum."""
    total = widened(weight)
    for adapter in adapters(patches):
        if "dora_scale" in adapter.tensors:
            full_diff.add(total, weight, adapter)
        else:
            part = total[factors.rows(adapter, weight)]
            part += factors.scale(adapter) * full_diff.delta(adapter, part.shape, total.dtype)
    return total.to(weight.dtype)


def stacked(weight: Tensor, patches: Sequence[Patch]) -> Tensor:
    """All plain LoRAs on the same rows in one product, up (out, Σr) · down (Σr, in), added as it is made."""
    total = widened(weight)
    plain: dict[Rows, list[Adapter]] = {}
    for adapter in adapters(patches):
        if adapter.kind == "lora" and adapter.tensors.keys() <= PLAIN:
            plain.setdefault(adapter.rows, []).append(adapter)
        else:
            full_diff.add(total, weight, adapter)
    for together in plain.values():
        part = total[factors.rows(together[0], weight)]
        up = torch.cat([_up(adapter, total.dtype) for adapter in together], dim=1)
        down = torch.cat([adapter.tensors["lora_down.weight"].to(total.dtype).flatten(1) for adapter in together])
        if (up.shape[0], down.shape[1]) != (part.shape[0], part[0].numel()):
            sizes = f"({up.shape[0]}, {down.shape[1]}), the weight is {tuple(part.shape)}"
            raise Refused(f"{', '.join(sorted({patch.file for patch in patches}))}: the factors give {sizes}")
        part.flatten(1).addmm_(up, down)
    return total.to(weight.dtype)


def _up(adapter: Adapter, dtype: torch.dtype) -> Tensor:
    """up (out, r) times strength · alpha / rank: fewer numbers to scale than the delta has."""
    return adapter.tensors["lora_up.weight"].to(dtype).flatten(1) * factors.scale(adapter)


def widened(weight: Tensor) -> Tensor:
    """A copy in f32, or f64 of an f64 weight."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def adapters(patches: Sequence[Patch]) -> list[Adapter]:
    """The patches that change the weight; raises LoadError for a kind that has no delta."""
    return [_adapter(patch) for patch in patches if patch.strength]


def _adapter(patch: Patch) -> Adapter:
    if patch.kind in UNMERGED:
        raise LoadError(f"{patch.file}: {UNMERGED[patch.kind]} has no delta to merge; remove the layer from the file")
    return Adapter(patch.kind, patch.tensors, patch.strength, patch.rows)
