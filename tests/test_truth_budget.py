"""The error budget of a DoRA, against numbers worked out by hand and the worst rounding."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from literals import EYE, LINEAR, ZERO, adapter, f64
from torch import Tensor

from fulldiff.cases.model import Layer
from fulldiff.reference.bounds import UNIT_ROUNDOFF, budget
from fulldiff.reference.truth import POLICIES, Factors, Truth

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


# Behind a diff C = [3, 2] for W = [3, 0]; ‖A‖ / ‖V‖ = 1 and |M| = 2 as above. K = 13, m = 19 with the diff's.
@pytest.mark.parametrize(
    ("policy", "low_rank", "spoiled"),
    [
        ("peft", 4, 3 * 3 + 3 * (2 + 4)),  # A = [3, 4]; C + ΔW = [3, 6], of size [3, 6]
        ("comfyui", 2, 3 * 3 + 3 * (2 + 2)),  # A = [3, 2 + 2]
    ],
)
def test_dora_s_budget_behind_another_adapter_by_hand(policy: str, low_rank: float, spoiled: float) -> None:
    both = [adapter("diff", diff=[[0, 2]]), adapter("lora", up=[[1]], down=[[0, low_rank]], dora_scale=[10])]
    layer, unit = Layer("linear", out=1, inp=2), 2.0**-24
    error = 13 * unit / (1 - 13 * unit) + 19 * unit
    found = budget(Truth(POLICIES[policy]), layer, f64([[3, 0]]), None, both, f64([[1, 1]]), "f32")
    assert found.magnitude.item() == pytest.approx(2 * 5 + 2 * spoiled / (1 - 2 * error), rel=1e-12)


@pytest.mark.parametrize("policy", ["default", "peft", "comfyui"])
@pytest.mark.parametrize("seed", range(20))
def test_the_same_steps_in_f32_stay_within_the_budget(policy: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).double()

    layer, truth = Layer("linear", out=5, inp=7), Truth(POLICIES[policy])
    factors = [{"lora_up.weight": random(5, 2), "lora_down.weight": random(2, 7)} for _ in range(3)]
    factors[1]["dora_scale"] = random(5, 1)
    factors[2]["dora_scale"] = random(5, 1)
    strengths = (1.0, 1.0, 1.0) if seed % 2 else (-1.0, 0.5, 2.0)
    adapters = [Factors("lora", t, strength) for t, strength in zip(factors, strengths, strict=True)]
    weight, x = random(5, 7), random(4, 7)
    narrow = [replace(own, tensors={name: t.float() for name, t in own.tensors.items()}) for own in adapters]
    got = truth.forward(layer, weight.float(), None, narrow, x.float()).double()
    want, allowed = (
        truth.forward(layer, weight, None, adapters, x),
        budget(truth, layer, weight, None, adapters, x, "f32"),
    )
    assert bool(((got - want).abs() <= allowed.hard).all())
    assert (got - want).square().mean().sqrt() <= allowed.rms


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
