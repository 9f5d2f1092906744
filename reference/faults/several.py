"""Faults with several adapters, the base, the bias and the parts of fused layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fulldiff.reference.faults.registry import fault
from fulldiff.reference.layers import LayerLike
from fulldiff.reference.truth import Factors, Parts, Truth


@fault("first-adapter-only")
class FirstAdapterOnly(Truth):
    """Of several adapters on a layer only the first counts."""

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        return super().forward(layer, weight, bias, [a for a in adapters if self.counts(a)][:1], x)


@fault("last-adapter-only")
class LastAdapterOnly(Truth):
    """Each adapter on a layer takes the place of those before it."""

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        return super().forward(layer, weight, bias, adapters[-1:], x)


@fault("last-strength-for-all")
class LastStrengthForAll(Truth):
    """Every adapter gets the strength of the last one loaded."""

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        same = [replace(adapter, strength=adapters[-1].strength) for adapter in adapters]
        return super().forward(layer, weight, bias, same, x)


@fault("delta-replaces-base")
class DeltaReplacesBase(Truth):
    """W' = ΔW: the base weight lost."""

    def output(self, layer: LayerLike, weight: Tensor, bias: Tensor | None, parts: Parts, x: Tensor) -> Tensor:
        return super().output(layer, torch.zeros_like(weight) if parts else weight, bias, parts, x)


@fault("first-kind-only")
class FirstKindOnly(Truth):
    """Where a layer has adapters of two kinds (a diff and a LoRA), only the first kind counts (D10)."""

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        same = [adapter for adapter in adapters if adapter.kind == adapters[0].kind]
        return super().forward(layer, weight, bias, same, x)


@fault("lokr-ignored")
class LokrIgnored(Truth):
    """A LoKr's factors read nowhere: it adds nothing (diffusers 0.42.1, of those with both factors low rank)."""

    def counts(self, adapter: Factors) -> bool:
        return adapter.kind != "lokr" and super().counts(adapter)


@fault("bias-delta-ignored")
class BiasDeltaIgnored(Truth):
    """diff_b never read."""

    def add_bias(self, bias: Tensor | None, adapter: Factors, weight: Tensor) -> Tensor | None:
        return bias


@fault("bias-delta-needs-bias")
class BiasDeltaNeedsBias(Truth):
    """diff_b dropped where the layer has no bias of its own."""

    def add_bias(self, bias: Tensor | None, adapter: Factors, weight: Tensor) -> Tensor | None:
        return None if bias is None else super().add_bias(bias, adapter, weight)


@fault("bias-delta-not-multiplied")
class BiasDeltaNotMultiplied(Truth):
    """diff_b added whole, whatever the strength."""

    def add_bias(self, bias: Tensor | None, adapter: Factors, weight: Tensor) -> Tensor | None:
        return super().add_bias(bias, replace(adapter, strength=1.0), weight)


# Parts of a fused layer


@fault("fused-rows-packed")
class FusedRowsPacked(Truth):
    """The parts that a file has put one after the other: an absent one shifts those behind it (D9)."""

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        starts = sorted({adapter.rows for adapter in adapters if adapter.rows})
        moved = {(a, b): (end := sum(d - c for c, d in starts if c < a), end + b - a) for a, b in starts}
        packed = [replace(adapter, rows=moved[adapter.rows]) if adapter.rows else adapter for adapter in adapters]
        return super().forward(layer, weight, bias, packed, x)


@fault("fused-part-after-gap-dropped")
class FusedPartAfterGapDropped(Truth):
    """Parts behind an absent one left out: v dropped when k is missing (D9)."""

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        reached = 0
        for start, end in sorted({adapter.rows for adapter in adapters if adapter.rows}):
            reached = end if start == reached else reached
        kept = [adapter for adapter in adapters if not adapter.rows or adapter.rows[1] <= reached]
        return super().forward(layer, weight, bias, kept, x)


@fault("fused-equal-parts")
class FusedEqualParts(Truth):
    """A part placed as if all parts were of its own size, though k and v may be smaller than q."""

    def rows(self, adapter: Factors, weight: Tensor) -> slice:
        right = super().rows(adapter, weight)
        size = right.stop - right.start
        start = min(right.start // size * size, weight.shape[0] - size)
        return slice(start, start + size)


@fault("fused-down-split")
class FusedDownSplit(Truth):
    """A LoRA's ranks split among the parts as the rows are: each part gets its share of down only."""

    def delta(self, adapter: Factors, weight: Tensor) -> Tensor:
        if adapter.rows is None or adapter.kind != "lora":
            return super().delta(adapter, weight)
        rank, out = adapter.tensors["lora_down.weight"].shape[0], weight.shape[0]
        first, last = (rank * row // out for row in adapter.rows)
        down = adapter.tensors["lora_down.weight"].clone()
        down[:first], down[last:] = 0, 0
        return super().delta(replace(adapter, tensors={**adapter.tensors, "lora_down.weight": down}), weight)
