"""The truth against numbers worked out by hand: deltas, scales, strengths, errors, budgets."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fulldiff.cases.model import Layer
from fulldiff.reference import bounds
from fulldiff.reference.bounds import UNIT_ROUNDOFF, budget
from fulldiff.reference.truth import POLICIES, FactorError, Factors, Truth

NAN, INF = math.nan, math.inf


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def lokr(strength: float = 1.0, rank: int | None = None, **tensors: Any) -> Factors:
    """A LoKr from literals: ``w1``, ``w2_a``, ``t2`` …, and ``alpha``."""
    named = {k if k == "alpha" else f"lokr_{k}": f64(v) for k, v in tensors.items()}
    return Factors("lokr", named, strength, rank)


def lora(strength: float = 1.0, **tensors: Any) -> Factors:
    """A LoRA or LoCon from literals: ``up``, ``down``, ``mid`` and ``alpha``."""
    named = {k if k == "alpha" else f"lora_{k}.weight": f64(v) for k, v in tensors.items()}
    return Factors("lora", named, strength)


def assert_delta(adapter: Factors, expected: Any, policy: str = "default") -> None:
    """The delta has exactly the literal's values and shape."""
    delta = Truth(POLICIES[policy]).delta(adapter, torch.zeros_like(f64(expected)))
    assert delta.shape == f64(expected).shape
    assert delta.tolist() == expected


# LoKr: factors to delta.

CORE, CORE2 = [[[1], [2]], [[3], [4]]], [[[1, 5], [2, 6]], [[3, 7], [4, 8]]]

LOKR = {
    "both full": (
        lokr(w1=[[1, 2], [3, 4]], w2=[[0, 5], [6, 7]]),
        [[0, 5, 0, 10], [6, 7, 12, 14], [0, 15, 0, 20], [18, 21, 24, 28]],
    ),
    "both full, not square": (
        lokr(w1=[[1, 2, -1]], w2=[[1, 10], [100, 1000]]),
        [[1, 10, 2, 20, -1, -10], [100, 1000, 200, 2000, -100, -1000]],
    ),
    "conv1d, full w2 (facts page)": (
        lokr(w1=[[1, 2]], w2=[[[1, 2], [3, 4]]]),
        [[[1, 2], [3, 4], [2, 4], [6, 8]]],
    ),
    "conv2d, full w2, w1 of two rows": (
        lokr(w1=[[1], [-2]], w2=[[[[1, 2], [3, 4]]]]),
        [[[[1, 2], [3, 4]]], [[[-2, -4], [-6, -8]]]],
    ),
    "factored w1, rank 1": (
        lokr(w1_a=[[1], [2]], w1_b=[[3, 4]], w2=[[1, -1]]),
        [[3, -3, 4, -4], [6, -6, 8, -8]],
    ),
    "factored w1, rank 3": (lokr(w1_a=[[1, 2, 3]], w1_b=[[1], [1], [1]], w2=[[2]]), [[12]]),
    "low-rank w2": (
        lokr(w1=[[2]], w2_a=[[1], [2], [3]], w2_b=[[4, 5]]),
        [[8, 10], [16, 20], [24, 30]],
    ),
    "low-rank w2 with r = vp = vq is a·b": (
        lokr(w1=[[1]], w2_a=[[1, 1], [0, 1]], w2_b=[[1, 0], [1, 1]]),
        [[2, 1], [1, 1]],
    ),
    "low-rank w2, kernel flattened last": (
        lokr(w1=[[1, 10]], w2_a=[[1], [-1]], w2_b=[[1, 2, 3, 4, 5, 6]]),
        [
            [[1, 2, 3], [4, 5, 6], [10, 20, 30], [40, 50, 60]],
            [[-1, -2, -3], [-4, -5, -6], [-10, -20, -30], [-40, -50, -60]],
        ],
    ),
    "low-rank w2, 2-D kernel": (
        lokr(w1=[[1]], w2_a=[[2]], w2_b=[[1, 2, 3, 4, 5, 6]]),
        [[[[2, 4, 6], [8, 10, 12]]]],
    ),
    "both factored": (
        lokr(w1_a=[[1], [2]], w1_b=[[1]], w2_a=[[1, 1]], w2_b=[[1, 2], [3, 4]]),
        [[4, 6], [8, 12]],
    ),
    # w2 = aᵀ · core · b = [[1, 0], [1, 1]] · [[1, 2], [3, 4]] · b = [[1, 2], [4, 6]] · b
    "tucker, asymmetric core, r = vp": (
        lokr(w1=[[1]], t2=CORE, w2_a=[[1, 1], [0, 1]], w2_b=[[1, 0, 1], [0, 1, 1]]),
        [[[1], [2], [3]], [[4], [6], [10]]],
    ),
    "tucker, kernel of two": (
        lokr(w1=[[1, 2]], t2=CORE2, w2_a=[[1], [0]], w2_b=[[0], [1]]),
        [[[2, 6], [4, 12]]],
    ),
    "tucker, PEFT's conv1d core (r, r, k, 1)": (
        lokr(w1=[[1]], t2=[[[[1], [2]]]], w2_a=[[3]], w2_b=[[1, 10]]),
        [[[3, 6], [30, 60]]],
    ),
    "1×1 conv, 2-D w2": (lokr(w1=[[1, 2]], w2=[[1], [3]]), [[[[1]], [[2]]], [[[3]], [[6]]]]),
    "1×1 conv, 4-D w2": (
        lokr(w1=[[1, 2]], w2=[[[[1]]], [[[3]]]]),
        [[[[1]], [[2]]], [[[3]], [[6]]]],
    ),
}


# LoRA and LoCon.

LORA = {
    "linear": (lora(up=[[1], [2]], down=[[3, 4, 5]]), [[3, 4, 5], [6, 8, 10]]),
    "linear, alpha 1 over rank 2": (
        lora(up=[[2, 0], [0, 4]], down=[[1, 2], [3, 4]], alpha=1),
        [[1, 2], [6, 8]],
    ),
    "1×1 conv with 2-D factors": (lora(up=[[2]], down=[[1, 3]]), [[[2], [6]]]),
    "locon 1-D": (
        lora(up=[[[1]], [[-1]]], down=[[[1, 2, 3], [4, 5, 6]]]),
        [[[1, 2, 3], [4, 5, 6]], [[-1, -2, -3], [-4, -5, -6]]],
    ),
    "locon 2-D, rank 2, alpha 4": (
        lora(up=[[[[1]], [[10]]]], down=[[[[1, 2], [3, 4]]], [[[5, 6], [7, 8]]]], alpha=4),
        [[[[102, 124], [146, 168]]]],
    ),
    # up · mid · down = [[1, 10]] · [[1, 2], [3, 4]] · [[1], [100]] = [[31, 42]] · … = 31 + 4200
    "locon with mid": (
        lora(up=[[[1], [10]]], mid=[[[1], [2]], [[3], [4]]], down=[[[1]], [[100]]]),
        [[[4231]]],
    ),
    "locon with mid, kernel in the middle": (
        lora(up=[[[1]], [[2]]], mid=[[[1, 2, 3]]], down=[[[1], [-1]]], alpha=2),
        [[[2, 4, 6], [-2, -4, -6]], [[4, 8, 12], [-4, -8, -12]]],
    ),
}


@pytest.mark.parametrize("name", LOKR | LORA)
def test_delta_by_hand(name: str) -> None:
    assert_delta(*(LOKR | LORA)[name])


# Scale. Full: no rank; LOW: w2 of rank 2; TWO: w1 of rank 1 and w2 of rank 4.

FULL: dict[str, Any] = {"w1": [[1.0]], "w2": [[1.0]]}
LOW: dict[str, Any] = {"w1": [[1.0]], "w2_a": [[1.0, 0.0]], "w2_b": [[1.0], [0.0]]}
TWO: dict[str, Any] = {
    "w1_a": [[1]],
    "w1_b": [[1]],
    "w2_a": [[1, 0, 0, 0]],
    "w2_b": [[1], [0], [0], [0]],
}


@pytest.mark.parametrize(
    ("policy", "factors", "alpha", "rank", "scale"),
    [
        ("default", FULL, 7, None, 1),
        ("default", FULL, 7, 32, 1),
        ("default", FULL, INF, None, 1),
        ("default", FULL, 0, None, 1),
        ("default", FULL, None, None, 1),
        ("default", LOW, 7, None, 3.5),
        ("default", LOW, 0, None, 0),
        ("default", LOW, None, None, 1),
        ("default", LOW, -2, None, -1),
        ("default", TWO, 8, None, 2),
        ("comfyui", TWO, 8, None, 2),
        ("diffusers", TWO, 8, None, 2),
        ("comfyui-bypass", TWO, 8, None, 8),
        ("invokeai", TWO, 8, None, 8),
        ("invokeai", LOW, 7, None, 3.5),
        ("lycoris", TWO, 8, None, 8),
        ("lycoris", LOW, 0, None, 1),
        ("lycoris", FULL, INF, None, 1),
        ("peft", FULL, 8, 32, 0.25),
        ("peft", FULL, 8, None, 1),
        ("peft", LOW, 8, 2, 4),
    ],
)
def test_a_policy_s_scale(policy: str, factors: Any, alpha: Any, rank: Any, scale: float) -> None:
    adapter = lokr(**factors, rank=rank, **({} if alpha is None else {"alpha": alpha}))
    assert Truth(POLICIES[policy]).scale(adapter) == scale
    assert_delta(adapter, [[scale]], policy)


@pytest.mark.parametrize("alpha", [6, [6], [[6]]])
def test_alpha_may_have_any_one_element_shape(alpha: Any) -> None:
    assert Truth().scale(lokr(**LOW, alpha=alpha)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_alpha_may_have_any_dtype(dtype: torch.dtype) -> None:
    tensors = {**lokr(**LOW).tensors, "alpha": torch.tensor(6, dtype=dtype)}
    assert Truth().scale(Factors("lokr", tensors)) == 3


# Forward: strengths and several adapters.

LINEAR = Layer("linear", out=1, inp=2)
W, BIAS, X = f64([[1, 2]]), f64([100]), f64([[1, 0], [0, 1], [1, 1]])


def forward(*adapters: Factors) -> Any:
    return Truth().forward(LINEAR, W, BIAS, adapters, X).flatten().tolist()


@pytest.mark.parametrize(
    ("strength", "expected"),
    [(1, [104, 107, 111]), (-2, [95, 92, 87]), (0.5, [102.5, 104.5, 107])],
)
def test_strength_multiplies_the_delta(strength: float, expected: list[float]) -> None:
    assert forward(lokr(strength, w1=[[1]], w2=[[3, 5]])) == expected


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_strength_zero_does_not_touch_the_output(value: float) -> None:
    assert forward(lokr(0.0, w1=[[value]], w2=[[value, 1]], alpha=value)) == [101, 102, 103]


def test_two_adapters_sum_each_with_its_strength() -> None:
    y = forward(lokr(2.0, w1=[[1]], w2=[[3, 5]]), lora(-1.0, up=[[1]], down=[[4, 4]]))
    assert y == [103, 108, 111]


# Factors without meaning.

RANK2: dict[str, Any] = {"w2_a": [[1], [1]], "w2_b": [[1], [1]]}
BAD = {
    "w2 transposed": (lokr(w1=[[1, 2]], w2=[[1, 2, 3]]), (3, 2), "(1, 3)"),
    "w1 and w2 swap to another shape": (lokr(w1=[[1], [2]], w2=[[1, 2]]), (1, 4), "(1, 2)"),
    "w1 does not divide": (lokr(w1=[[1], [2], [3]], w2=[[1]]), (4, 1), "(3, 1)"),
    "kernel before inputs": (lokr(w1=[[1]], w2=[[[1], [2], [3]]]), (1, 1, 3), "(1, 3, 1)"),
    "kernel axes swapped": (lokr(w1=[[1]], w2=[[[[1, 2]]]]), (1, 1, 2, 1), "(1, 1, 1, 2)"),
    "low rank with another rank": (lokr(w1=[[1]], w2_a=[[1, 2]], w2_b=[[1, 2]]), (1, 2), "(1, 2)"),
    "factored w1 with another rank": (lokr(w1_a=[[1, 2]], w1_b=[[1]], w2=[[1]]), (1, 1), "(1, 1)"),
    "core of rank 1 beside rank 2": (lokr(w1=[[1]], t2=[[[1]]], **RANK2), (1, 1, 1), "(1, 1, 1)"),
    "up and down swapped": (lora(up=[[1, 2, 3]], down=[[1], [2]]), (2, 3), "(2, 1)"),
    "lora for another layer": (lora(up=[[1]], down=[[1, 2]]), (2, 1), "(1, 2)"),
    "locon kernel axes swapped": (lora(up=[[1]], down=[[[[1, 2]]]]), (1, 1, 2, 1), "(1, 1, 1, 2)"),
}


@pytest.mark.parametrize("name", BAD)
def test_factors_that_do_not_fit_are_an_error_naming_the_shape(name: str) -> None:
    adapter, shape, named = BAD[name]
    with pytest.raises(FactorError, match=re.escape(named)):
        Truth().delta(adapter, torch.zeros(shape, dtype=torch.float64))


def test_an_unknown_kind_is_an_error_naming_the_known_ones() -> None:
    with pytest.raises(FactorError, match=r"'glora' is unknown.*lora, lokr, loha, diff"):
        Truth().delta(Factors("glora", {}), torch.zeros(1, 1))


# The budget of y = 2·3 + (−4)·(−1) + bias 5, with ΔW = 0.5 · (6 / 1) · [1] ⊗ [1]·[−1, 2] = [−3, 6].
# B = (2+3)·3 + (4+6)·1 + 5 = 30 and S² = (4+9)·9 + (16+36)·1 + 25 = 194.
# K = 2 (base) + w1 1+1 + w2_a 1+1 + w2_b 1+2 = 9, m = 2 + 2·3 + 2 = 10.

ONE = lokr(0.5, w1=[[1]], w2_a=[[1]], w2_b=[[-1, 2]], alpha=6)
POINT = (Truth(), LINEAR, f64([[2, -4]]), f64([5]))


def test_lengths_and_stored_values_by_hand() -> None:
    assert bounds.contraction_length(POINT[2], [ONE]) == 9
    assert bounds.stored_values([ONE]) == 10
    assert (bounds.contraction_length(POINT[2], []), bounds.stored_values([])) == (2, 2)


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
def test_budget_by_hand(dtype: str) -> None:
    unit, acc = UNIT_ROUNDOFF[dtype], 2.0**-53 if dtype == "f64" else 2.0**-24
    tiny = bounds.SMALLEST[dtype] * 10 * (1 + 3 * 3)  # the gain: |scale| 3, times w2_b's row sum 1 + 2
    found = budget(*POINT, [ONE], f64([[3, -1]]), dtype)
    assert found.hard.item() == pytest.approx((9 * acc / (1 - 9 * acc) + 10 * unit) * 30 + tiny, rel=1e-12)
    assert found.rms == pytest.approx(bounds.C * (3 * acc + 10**0.5 * unit) * 194**0.5 + tiny, rel=1e-12)


def test_budget_of_strength_zero_is_the_bare_layers() -> None:
    broken = lokr(0.0, w1=[[NAN]], w2=[[INF, NAN]])
    bare, off = (budget(*POINT, adapters, f64([[3, -1]]), "f32") for adapters in ([], [broken]))
    assert (bare.hard.item(), bare.rms) == (off.hard.item(), off.rms)


def test_budget_of_an_empty_batch_is_empty() -> None:
    found = budget(*POINT, [ONE], torch.zeros(0, 2, dtype=torch.float64), "f32")
    assert found.hard.shape == (0, 1)
    assert math.isfinite(found.rms)
