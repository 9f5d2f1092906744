"""Faults of DoRA: the magnitude, the norm and the strength."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fulldiff.reference.factors import DoraAfter
from fulldiff.reference.faults.registry import fault
from fulldiff.reference.layers import LayerLike
from fulldiff.reference.truth import Factors, Truth


@fault("dora-magnitude-ignored")
class DoraMagnitudeIgnored(Truth):
    """The delta applied as if there were no magnitude (D12)."""

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        plain = [
            replace(adapter, tensors={name: t for name, t in adapter.tensors.items() if name != "dora_scale"})
            for adapter in adapters
        ]
        return super().forward(layer, weight, bias, plain, x)


@fault("dora-wrong-axis")
class DoraWrongAxis(Truth):
    """The norm taken per input where the magnitude is per output row, and the other way round."""

    def norm(self, weight: Tensor, moved: Tensor, shape: Sequence[int]) -> Tensor:
        rows = (moved.shape[0], *[1] * (moved.dim() - 1))
        inputs = (1, moved.shape[1], *[1] * (moved.dim() - 2))
        return super().norm(weight, moved, inputs if tuple(shape) == rows else rows)


@fault("dora-row-magnitude-along-inputs")
class DoraRowMagnitudeAlongInputs(Truth):
    """A 1-D magnitude on a square linear layer multiplied along the inputs: m[None] for m[:, None]."""

    def dora(self, adapter: Factors, weight: Tensor) -> Tensor:
        m = adapter.tensors["dora_scale"]
        if m.dim() != 1 or weight.dim() != 2 or weight.shape[0] != weight.shape[1]:
            return super().dora(adapter, weight)
        ones = replace(adapter, tensors={**adapter.tensors, "dora_scale": torch.ones_like(m)})
        return super().dora(ones, weight) * m[None]


@fault("dora-norm-of-base")
class DoraNormOfBase(Truth):
    """‖W‖ for ‖W + ΔW‖ (ComfyUI, magnitudes per output row)."""

    def norm(self, weight: Tensor, moved: Tensor, shape: Sequence[int]) -> Tensor:
        return super().norm(weight, weight, shape)


@fault("dora-norm-of-delta")
class DoraNormOfDelta(Truth):
    """‖ΔW‖ for ‖W + ΔW‖."""

    def norm(self, weight: Tensor, moved: Tensor, shape: Sequence[int]) -> Tensor:
        return super().norm(weight, moved - weight, shape)


@fault("dora-norm-per-kernel-position")
class DoraNormPerKernelPosition(Truth):
    """A convolution's norm taken at each kernel position apart, not over the kernel too."""

    def norm(self, weight: Tensor, moved: Tensor, shape: Sequence[int]) -> Tensor:
        return super().norm(weight, moved, (*shape[:2], *moved.shape[2:]))


@fault("dora-strength-inside")
class DoraStrengthInside(Truth):
    """The strength on ΔW inside the norm, and not on W' − W."""

    def scale(self, adapter: Factors) -> float:
        inside = adapter.strength if "dora_scale" in adapter.tensors else 1.0
        return super().scale(adapter) * inside

    def strength(self, adapter: Factors) -> float:
        return 1.0 if "dora_scale" in adapter.tensors else super().strength(adapter)


@fault("dora-strength-ignored")
class DoraStrengthIgnored(Truth):
    """W' put in place of W whatever the strength (unless it is 0)."""

    def change(self, adapter: Factors, weight: Tensor) -> Tensor:
        whole = replace(adapter, strength=1.0) if "dora_scale" in adapter.tensors else adapter
        return super().change(whole, weight)


@fault("dora-strength-on-magnitude")
class DoraStrengthOnMagnitude(Truth):
    """The strength on the magnitude alone, V · (1 + strength · (m / ‖V‖ − 1)): at 0 the delta stays (LyCORIS 4.1.3)."""

    def counts(self, adapter: Factors) -> bool:
        return "dora_scale" in adapter.tensors or super().counts(adapter)

    def change(self, adapter: Factors, weight: Tensor) -> Tensor:
        if "dora_scale" not in adapter.tensors:
            return super().change(adapter, weight)
        moved = weight + self.scale(adapter) * self.product(adapter, weight.shape)
        return moved + self.strength(adapter) * (self.dora(adapter, weight) - moved) - weight


@fault("dora-base-not-removed")
class DoraBaseNotRemoved(Truth):
    """W' added to W whole: the base counted twice."""

    def change(self, adapter: Factors, weight: Tensor) -> Tensor:
        if "dora_scale" not in adapter.tensors:
            return super().change(adapter, weight)
        return self.strength(adapter) * self.dora(adapter, weight)


# Behind other adapters: rules that some have (`Policy.dora_after`), wrong where a subject says that it has another.


@fault("dora-of-current")
class DoraOfCurrent(Truth):
    """A DoRA behind other adapters taken from what they made of the weight, its norm too (ComfyUI's rule)."""

    @property
    def dora_after(self) -> DoraAfter:
        return "current"


@fault("dora-scales-earlier")
class DoraScalesEarlier(Truth):
    """A DoRA behind other adapters multiplies what they added as it does the base (PEFT's rule)."""

    @property
    def dora_after(self) -> DoraAfter:
        return "scaling"
