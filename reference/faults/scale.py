"""Faults of scale and strength."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fulldiff.reference.faults.registry import fault
from fulldiff.reference.truth import Factors, Truth


class ScaleOff(Truth):
    """A scale off by a share: how small a share is still found measures the budgets, see `fulldiff faults`."""

    def __init__(self, share: float) -> None:
        super().__init__()
        object.__setattr__(self, "share", share)

    def scale(self, adapter: Factors) -> float:
        share: float = self.share  # type: ignore[attr-defined]
        return super().scale(adapter) * (1 + share)


@fault("scale-twice")
class ScaleTwice(Truth):
    """alpha / rank applied twice."""

    def scale(self, adapter: Factors) -> float:
        return super().scale(adapter) ** 2


@fault("scale-twice-but-lora")
class ScaleTwiceButLora(Truth):
    """alpha / rank applied twice to a LoKr or LoHa, once to a LoRA (LyCORIS 4.1.3's merge)."""

    def scale(self, adapter: Factors) -> float:
        return super().scale(adapter) ** (1 if adapter.kind == "lora" else 2)


@fault("scale-ignored")
class ScaleIgnored(Truth):
    """alpha never read."""

    def scale(self, adapter: Factors) -> float:
        return 1.0


@fault("alpha-not-divided")
class AlphaNotDivided(Truth):
    """alpha used as the scale, not divided by the rank."""

    def scale(self, adapter: Factors) -> float:
        rank = self.rank(adapter) if self.alpha(adapter) and "scale" not in adapter.tensors else None
        return super().scale(adapter) * (rank or 1)


@fault("missing-alpha-is-one")
class MissingAlphaIsOne(Truth):
    """A missing alpha read as 1, so that the scale is 1 / rank."""

    def scale(self, adapter: Factors) -> float:
        rank = None if {"alpha", "scale"} & adapter.tensors.keys() else self.rank(adapter)
        return 1 / rank if rank else super().scale(adapter)


@fault("both-full-scaled")
class BothFullScaled(Truth):
    """alpha applied although w1 and w2 are full (an alpha of 10^10 then destroys the image)."""

    def scale(self, adapter: Factors) -> float:
        both_full = adapter.kind == "lokr" and self.rank(adapter) is None
        return (self.alpha(adapter) or 1.0) if both_full else super().scale(adapter)


@fault("rank-from-in-features")
class RankFromInFeatures(Truth):
    """The rank read off the wrong axis of the low-rank factor."""

    def rank(self, adapter: Factors) -> int | None:
        t = adapter.tensors
        names = ("lora_down.weight", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")
        return next((t[name].shape[1] for name in names if name in t), None)


@fault("rank-one-unscaled")
class RankOneUnscaled(Truth):
    """Rank 1 forces scale 1 (stable-diffusion.cpp, D7: the trailing dimension of 1 is dropped)."""

    def scale(self, adapter: Factors) -> float:
        one = self.rank(adapter) == 1 and "scale" not in adapter.tensors
        return 1.0 if one else super().scale(adapter)


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


@fault("scale-in-f32")
class ScaleInF32(Truth):
    """strength · scale kept in f32, also where layer and factors are f64."""

    def change(self, adapter: Factors, weight: Tensor) -> Tensor:
        if "dora_scale" in adapter.tensors:
            return super().change(adapter, weight)
        factor = torch.tensor(self.strength(adapter) * self.scale(adapter), dtype=torch.float32)
        return float(factor) * self.product(adapter, weight.shape)


@fault("scale-tensor-ignored")
class ScaleTensorIgnored(Truth):
    """A LoRA's ``scale`` tensor not read: alpha / rank in its place."""

    def scale(self, adapter: Factors) -> float:
        return super().scale(_without(adapter, "scale"))


@fault("diff-scaled")
class DiffScaled(Truth):
    """A diff scaled by alpha / rank, its first dimension taken for a rank."""

    def scale(self, adapter: Factors) -> float:
        if adapter.kind != "diff" or "diff" not in adapter.tensors:
            return super().scale(adapter)
        alpha = self.alpha(adapter)
        return 1.0 if alpha is None else alpha / adapter.tensors["diff"].shape[0]


@fault("orphan-alpha-applied")
class OrphanAlphaApplied(Truth):
    """An alpha that belongs to no low-rank factor, beside a diff, taken for a scale."""

    def scale(self, adapter: Factors) -> float:
        alpha = self.alpha(adapter) if adapter.kind == "diff" else None
        return super().scale(adapter) if alpha is None else alpha


@fault("bias-delta-scaled")
class BiasDeltaScaled(Truth):
    """diff_b multiplied by alpha / rank as the weight's delta is."""

    def add_bias(self, bias: Tensor | None, adapter: Factors, weight: Tensor) -> Tensor | None:
        return super().add_bias(bias, replace(adapter, strength=adapter.strength * self.scale(adapter)), weight)


def _without(adapter: Factors, name: str) -> Factors:
    """The adapter without one of its tensors."""
    return replace(adapter, tensors={n: t for n, t in adapter.tensors.items() if n != name})
