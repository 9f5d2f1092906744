"""The error budget of a DoRA, against numbers worked out by hand and the worst rounding."""

from __future__ import annotations

from itertools import product

import pytest
from literals import EYE, LINEAR, ZERO, adapter, f64

from fulldiff.cases.model import Layer
from fulldiff.reference.bounds import UNIT_ROUNDOFF, budget
from fulldiff.reference.truth import Truth

# The budget of a DoRA, y = W' x: W = [3, 0], ΔW = 2·[0, 2] → V = [3, 4], ‖V‖ = 5, m = 10, x = [1, 1].
# K = 2 (base) + up 1+1 + down 1+2 + dora_scale 1 + norm 2 = 10; m = 2 + 5 + 2·3 + 2 = 15.


def test_dora_s_budget_by_hand() -> None:
    one = adapter("lora", 0.5, up=[[1]], down=[[0, 2]], alpha=2, dora_scale=[10])
    layer, unit = Layer("linear", out=1, inp=2), 2.0**-24
    error = 10 * unit / (1 - 10 * unit) + 15 * unit
    # A = |W| + |scale·ΔW| = [3, 4] of norm 5, so 1 + ‖A‖/‖V‖ = 2; |M| = 10 / 5 = 2.
    sizes = [2 * (a + 2 * v) / (1 - 2 * error) + w for a, v, w in ((3, 3, 3), (4, 4, 0))]
    magnitude = 3 + 0.5 * sum(sizes)
    # S² = W² + ¼·(M²·(A² + V²·(Σ V²A² / 5⁴ + 1)) + W²), with Σ V²A² = 3⁴ + 4⁴ = 337.
    spread = 337 / 625 + 1
    squares = 9 + 0.25 * (4 * (9 + 9 * spread) + 9 + 4 * (16 + 16 * spread))
    found = budget(Truth(), layer, f64([[3, 0]]), None, [one], f64([[1, 1]]), "f32")
    assert found.magnitude.item() == pytest.approx(magnitude, rel=1e-12)
    assert found.hard.item() == pytest.approx(error * magnitude, rel=1e-12)
    assert found.rms == pytest.approx(3 * (10**0.5 * unit + 15**0.5 * unit) * squares**0.5, rel=1e-12)


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
def test_where_the_norm_is_zero_nothing_is_asked(dtype: str) -> None:
    one = adapter("lora", up=[[1], [0]], down=[[3, 4]], dora_scale=[[10], [10]])
    found = budget(Truth(), LINEAR, f64(ZERO), None, [one], f64([[1, 1]]), dtype)
    assert found.magnitude[0].isfinite().tolist() == [True, False]
    assert 0 < found.rms < 1000


def test_the_hard_bound_holds_for_the_worst_rounding_of_v() -> None:
    """V perturbed by e·A in the directions that turn it the most: W' moves by no more than the budget."""
    layer, unit = Layer("linear", out=1, inp=2), 2.0**-24
    one = adapter("lora", up=[[1]], down=[[0.5, -3]], dora_scale=[1])
    weight = f64([[1, 2.5]])
    error = 10 * unit / (1 - 10 * unit) + 15 * unit
    size = f64([1.5, 5.5])
    for signs in product((-1, 1), repeat=2):
        wrong = f64([1.5, -0.5]) + error * size * f64(signs)
        for x in EYE:
            hard = budget(Truth(), layer, weight, None, [one], f64([x]), "f32").hard.item()
            right = Truth().forward(layer, weight, None, [one], f64([x])).item()
            assert abs((wrong / wrong.norm() * f64(x)).sum().item() - right) <= hard
