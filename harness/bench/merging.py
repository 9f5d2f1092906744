"""The worker's side of the merge table: how much of a delta survives being merged into a narrow base.

The effective strength is ‖cast(W + ΔW) − W‖ / ‖ΔW‖ projected on ΔW: 1 where nothing is lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulldiff.cases import tensors as generator
from fulldiff.cases.model import Case, MergeCase

CASTS = {"f16": torch.float16, "bf16": torch.bfloat16, "f8_e4m3": torch.float8_e4m3fn}


def run(case: Case) -> dict[str, Any]:
    """``strength`` of the merge of the case's adapters, whose strengths are ‖ΔW‖ / ‖W‖ of each."""
    body = case.body
    assert isinstance(body, MergeCase)
    cast = CASTS[body.dtype]
    weight = _normal(case.seed, "weight", body.layer.weight_shape)
    base = _cast(weight, cast)
    deltas = [_delta(case, index, base) for index in range(len(body.adapters))]
    changed = _merged(base, deltas, cast, body.one_by_one)
    return {"strength": effective(changed - base, sum(deltas[1:], start=deltas[0]))}


def effective(change: Tensor, delta: Tensor) -> dict[str, float]:
    """What arrived: its part along ΔW, and the size of what is not along it, both over ‖ΔW‖."""
    size = float(delta.square().sum())
    along = float((change * delta).sum()) / size
    return {"along": along, "noise": float((change - along * delta).square().sum() / size) ** 0.5}


def _merged(base: Tensor, deltas: list[Tensor], cast: torch.dtype, one_by_one: bool) -> Tensor:
    if not one_by_one:
        return _cast(base + sum(deltas[1:], start=deltas[0]), cast)
    for delta in deltas:
        base = _cast(base + delta, cast)
    return base


def _delta(case: Case, index: int, base: Tensor) -> Tensor:
    """A LoRA's product of the given relative size."""
    assert isinstance(case.body, MergeCase)
    adapter = case.body.adapters[index]
    up, down = (_normal(case.seed, f"{index}.{n}", shape) for n, shape in adapter.factors.items())
    delta = up.flatten(1) @ down.flatten(1)
    size = float(torch.linalg.vector_norm(base) / torch.linalg.vector_norm(delta))
    return delta * (adapter.strength * size)


def _normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(generator.factor("normal", seed, name, shape)).float()


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    narrow: Tensor = t.to(dtype)
    return narrow.float()
