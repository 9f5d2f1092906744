"""What a wrong output looks like where no known fault gives it: a ratio, an order, some rows."""

from __future__ import annotations

import torch
from torch import Tensor

# A ratio is constant if it varies by less than this.
RATIO_SPREAD = 1e-2


def describe(kind: str, got: Tensor, want: Tensor, allowed: Tensor) -> str:
    """What a layer's wrong output looks like beside the right one; ``allowed`` is the error of rounding."""
    if got.shape != want.shape:
        shapes = f"shape {tuple(got.shape)} for {tuple(want.shape)}"
        same = got.numel() == want.numel() and bool(((got.flatten() - want.flatten()).abs() <= allowed.flatten()).all())
        return f"the right numbers in {shapes}" if same else shapes
    if not got.isfinite().all():
        return "not finite"
    if not got.any():
        return "no delta at all"
    wrong = (got - want).abs() > allowed
    if not wrong.any():
        return "the delta is right, the sum with the base is not"
    axis = got.dim() - 1 if kind == "linear" else 1
    return ", ".join(filter(None, (_ratio(got, want), _order(got, want), _rows(wrong, want != 0, axis))))


def _ratio(got: Tensor, want: Tensor) -> str:
    at = want != 0
    if not at.any() or got[~at].any():
        return ""
    ratio = got[at] / want[at]
    mean = float(ratio.mean())
    return f"{mean:.4g} times the right delta" if float((ratio - mean).abs().max()) <= RATIO_SPREAD * abs(mean) else ""


def _order(got: Tensor, want: Tensor) -> str:
    same = torch.allclose(got.flatten().sort().values, want.flatten().sort().values, rtol=RATIO_SPREAD)
    return "the right numbers in another order" if same else ""


def _rows(wrong: Tensor, any_delta: Tensor, axis: int) -> str:
    """The wrong output rows, where others that have a delta are right."""
    bad, filled = (each.movedim(axis, 0).reshape(each.shape[axis], -1).any(1) for each in (wrong, any_delta))
    if not (filled & ~bad).any():
        return ""
    return f"only output rows {', '.join(map(str, bad.nonzero().flatten().tolist()))} of {len(bad)}"
