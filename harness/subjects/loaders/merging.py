"""Merging the patches of one weight: W + Σ strength · alpha / rank · ΔW, summed in f32 and cast once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fulldiff.harness.subjects import factors, full_diff
from fulldiff.harness.subjects.base import Adapter, Refused
from fulldiff.reference.load import LoadError, Patch
from fulldiff.reference.merge import UNMERGED

PLAIN = {"lora_up.weight", "lora_down.weight", "alpha"}
OUT_OF_MEMORY = ("can't allocate memory", "out of memory")
Rows = tuple[int, int] | None


def one_by_one(weight: Tensor, patches: Sequence[Patch]) -> Tensor:
    """As the lineage does it: each delta made whole, scaled, and added to the sum."""
    total = widened(weight)
    for file, adapter in active(patches):
        with named(file, weight):
            if "dora_scale" in adapter.tensors:
                full_diff.add(total, weight, adapter)
            else:
                part = total[factors.rows(adapter, weight)]
                part += factors.scale(adapter) * full_diff.delta(adapter, part.shape, total.dtype)
    return total.to(weight.dtype)


def stacked(weight: Tensor, patches: Sequence[Patch]) -> Tensor:
    """All plain LoRAs on the same rows in one product, up (out, Σr) · down (Σr, in), added as it is made."""
    total = widened(weight)
    plain: dict[Rows, list[tuple[Tensor, Tensor]]] = {}
    for file, adapter in active(patches):
        with named(file, weight):
            if adapter.kind == "lora" and adapter.tensors.keys() <= PLAIN:
                pair = _matrices(adapter, total[factors.rows(adapter, weight)])
                plain.setdefault(adapter.rows, []).append(pair)
            else:
                full_diff.add(total, weight, adapter)
    for rows, pairs in plain.items():
        ups, downs = zip(*pairs, strict=True)
        part = total[slice(*rows) if rows else slice(None)]
        part.flatten(1).addmm_(torch.cat(ups, dim=1), torch.cat(downs))
    return total.to(weight.dtype)


def _matrices(adapter: Adapter, part: Tensor) -> tuple[Tensor, Tensor]:
    """up (out, r) times its scale, and down (r, in·∏kernel).

    Checked one by one: stacked, the wrong rank of one LoRA and that of another could make up for each other.
    """
    up, down = (adapter.tensors[name] for name in ("lora_up.weight", "lora_down.weight"))
    same_kernel = down.dim() != part.dim() or down.shape[1:] == part.shape[1:]
    flat_up, flat_down = up.to(part.dtype).flatten(1), down.to(part.dtype).flatten(1)
    sizes = (flat_up.shape[0], flat_up.shape[1], flat_down.shape[1])
    if not same_kernel or sizes != (part.shape[0], down.shape[0], part[0].numel()):
        raise Refused(f"lora_up is {tuple(up.shape)} and lora_down {tuple(down.shape)}")
    return flat_up * factors.scale(adapter), flat_down


@contextmanager
def named(file: str, weight: Tensor) -> Iterator[None]:
    """Name the file and the weight's shape where its factors do not fit."""
    try:
        yield
    except RuntimeError as error:
        if any(part in str(error) for part in OUT_OF_MEMORY):
            raise
        raise Refused(f"{file}: its factors do not fit a weight {tuple(weight.shape)}: {error}") from error
    except Refused as reason:
        raise Refused(f"{file}: its factors do not fit a weight {tuple(weight.shape)}: {reason}") from reason


def widened(weight: Tensor) -> Tensor:
    """A copy in f32, or f64 of an f64 weight."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def active(patches: Sequence[Patch]) -> Iterator[tuple[str, Adapter]]:
    """The patches that change the weight, with their files; raises LoadError for a kind that has no delta."""
    for patch in patches:
        if patch.strength and patch.kind in UNMERGED:
            kind = UNMERGED[patch.kind]
            raise LoadError(f"{patch.file}: {kind} has no delta to merge; remove the layer from the file")
        if patch.strength:
            yield patch.file, Adapter(patch.kind, patch.tensors, patch.strength, patch.rows)
