"""Faults of the delta's own branch: bias, padding, dilation, stride, groups, batch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from fulldiff.reference.faults.registry import fault
from fulldiff.reference.layers import LayerLike, apply
from fulldiff.reference.truth import Factors, Parts, Truth


def _except(layer: LayerLike, **changes: Any) -> LayerLike:
    """The layer with some fields changed."""
    names = ("kind", "kernel", "stride", "padding", "dilation", "padding_mode", "groups")
    return cast(LayerLike, SimpleNamespace(**{name: getattr(layer, name) for name in names} | changes))


class Apart(Truth):
    """Base and deltas applied apart, as runtime implementations do; subclasses spoil `branch`, or the layer of it."""

    def output(self, layer: LayerLike, weight: Tensor, bias: Tensor | None, parts: Parts, x: Tensor) -> Tensor:
        y = apply(layer, weight, bias, x)
        for adapter, delta in parts:
            y = y + self.branch(layer, adapter, delta, bias, x, y)
        return y

    def branch(
        self, layer: LayerLike, adapter: Factors, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor
    ) -> Tensor:
        """What is added to ``y``: cut to its size, or broadcast where that is 1."""
        return _cut(layer, apply(self.own(layer, adapter), delta, None, x), y)

    def own(self, layer: LayerLike, adapter: Factors) -> LayerLike:
        """The layer that the adapter's branch is."""
        return layer


def _cut(layer: LayerLike, wrong: Tensor, y: Tensor) -> Tensor:
    """An output cut to the size of ``y``, or whole along a dimension where that is 1."""
    spatial = [slice(None if size == 1 else size) for size in y.shape[2:]]
    return wrong if layer.kind == "linear" else wrong[(slice(None), slice(None), *spatial)]


@fault("bias-twice")
class BiasTwice(Apart):
    """The delta's branch adds the layer's bias again."""

    def branch(
        self, layer: LayerLike, adapter: Factors, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor
    ) -> Tensor:
        return _cut(layer, apply(self.own(layer, adapter), delta, bias, x), y)


@fault("delta-padding-mode-zeros")
class DeltaPaddingModeZeros(Apart):
    """The delta's branch pads with zeros whatever the layer's padding mode."""

    def own(self, layer: LayerLike, adapter: Factors) -> LayerLike:
        return _except(super().own(layer, adapter), padding_mode="zeros")


@fault("padding-mode-zeros")
class PaddingModeZeros(Truth):
    """The layer pads with zeros whatever its padding mode, the base's part too, and at strength 0 (LyCORIS's diff)."""

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        plain = _except(layer, padding_mode="zeros") if adapters else layer
        return super().forward(plain, weight, bias, adapters, x)


@fault("delta-dilation-ignored")
class DeltaDilationIgnored(Apart):
    """The delta's kernel not dilated: the larger output cut to size, or broadcast where the base's size is 1."""

    def own(self, layer: LayerLike, adapter: Factors) -> LayerLike:
        return _except(super().own(layer, adapter), dilation=[1] * len(layer.dilation))


@fault("lora-dilation-ignored")
class LoraDilationIgnored(Apart):
    """The same, of a LoRA alone: its two convolutions are made without dilation (PEFT 0.21.2, LyCORIS's bypass)."""

    def own(self, layer: LayerLike, adapter: Factors) -> LayerLike:
        low_rank = adapter.kind == "lora" and "dora_scale" not in adapter.tensors  # a DoRA's weight is built
        plain = {"dilation": [1] * len(layer.dilation)} if low_rank else {}
        return _except(super().own(layer, adapter), **plain)


@fault("stride-before-kernel")
class StrideBeforeKernel(Apart):
    """The stride on the 1×1 down projection, the kernel then unstrided (D8), cut to size."""

    def branch(
        self, layer: LayerLike, adapter: Factors, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor
    ) -> Tensor:
        layer = self.own(layer, adapter)
        if layer.kind == "linear" or max(layer.stride) == 1:
            return _cut(layer, apply(layer, delta, None, x), y)
        coarse = x[(slice(None), slice(None), *(slice(None, None, s) for s in layer.stride))]
        sizes = zip(coarse.shape[2:], layer.padding, layer.dilation, layer.kernel, strict=True)
        if any(n + 2 * p < d * (k - 1) + 1 for n, p, d, k in sizes) or layer.padding_mode != "zeros":
            return torch.zeros_like(y)
        wrong = apply(_except(layer, stride=[1] * len(layer.stride)), delta, None, coarse)
        out = torch.zeros_like(y)
        common = tuple(slice(min(a, b)) for a, b in zip(wrong.shape, y.shape, strict=True))
        out[common] = wrong[common]
        return out


@fault("first-group-input")
class FirstGroupInput(Apart):
    """Every group's delta applied to the first group's input channels (a bypass without groups)."""

    def branch(
        self, layer: LayerLike, adapter: Factors, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor
    ) -> Tensor:
        if layer.groups > 1:
            layer, x = _except(layer, groups=1), x[:, : delta.shape[1]]
        return super().branch(layer, adapter, delta, bias, x, y)


@fault("first-batch-only")
class FirstBatchOnly(Apart):
    """Only the first item of the batch (or first leading index) gets the delta (D3, D4)."""

    def branch(
        self, layer: LayerLike, adapter: Factors, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor
    ) -> Tensor:
        branch = super().branch(layer, adapter, delta, bias, x, y).clone()
        if branch.dim() > 1:
            branch[1:] = 0
        return branch


@fault("kron-groups-in-w2")
class KronGroupsInW2(Apart):
    """A LoKr on a grouped convolution run as w1 over all channels and a grouped w2, or w2_b (LyCORIS 4.1.3's bypass).

    Output channel i·vp+j then reads, of every block k of w1, the channels of the group that w2 has row j in, or that
    w2_b has each of its rows in.
    """

    def branch(
        self, layer: LayerLike, adapter: Factors, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor
    ) -> Tensor:
        wrong = self._ungrouped(layer, adapter, delta.shape)
        if wrong is None:
            return super().branch(layer, adapter, delta, bias, x, y)
        return _cut(layer, apply(_except(self.own(layer, adapter), groups=1), wrong, None, x), y)

    def _ungrouped(self, layer: LayerLike, adapter: Factors, shape: Sequence[int]) -> Tensor | None:
        """What it multiplies with, as a weight (out, in, *kernel) without groups; None where groups play no part."""
        t = adapter.tensors
        if layer.groups == 1 or adapter.kind != "lokr" or adapter.rows or "dora_scale" in t or not adapter.strength:
            return None
        w1 = self.w1(t)
        w2 = self.w2(t, w1, shape)
        low_rank = "lokr_w2_b" in t and "lokr_t2" not in t
        grouped = t["lokr_w2_b"].reshape(-1, *w2.shape[1:]) if low_rank else w2
        if grouped.shape[0] % layer.groups:
            return None
        w2 = _spread(grouped, layer.groups)
        if low_rank:
            w2 = torch.einsum("pr,r...->p...", t["lokr_w2_a"], w2)
        return self.strength(adapter) * self.scale(adapter) * self.kron(w1, w2)


def _spread(grouped: Tensor, groups: int) -> Tensor:
    """A grouped kernel (out, in, …) without groups: (out, groups · in, …), zero but for each row's own group."""
    own: Tensor = grouped.unflatten(0, (groups, -1))
    spread: Tensor = own.new_zeros(*own.shape[:2], groups, *own.shape[2:])
    for group in range(groups):
        spread[group, :, group] = own[group]
    return spread.flatten(2, 3).flatten(0, 1)
