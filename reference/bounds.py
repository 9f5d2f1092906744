"""How much error rounding alone may cause: the hard bound per element and the statistical bound.

Notation: u is the unit roundoff of the dtype, u_acc that of the accumulator, K the sum of the
contraction lengths, m the number of values stored (and so rounded) on the way, B the output of the
layer with every number replaced by its magnitude, S the root of the same with every number squared
(the size of a sum of random signs). γ_K(u) = K·u / (1 − K·u) (Higham, Accuracy and Stability of
Numerical Algorithms, §3.1).

- hard: |error| ≤ (γ_K(u_acc) + m·u) · B + underflow, for every element;
- statistical: RMS(error) ≤ C · (√K·u_acc + √m·u) · RMS(S) + underflow.

DoRA, W' = M ∘ V with V = W + scale·ΔW and M = m / ‖V‖. Let e = γ_K(u_acc) + m·u and A = |W| + |scale·ΔW|
with all its numbers replaced by their magnitudes, so that V is computed with |error| ≤ e·A. The norm's
relative error is then at most ρ = e·(1 + ‖A‖/‖V‖), by the triangle inequality and for its own sum of
squares, and that of 1/‖V‖ at most ρ/(1 − ρ). So W' is off by no more than
e · |M| ∘ (A + |V|·(1 + ‖A‖/‖V‖)) / (1 − ρ), the second-order term being within the 1/(1 − ρ). This over e
takes the place of |scale·ΔW| in B, with |W| for the subtraction of W. Where a policy has a DoRA start from what
earlier adapters made of W, their magnitudes are in |W| too. In S the norm's error is
Σ V²A²/‖V‖⁴ + 1 instead, squared: errors of random sign. Where ‖V‖ is 0 or ρ ≥ 1 the magnitude is
infinite: nothing is asked of such an output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fulldiff.reference.layers import LayerLike
from fulldiff.reference.truth import Factors, Truth

UNIT_ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
SMALLEST = {"f64": 2.0**-1074, "f32": 2.0**-149, "bf16": 2.0**-133, "f16": 2.0**-24}
LARGEST = {"f64": 1.797e308, "f32": 3.4028e38, "bf16": 3.3895e38, "f16": 65504.0}

# Chosen once, then fixed: 4,000 generated cases of two correct subjects used at most 54 % of any budget.
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
    sums: str = "",
) -> Budget:
    """The budget of one output; arguments as in `Truth.forward`.

    ``dtype`` is what the subject stores values in, ``sums`` what it sums in: f32, or f64 for f64, unless given.
    """
    active = [adapter for adapter in adapters if adapter.strength]
    unit, unit_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[sums or ("f64" if dtype == "f64" else "f32")]
    length = contraction_length(weight, active)
    stored = stored_values(active)
    # From K = 1/u on the hard bound allows anything, and the statistical one judges alone.
    error = length * unit_acc / (1 - length * unit_acc) + stored * unit if length * unit_acc < 1 else math.inf
    tiny = SMALLEST[dtype] * stored * _gain(truth, active, weight)
    magnitude = _sized(truth, layer, weight, bias, active, x, 1, error)
    squares = _sized(truth, layer, weight, bias, active, x, 2, error)
    judged = squares[squares.isfinite()]
    size = math.sqrt(float(judged.mean())) if judged.numel() else 0.0
    rms = C * (math.sqrt(length) * unit_acc + math.sqrt(stored) * unit) * size + tiny
    return Budget(error * magnitude + tiny, magnitude, rms)


def contraction_length(weight: Tensor, adapters: Sequence[Factors]) -> int:
    """K: the base's own contraction plus every dimension of every factor (an upper limit).

    A LoHa's two ranks may be run through as one, their product; a DoRA's norm is a sum of its own.
    """
    lengths = [size for adapter in adapters for t in _factors(adapter) for size in t.shape]
    ranks = [math.prod(a.tensors[f"hada_w{i}_b"].shape[0] for i in (1, 2)) for a in adapters if a.kind == "loha"]
    norms = [weight.numel() // a.tensors["dora_scale"].numel() for a in adapters if "dora_scale" in a.tensors]
    return weight[0].numel() + sum(lengths) + sum(ranks) + sum(norms)


def stored_values(adapters: Sequence[Factors]) -> int:
    """m: the base's output and the result, and per adapter each factor cast and applied, and its sum.

    A DoRA stores V, ‖V‖, m / ‖V‖, W' and W' − W besides.
    """
    dora = sum(5 for adapter in adapters if "dora_scale" in adapter.tensors)
    return 2 + dora + sum(2 * len(_factors(adapter)) + 2 for adapter in adapters)


def _factors(adapter: Factors) -> list[Tensor]:
    """The tensors that are multiplied into the delta; not the numbers that become its scale."""
    return [t for name, t in adapter.tensors.items() if name not in ("alpha", "scale")]


def _sized(
    truth: Truth,
    layer: LayerLike,
    weight: Tensor,
    bias: Tensor | None,
    adapters: Sequence[Factors],
    x: Tensor,
    power: int,
    error: float,
) -> Tensor:
    """The layer's output, by the truth's own way to apply deltas, of every number's magnitude to the ``power``."""
    offset = None if bias is None else bias.abs() ** power
    for adapter in adapters:
        if "diff_b" in adapter.tensors:
            offset = weight.new_zeros(weight.shape[0]) if offset is None else offset
            factor = abs(truth.strength(adapter)) ** power
            offset[truth.rows(adapter, weight)] += factor * adapter.tensors["diff_b"].abs() ** power
    sizes = delta_sizes(truth, weight, adapters, power, error)
    parts = [(_magnitudes(adapter, power), size) for adapter, size in zip(adapters, sizes, strict=True)]
    return truth.output(layer, weight.abs() ** power, offset, parts, x.abs() ** power)


def delta_sizes(truth: Truth, weight: Tensor, adapters: Sequence[Factors], power: int, error: float) -> list[Tensor]:
    """Each delta with every number replaced by its magnitude to the ``power``, in the weight's shape."""
    sizes, made = dict.fromkeys(("base", "current"), weight.abs() ** power), []
    for adapter, *ground in _grounds(truth, adapters, weight):
        rows, factor = truth.rows(adapter, weight), abs(truth.strength(adapter)) ** power
        base, start = ((numbers[rows], sizes[name][rows]) for name, numbers in ground)
        size = torch.zeros_like(weight)
        size[rows] = factor * _delta_size(truth, adapter, base, start, power, error)
        made.append(size)
        sizes["current"] = sizes["current"] + size
    return made


def _grounds(
    truth: Truth, adapters: Sequence[Factors], weight: Tensor
) -> Iterator[tuple[Factors, tuple[str, Tensor], tuple[str, Tensor]]]:
    """Each adapter with the weight that a DoRA's norm is of, and the one that it moves; see `Policy.dora_after`."""
    base = ("base", weight)
    if truth.dora_after == "base":
        yield from ((adapter, base, base) for adapter in adapters)
        return
    current = ("current", weight)
    for adapter, delta in zip(adapters, truth.deltas(adapters, weight), strict=True):
        yield adapter, current if truth.dora_after == "current" else base, current
        current = ("current", current[1] + delta)


def _delta_size(
    truth: Truth, adapter: Factors, base: tuple[Tensor, Tensor], start: tuple[Tensor, Tensor], power: int, error: float
) -> Tensor:
    """The size of one adapter's delta without its strength: |scale·ΔW|, or that of a DoRA's W' − W.

    ``base`` is the weight that a DoRA's norm is of, ``start`` the one that it moves: numbers and sizes.
    """
    (weight, size_of_weight), (moved, size_of_moved) = base, start
    product = truth.product(_magnitudes(adapter, power), weight.shape)
    size = abs(truth.scale(adapter)) ** power * product
    if "dora_scale" not in adapter.tensors:
        return size
    change = truth.scale(adapter) * truth.product(adapter, weight.shape)
    normed, moved = weight + change, moved + change
    magnitude, whole = truth.magnitude(adapter, weight.shape), size_of_weight + size
    norm = normed.square().sum_to_size(magnitude.shape).sqrt()
    if power == 1:
        spread = 1 + whole.square().sum_to_size(norm.shape).sqrt() / norm
        spoiled, sound = (size_of_moved + size + moved.abs() * spread) / (1 - error * spread), error * spread < 1
    else:
        spread = 1 + (normed.square() * whole).sum_to_size(norm.shape) / norm**4
        spoiled, sound = size_of_moved + size + moved.square() * spread, norm > 0
    size = (magnitude / norm).abs() ** power * spoiled + size_of_moved
    return torch.where(sound & (norm > 0), size, torch.inf)


def _magnitudes(adapter: Factors, power: int) -> Factors:
    """The adapter with every number's magnitude, that of its factors to the ``power``."""
    sizes = {name: t.abs() ** (1 if name in ("alpha", "scale") else power) for name, t in adapter.tensors.items()}
    return replace(adapter, tensors=sizes, strength=abs(adapter.strength) ** power)


def _gain(truth: Truth, adapters: Sequence[Factors], weight: Tensor) -> float:
    """How much a value that underflows in one factor may grow through what it is multiplied with, at most."""
    total = 1.0
    for adapter, (_, base), (_, start) in _grounds(truth, adapters, weight):
        factors = [t for t in _factors(adapter) if t.dim() > 1]
        norms = [max(1.0, *(float(sums.max()) for sums in _line_sums(t))) for t in factors]
        strength, growth = abs(truth.strength(adapter)), _growth(truth, adapter, base, start)
        # What stands there already has underflowed too, and a DoRA moves it.
        moved = strength * growth if "dora_scale" in adapter.tensors and truth.dora_after != "base" else 0.0
        total = total * (1 + moved) + strength * max(1.0, abs(truth.scale(adapter))) * math.prod(norms) * growth
    return total


def _growth(truth: Truth, adapter: Factors, base: Tensor, start: Tensor) -> float:
    """How much an error in one element of V may grow in W': |M| · (1 + √n · |moved| / ‖V‖), for norms of n elements.

    ``base`` is the weight in V, ``start`` the one that is moved: V itself, or as little as V, unless they differ.
    """
    if "dora_scale" not in adapter.tensors:
        return 1.0
    rows = truth.rows(adapter, base)
    base, start = base[rows], start[rows]
    magnitude = truth.magnitude(adapter, base.shape)
    change = truth.scale(adapter) * truth.product(adapter, base.shape)
    norm = (base + change).square().sum_to_size(magnitude.shape).sqrt()
    share = ((start + change).abs() / norm).clamp(min=1)
    largest = magnitude.abs() / norm * (1 + math.sqrt(base.numel() / magnitude.numel()) * share)
    finite = largest[largest.isfinite()]
    return 1.0 + (float(finite.max()) if finite.numel() else 0.0)


def _line_sums(t: Tensor) -> list[Tensor]:
    """The magnitudes summed over all but the first and all but the second dimension."""
    magnitudes = torch.nan_to_num(t).abs().flatten(2).sum(-1) if t.dim() > 2 else torch.nan_to_num(t).abs()
    return [magnitudes.sum(0), magnitudes.sum(1)]
