"""Tensors, factors and a small layer written as literals, for what is worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulldiff.cases.model import Layer
from fulldiff.reference.truth import Factors

LINEAR = Layer("linear", out=2, inp=2)
ZERO, EYE = [[0, 0], [0, 0]], [[1, 0], [0, 1]]


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def adapter(kind: str, strength: float = 1.0, rows: tuple[int, int] | None = None, **tensors: Any) -> Factors:
    """Factors from literals, named as in a file but for ``up``, ``down`` and ``mid``."""
    long = {name: f"lora_{name}.weight" for name in ("up", "down", "mid")}
    named = {long.get(name, name): f64(values) for name, values in tensors.items()}
    return Factors(kind, named, strength, rows=rows)
