"""Faults of the delta's own branch: bias, padding, dilation, stride, groups, batch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fulldiff.reference.faults.registry import fault
from fulldiff.reference.layers import LayerLike, apply
from fulldiff.reference.truth import Factors, Truth


def _except(layer: LayerLike, **changes: Any) -> Any:
    """The layer with some fields changed."""
    names = ("kind", "kernel", "stride", "padding", "dilation", "padding_mode", "groups")
    return SimpleNamespace(**{name: getattr(layer, name) for name in names} | changes)


class _Apart(Truth):
    """Base and delta applied apart, as runtime implementations do; subclasses spoil `branch`."""

    def output(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, deltas: Sequence[Tensor], x: Tensor
    ) -> Tensor:
        y = apply(layer, weight, bias, x)
        for delta in deltas:
            y = y + self.branch(layer, delta, bias, x, y)
        return y

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        return apply(layer, delta, None, x)


@fault("bias-twice")
class BiasTwice(_Apart):
    """The delta's branch adds the layer's bias again."""

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        return apply(layer, delta, bias, x)


@fault("delta-padding-mode-zeros")
class DeltaPaddingModeZeros(_Apart):
    """The delta's branch pads with zeros whatever the layer's padding mode."""

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        return apply(_except(layer, padding_mode="zeros"), delta, None, x)


@fault("padding-mode-zeros")
class PaddingModeZeros(Truth):
    """The layer with its new weight pads with zeros whatever its padding mode, the base's part too."""

    def output(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, deltas: Sequence[Tensor], x: Tensor
    ) -> Tensor:
        plain = _except(layer, padding_mode="zeros") if deltas else layer
        return super().output(plain, weight, bias, deltas, x)


@fault("delta-dilation-ignored")
class DeltaDilationIgnored(_Apart):
    """The delta's kernel not dilated: the larger output cut to size, or broadcast where the base's size is 1."""

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        return _undilated(layer, delta, x, y)


def _undilated(layer: LayerLike, delta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The delta's output without dilation, cut to the size of ``y``, or whole along a dimension of size 1."""
    wrong = apply(_except(layer, dilation=[1] * len(layer.dilation)), delta, None, x)
    spatial = [slice(None if size == 1 else size) for size in y.shape[2:]]
    return wrong if layer.kind == "linear" else wrong[(slice(None), slice(None), *spatial)]


@fault("lora-dilation-ignored")
class LoraDilationIgnored(Truth):
    """The same, of a LoRA alone: its two convolutions are made without dilation (PEFT 0.21.2, LyCORIS's bypass)."""

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        wrong = [a for a in adapters if a.kind == "lora" and a.strength and "dora_scale" not in a.tensors]
        for adapter in wrong:
            bias = self.add_bias(bias, adapter, weight)
        right = super().forward(layer, weight, bias, [a for a in adapters if all(a is not other for other in wrong)], x)
        return sum((_undilated(layer, self.delta(a, weight), x, right) for a in wrong), start=right)


@fault("stride-before-kernel")
class StrideBeforeKernel(_Apart):
    """The stride on the 1×1 down projection, the kernel then unstrided (D8), cut to size."""

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        if layer.kind == "linear" or max(layer.stride) == 1:
            return apply(layer, delta, None, x)
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
class FirstGroupInput(_Apart):
    """Every group's delta applied to the first group's input channels (a bypass without groups)."""

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        if layer.groups == 1:
            return apply(layer, delta, None, x)
        return apply(_except(layer, groups=1), delta, None, x[:, : delta.shape[1]])


@fault("first-batch-only")
class FirstBatchOnly(_Apart):
    """Only the first item of the batch (or first leading index) gets the delta (D3, D4)."""

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        branch = apply(layer, delta, None, x)
        if branch.dim() > 1:
            branch[1:] = 0
        return branch


@fault("kron-groups-in-w2")
class KronGroupsInW2(Truth):
    """A LoKr on a grouped convolution run as w1 over all channels and a grouped w2 (LyCORIS 4.1.3's bypass).

    Output channel i·vp+j then reads, of every block k of w1, the channels of w2's own group of j.
    """

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        wrong = [self._ungrouped(layer, weight, adapter) for adapter in adapters]
        right = [adapter for adapter, delta in zip(adapters, wrong, strict=True) if delta is None]
        y = super().forward(layer, weight, bias, right, x)
        for delta in wrong:
            y = y if delta is None else y + apply(_except(layer, groups=1), delta, None, x)
        return y

    def _ungrouped(self, layer: LayerLike, weight: Tensor, adapter: Factors) -> Tensor | None:
        """What it multiplies with, as a weight (out, in, *kernel) without groups; None where groups play no part."""
        t = adapter.tensors
        if layer.groups == 1 or adapter.kind != "lokr" or adapter.rows or "dora_scale" in t or not adapter.strength:
            return None
        w1 = self.w1(t)
        w2 = self.w2(t, w1, weight.shape)
        if w2.shape[0] % layer.groups:
            return None
        # (groups, vp / groups, groups, vq, *kernel): w2 on the diagonal of the two axes of groups.
        grouped = w2.unflatten(0, (layer.groups, -1))
        spread = grouped.new_zeros(*grouped.shape[:2], layer.groups, *grouped.shape[2:])
        for group in range(layer.groups):
            spread[group, :, group] = grouped[group]
        return self.strength(adapter) * self.scale(adapter) * self.kron(w1, spread.flatten(2, 3).flatten(0, 1))
