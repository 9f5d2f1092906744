"""What loaded patches mean for a weight: W + Σ strength · ΔW in float64, and the rounding a merge may show.

Deltas as in `Truth`, under its policy; alpha / rank is 1 where the file has no alpha; a patch of strength 0 is not
looked at. A bias or a normalisation's weight is a weight of one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fulldiff.reference.bounds import SMALLEST, UNIT_ROUNDOFF, contraction_length, delta_sizes, stored_values
from fulldiff.reference.load import LoadError, Patch
from fulldiff.reference.truth import Factors, Truth

UNMERGED = {"glora": "GLoRA", "set_weight": "a replaced weight"}


def merged(truth: Truth, weight: Tensor, patches: Sequence[Patch]) -> Tensor:
    """W + Σ ΔW for ``weight`` (out, …), float64; raises LoadError and FactorError."""
    return sum(truth.deltas(active(patches), weight), start=weight)


def budget(truth: Truth, weight: Tensor, patches: Sequence[Patch], dtype: str) -> Tensor:
    """The most that each element may be off by: sums in f32, one rounding to ``dtype`` at the end.

    With the notation of `bounds`: (γ_K(u) + m·u)·B of the f32 sum, u its unit roundoff, and u(dtype) of the result.
    """
    adapters, unit = active(patches), UNIT_ROUNDOFF["f64" if dtype == "f64" else "f32"]
    length = contraction_length(weight, adapters)
    error = length * unit / (1 - length * unit) + stored_values(adapters) * unit
    size = sum(delta_sizes(truth, weight, adapters, 1, error), start=weight.abs())
    whole = merged(truth, weight, patches).abs() + error * size
    return error * size + UNIT_ROUNDOFF[dtype] * whole + SMALLEST[dtype]


def active(patches: Sequence[Patch]) -> list[Factors]:
    """The patches that change the weight, in float64; raises LoadError for a kind that has no delta."""
    return [_factors(patch) for patch in patches if patch.strength]


def _factors(patch: Patch) -> Factors:
    if patch.kind in UNMERGED:
        raise LoadError(f"{patch.file}: {UNMERGED[patch.kind]} has no delta to merge; remove the layer from the file")
    wide = {name: tensor.double() for name, tensor in patch.tensors.items()}
    return Factors(patch.kind, wide, patch.strength, rows=patch.rows)
