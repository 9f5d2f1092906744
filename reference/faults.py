"""Known wrong ways to compute, each a named, runnable variant of the truth with one step wrong.

`FAULTS` maps a name to an instance. Most were seen in shipped implementations; the docstring of
each says what goes wrong. A harness that does not tell every one of them from the truth is useless,
so the test suite runs each as a subject.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fulldiff.reference.layers import LayerLike, apply
from fulldiff.reference.truth import Factors, Truth

FAULTS: dict[str, Truth] = {}


def fault(name: str) -> Any:
    """Register the decorated class under ``name``."""

    def register(kind: type[Truth]) -> type[Truth]:
        FAULTS[name] = kind()
        return kind

    return register


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


# Scale and strength


@fault("scale-twice")
class ScaleTwice(Truth):
    """alpha / rank applied twice (LyCORIS 4.1.3's merge)."""

    def scale(self, adapter: Factors) -> float:
        return super().scale(adapter) ** 2


@fault("scale-ignored")
class ScaleIgnored(Truth):
    """alpha never read."""

    def scale(self, adapter: Factors) -> float:
        return 1.0


@fault("alpha-not-divided")
class AlphaNotDivided(Truth):
    """alpha used as the scale, not divided by the rank."""

    def scale(self, adapter: Factors) -> float:
        return (self.alpha(adapter) or 1.0) if self.rank(adapter) else 1.0


@fault("missing-alpha-is-one")
class MissingAlphaIsOne(Truth):
    """A missing alpha read as 1, so that the scale is 1 / rank."""

    def scale(self, adapter: Factors) -> float:
        rank = self.rank(adapter)
        return 1 / rank if self.alpha(adapter) is None and rank else super().scale(adapter)


@fault("both-full-scaled")
class BothFullScaled(Truth):
    """alpha applied although w1 and w2 are full (an alpha of 10^10 then destroys the image)."""

    def scale(self, adapter: Factors) -> float:
        both_full = self.rank(adapter) is None
        return (self.alpha(adapter) or 1.0) if both_full else super().scale(adapter)


@fault("rank-from-in-features")
class RankFromInFeatures(Truth):
    """The rank read off the wrong axis of the low-rank factor."""

    def rank(self, adapter: Factors) -> int | None:
        t = adapter.tensors
        names = ("lora_down.weight", "lokr_w2_b", "lokr_w1_b")
        return next((t[name].shape[1] for name in names if name in t), None)


@fault("rank-one-unscaled")
class RankOneUnscaled(Truth):
    """Rank 1 forces scale 1 (stable-diffusion.cpp, D7: the trailing dimension of 1 is dropped)."""

    def scale(self, adapter: Factors) -> float:
        return 1.0 if self.rank(adapter) == 1 else super().scale(adapter)


@fault("strength-ignored")
class StrengthIgnored(Truth):
    """The user's multiplier never read."""

    def strength(self, adapter: Factors) -> float:
        return 1.0


@fault("strength-squared")
class StrengthSquared(Truth):
    """The multiplier applied to both factors."""

    def strength(self, adapter: Factors) -> float:
        return adapter.strength**2


@fault("strength-unsigned")
class StrengthUnsigned(Truth):
    """A negative multiplier loses its sign."""

    def strength(self, adapter: Factors) -> float:
        return abs(adapter.strength)


# Factors


@fault("kron-swapped")
class KronSwapped(Truth):
    """w2 ⊗ w1 for w1 ⊗ w2."""

    def kron(self, w1: Tensor, w2: Tensor) -> Tensor:
        blocks = torch.einsum("ik,jl...->jilk...", w1, w2)
        return blocks.flatten(2, 3).flatten(0, 1)


@fault("w1-transposed")
class W1Transposed(Truth):
    """A square w1 read as its transpose."""

    def w1(self, t: Mapping[str, Tensor]) -> Tensor:
        w1 = super().w1(t)
        return w1.T if w1.shape[0] == w1.shape[1] else w1


@fault("w2-transposed")
class W2Transposed(Truth):
    """A square w2 read as its transpose."""

    def w2(self, t: Mapping[str, Tensor], w1: Tensor, shape: Sequence[int]) -> Tensor:
        w2 = super().w2(t, w1, shape)
        return w2.transpose(0, 1) if w2.shape[0] == w2.shape[1] else w2


@fault("w2-a-then-b")
class W2AThenB(Truth):
    """The low-rank factors in the wrong order, where sizes allow it (D1: r = vp = vq)."""

    def low_rank(self, a: Tensor, b: Tensor) -> Tensor:
        return b @ a if a.shape == b.shape and a.shape[0] == a.shape[1] else a @ b


@fault("kernel-not-last")
class KernelNotLast(Truth):
    """The flattened kernel of w2_b or of a 2-D down read as (kernel, in) for (in, kernel)."""

    def place(self, product: Tensor, shape: Sequence[int]) -> Tensor:
        if product.dim() == 2 and len(shape) > 2:
            product = product.unflatten(1, (-1, shape[1])).transpose(1, 2).flatten(1)
        return super().place(product, shape)


@fault("kron-not-unsqueezed")
class KronNotUnsqueezed(Truth):
    """Conv1d with a full w2: the 2-D w1 aligned with w2's trailing dimensions (PEFT 0.21.2)."""

    def kron(self, w1: Tensor, w2: Tensor) -> Tensor:
        if w2.dim() != 3:
            return super().kron(w1, w2)
        blocks = torch.einsum("ik,lmn->limkn", w1, w2)
        up, uq = w1.shape
        return blocks.reshape(w2.shape[0] * up, uq * w2.shape[1], w2.shape[2])


@fault("tucker-core-ignored")
class TuckerCoreIgnored(Truth):
    """The core read nowhere (D13): its place taken by the identity at every kernel position."""

    def tucker(self, core: Tensor, a: Tensor, b: Tensor) -> Tensor:
        identity = torch.eye(core.shape[0], dtype=core.dtype).reshape(*core.shape[:2], *[1] * (core.dim() - 2))
        return super().tucker(identity.expand(core.shape), a, b)


@fault("tucker-core-transposed")
class TuckerCoreTransposed(Truth):
    """The core's two rank axes swapped."""

    def tucker(self, core: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return super().tucker(core.transpose(0, 1), a, b)


@fault("tucker-a-not-transposed")
class TuckerANotTransposed(Truth):
    """Tucker's a, stored (r, vp), read as (vp, r) where r = vp."""

    def tucker(self, core: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return super().tucker(core, a.T if a.shape[0] == a.shape[1] else a, b)


@fault("kernel-flipped")
class KernelFlipped(Truth):
    """The delta's kernel mirrored (convolution for cross-correlation)."""

    def product(self, adapter: Factors, shape: Sequence[int]) -> Tensor:
        return super().product(adapter, shape).flip(list(range(2, len(shape))))


@fault("kernel-axes-swapped")
class KernelAxesSwapped(Truth):
    """The delta's kernel height and width swapped, where they are equal."""

    def product(self, adapter: Factors, shape: Sequence[int]) -> Tensor:
        delta = super().product(adapter, shape)
        return delta.transpose(-1, -2) if len(shape) > 3 and shape[-1] == shape[-2] else delta


# Several adapters, base and bias


@fault("first-adapter-only")
class FirstAdapterOnly(Truth):
    """Of several adapters on a layer only the first counts."""

    def output(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, deltas: Sequence[Tensor], x: Tensor
    ) -> Tensor:
        return super().output(layer, weight, bias, deltas[:1], x)


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

    def output(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, deltas: Sequence[Tensor], x: Tensor
    ) -> Tensor:
        return super().output(layer, torch.zeros_like(weight) if deltas else weight, bias, deltas, x)


@fault("bias-twice")
class BiasTwice(_Apart):
    """The delta's branch adds the layer's bias again."""

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        return apply(layer, delta, bias, x)


# The delta's own convolution


@fault("delta-padding-mode-zeros")
class DeltaPaddingModeZeros(_Apart):
    """The delta's branch pads with zeros whatever the layer's padding mode."""

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        return apply(_except(layer, padding_mode="zeros"), delta, None, x)


@fault("delta-dilation-ignored")
class DeltaDilationIgnored(_Apart):
    """The delta's kernel not dilated (what is missing at the edge is padded)."""

    def branch(self, layer: LayerLike, delta: Tensor, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        wrong = apply(_except(layer, dilation=[1] * len(layer.dilation)), delta, None, x)
        return wrong[tuple(slice(size) for size in y.shape)]


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
