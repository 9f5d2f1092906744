"""How much error rounding alone may cause: the hard bound per element and the statistical bound.

Notation: u is the unit roundoff of the dtype, u_acc that of the accumulator, K the sum of the
contraction lengths, m the number of values stored (and so rounded) on the way, B the output of the
layer with every number replaced by its magnitude, S the root of the same with every number squared
(the size of a sum of random signs). γ_K(u) = K·u / (1 − K·u) (Higham, Accuracy and Stability of
Numerical Algorithms, §3.1).

- hard: |error| ≤ (γ_K(u_acc) + m·u) · B + underflow, for every element;
- statistical: RMS(error) ≤ C · (√K·u_acc + √m·u) · RMS(S) + underflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fulldiff.reference.layers import LayerLike, apply
from fulldiff.reference.truth import Factors, Truth

UNIT_ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
SMALLEST = {"f64": 2.0**-1074, "f32": 2.0**-149, "bf16": 2.0**-133, "f16": 2.0**-24}
LARGEST = {"f64": 1.797e308, "f32": 3.4028e38, "bf16": 3.3895e38, "f16": 65504.0}

# Chosen once, then fixed: 1,100 generated cases of two correct subjects used at most 45 % of any budget.
# It trades missed scale errors against false alarms.
C = 3.0


@dataclass(frozen=True)
class Budget:
    """The error that a correct subject may show: ``hard`` per element, ``rms`` over all.

    ``magnitude`` is B: beyond the dtype's largest number even a correct subject may overflow.
    """

    hard: Tensor
    magnitude: Tensor
    rms: float


def budget(
    truth: Truth,
    layer: LayerLike,
    weight: Tensor,
    bias: Tensor | None,
    adapters: Sequence[Factors],
    x: Tensor,
    dtype: str,
) -> Budget:
    """The budget of one output; arguments as in `Truth.forward`, ``dtype`` the subject's own."""
    active = [adapter for adapter in adapters if adapter.strength]
    unit, unit_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["f64" if dtype == "f64" else "f32"]
    length = contraction_length(weight, active)
    stored = stored_values(active)
    tiny = SMALLEST[dtype] * stored * (1 + sum(_gain(truth, adapter) for adapter in active))
    magnitude = _sized(truth, layer, weight, bias, active, x, power=1)
    squares = _sized(truth, layer, weight, bias, active, x, power=2)
    gamma = length * unit_acc / (1 - length * unit_acc)
    size = math.sqrt(float(squares.mean())) if squares.numel() else 0.0
    rms = C * (math.sqrt(length) * unit_acc + math.sqrt(stored) * unit) * size + tiny
    return Budget((gamma + stored * unit) * magnitude + tiny, magnitude, rms)


def contraction_length(weight: Tensor, adapters: Sequence[Factors]) -> int:
    """K: the base's own contraction plus every dimension of every factor (an upper limit)."""
    lengths = [size for adapter in adapters for t in adapter.tensors.values() for size in t.shape]
    return weight[0].numel() + sum(lengths)


def stored_values(adapters: Sequence[Factors]) -> int:
    """m: the base's output and the result, and per adapter each factor cast and applied, and its sum."""
    return 2 + sum(2 * len(adapter.tensors) + 2 for adapter in adapters)


def _sized(
    truth: Truth,
    layer: LayerLike,
    weight: Tensor,
    bias: Tensor | None,
    adapters: Sequence[Factors],
    x: Tensor,
    power: int,
) -> Tensor:
    """The layer's output with every number replaced by its magnitude to the ``power``."""
    total = weight.abs() ** power
    for adapter in adapters:
        factor = abs(truth.strength(adapter) * truth.scale(adapter)) ** power
        total = total + factor * truth.product(_magnitudes(adapter, power), weight.shape)
    return apply(layer, total, None if bias is None else bias.abs() ** power, x.abs() ** power)


def _magnitudes(adapter: Factors, power: int) -> Factors:
    return replace(adapter, tensors={name: t.abs() ** power for name, t in adapter.tensors.items()})


def _gain(truth: Truth, adapter: Factors) -> float:
    """How much a value that underflows in one factor may grow through the others, at most."""
    factors = [t for name, t in adapter.tensors.items() if name != "alpha"]
    norms = [max(1.0, *(float(sums.max()) for sums in _line_sums(t))) for t in factors]
    return abs(truth.strength(adapter) * truth.scale(adapter)) * math.prod(norms)


def _line_sums(t: Tensor) -> list[Tensor]:
    """The magnitudes summed over all but the first and all but the second dimension."""
    magnitudes = torch.nan_to_num(t).abs().flatten(2).sum(-1) if t.dim() > 2 else torch.nan_to_num(t).abs()
    return [magnitudes.sum(0), magnitudes.sum(1)]
