"""The truth of LoHa, diff, DoRA, fused parts and mixtures, against numbers worked out by hand."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from literals import EYE, LINEAR, ZERO, adapter, f64

from fulldiff.cases.model import Layer
from fulldiff.reference.truth import POLICIES, FactorError, Factors, Truth


def change(one: Factors, weight: Any) -> Any:
    return Truth().delta(one, f64(weight)).tolist()


# LoHa: [[1], [2]]·[[1, 3]] = [[1, 3], [2, 6]] and [[1, 0], [0, 1]]·[[5, 7], [11, 13]] are multiplied one by one.

HADA: dict[str, Any] = {
    "hada_w1_a": [[1], [2]],
    "hada_w1_b": [[1, 3]],
    "hada_w2_a": [[1, 0], [0, 1]],
    "hada_w2_b": [[5, 7], [11, 13]],
}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [[5, 21], [22, 78]]),
        ({"alpha": 3}, [[15, 63], [66, 234]]),
    ],
)
def test_loha_by_hand_scaled_by_alpha_over_w1_s_rank(more: dict[str, Any], expected: Any) -> None:
    assert change(adapter("loha", **HADA, **more), [[0, 0], [0, 0]]) == expected


def test_loha_s_kernel_is_flattened_last() -> None:
    """[1, 2, 3, 4] ∘ [1, 10, 100, 1000] for two inputs and a kernel of two."""
    b1, b2 = [[1, 2, 3, 4]], [[1, 10, 100, 1000]]
    one = adapter("loha", hada_w1_a=[[1]], hada_w1_b=b1, hada_w2_a=[[1]], hada_w2_b=b2)
    assert change(one, [[[0, 0], [0, 0]]]) == [[[1, 20], [300, 4000]]]


def test_tucker_loha_against_loops() -> None:
    """out 2, in 3, kernel 2, rank 2: every index written out."""
    count = iter(range(1, 100))
    tensors = {
        name: [[next(count) % 7 - 3 for _ in range(columns)] for _ in range(2)]
        for name, columns in (("hada_w1_a", 2), ("hada_w1_b", 3), ("hada_w2_a", 2), ("hada_w2_b", 3))
    }
    cores = {name: [[[next(count) % 5 - 2 for _ in range(2)] for _ in range(2)] for _ in range(2)] for name in "12"}

    def half(number: str, out: int, inp: int, k: int) -> int:
        a, b, core = tensors[f"hada_w{number}_a"], tensors[f"hada_w{number}_b"], cores[number]
        return sum(a[m][out] * core[m][n][k] * b[n][inp] for m, n in product(range(2), range(2)))

    expected = [[[half("1", o, i, k) * half("2", o, i, k) for k in range(2)] for i in range(3)] for o in range(2)]
    one = adapter("loha", **tensors, hada_t1=cores["1"], hada_t2=cores["2"])
    assert change(one, torch.zeros(2, 3, 2).tolist()) == expected
    assert any(value for row in expected for column in row for value in column)


def test_tucker_loha_s_rank_is_w1_b_s_first_size() -> None:
    core, ones = [[[1]] * 3] * 3, [[1, 1]] * 3
    one = adapter(
        "loha", hada_t1=core, hada_t2=core, hada_w1_a=ones, hada_w1_b=ones, hada_w2_a=ones, hada_w2_b=ones, alpha=6
    )
    assert Truth().rank(one) == 3
    assert Truth().scale(one) == 2


# diff, diff_b and the scale tensor.


def forward(*adapters: Factors, weight: Any = ZERO, bias: Any = None, x: Any = EYE) -> Any:
    return Truth().forward(LINEAR, f64(weight), None if bias is None else f64(bias), adapters, f64(x)).tolist()


def test_a_diff_is_added_times_the_strength_whatever_its_alpha() -> None:
    assert change(adapter("diff", -0.5, diff=[[2, 4]], alpha=8), [[1, 1]]) == [[-1, -2]]


def test_a_diff_of_a_1x1_convolution_may_be_flat() -> None:
    assert change(adapter("diff", diff=[[2, 4]]), [[[1], [1]]]) == [[[2], [4]]]


@pytest.mark.parametrize(("bias", "expected"), [(None, [[5, -10]]), ([1, 1], [[6, -9]])])
def test_a_bias_delta_is_strength_times_diff_b_also_without_a_bias(bias: Any, expected: Any) -> None:
    lora = adapter("lora", 0.5, up=[[0], [0]], down=[[1, 1]], alpha=7, diff_b=[10, -20])
    assert forward(lora, bias=bias, x=[[1, 1]]) == expected


def test_bias_deltas_sum() -> None:
    both = (adapter("diff", 2.0, diff_b=[1, 2]), adapter("diff", -1.0, diff_b=[10, 10]))
    assert forward(*both, x=[[3, 5]]) == [[-8, -6]]


def test_a_bias_delta_leaves_the_caller_s_bias_alone() -> None:
    bias = f64([1, 1])
    Truth().forward(LINEAR, f64(ZERO), bias, [adapter("diff", diff_b=[1, 2])], f64(EYE))
    assert bias.tolist() == [1, 1]


@pytest.mark.parametrize("scale", [3, [3], [[3]]])
def test_a_scale_tensor_takes_the_place_of_alpha_over_rank(scale: Any) -> None:
    one = adapter("lora", up=[[1], [2]], down=[[1, 1]], alpha=100, scale=scale)
    assert change(one, ZERO) == [[3, 3], [6, 6]]


# DoRA. V = [[1, 2], [1, 0]] + [[2], [3]]·[[1, 1]] = [[3, 4], [4, 3]], of norm 5 in each row and column.

BASE: Any = [[1, 2], [1, 0]]
FACTORS: dict[str, Any] = {"up": [[2], [3]], "down": [[1, 1]]}


@pytest.mark.parametrize(
    ("magnitude", "expected"),
    [
        ([[5], [10]], [[3, 4], [8, 6]]),  # per row
        ([5, 10], [[3, 4], [8, 6]]),  # 1-D on a square layer: per row
        ([[5, 10]], [[3, 8], [4, 6]]),  # per input
    ],
)
def test_dora_by_hand_on_both_axes(magnitude: Any, expected: Any) -> None:
    moved = change(adapter("lora", **FACTORS, dora_scale=magnitude), BASE)
    assert (f64(moved) + f64(BASE)).tolist() == expected


# C = W + [[3, 4], [4, 3]] behind a diff; C + ΔW = [[6, 8], [8, 6]], of norms 10. The diff before it, and after it.
@pytest.mark.parametrize(
    ("policy", "behind", "before"),
    [
        ("default", [[6, 8], [12, 9]], [[6, 8], [12, 9]]),  # m / 5 · V + the diff
        ("peft", [[6, 8], [16, 12]], [[6, 8], [12, 9]]),  # m / 5 · (C + ΔW)
        ("comfyui", [[3, 4], [8, 6]], [[6, 8], [12, 9]]),  # m / 10 · (C + ΔW)
    ],
)
def test_dora_behind_another_adapter_by_each_rule(policy: str, behind: Any, before: Any) -> None:
    both = [adapter("diff", diff=[[3, 4], [4, 3]]), adapter("lora", **FACTORS, dora_scale=[[5], [10]])]
    for adapters, expected in ((both, behind), (both[::-1], before)):
        assert sum(Truth(POLICIES[policy]).deltas(adapters, f64(BASE)), start=f64(BASE)).tolist() == expected


def test_dora_of_the_current_weight_has_its_strength_outside() -> None:
    """C + ½ · ([[3, 4], [8, 6]] − C) with C = [[4, 6], [5, 3]]."""
    both = [adapter("diff", diff=[[3, 4], [4, 3]]), adapter("lora", 0.5, **FACTORS, dora_scale=[[5], [10]])]
    found = sum(Truth(POLICIES["comfyui"]).deltas(both, f64(BASE)), start=f64(BASE))
    assert found.tolist() == [[3.5, 5], [6.5, 4.5]]


def test_dora_s_strength_is_outside_the_norm() -> None:
    """½ · ([[3, 4], [8, 6]] − W)."""
    moved = change(adapter("lora", 0.5, **FACTORS, dora_scale=[[5], [10]]), BASE)
    assert moved == [[1, 1], [3.5, 3]]


def test_dora_s_alpha_is_inside_the_norm() -> None:
    """alpha 2 over rank 1: half the factors give the same V."""
    halved = adapter("lora", up=[[1], [1.5]], down=[[1, 1]], alpha=2, dora_scale=[[5], [10]])
    assert change(halved, BASE) == change(adapter("lora", **FACTORS, dora_scale=[[5], [10]]), BASE)


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        ("lokr", {"lokr_w1": [[2], [3]], "lokr_w2": [[1, 1]]}),
        ("loha", {"hada_w1_a": [[2], [3]], "hada_w1_b": [[1, 1]], "hada_w2_a": [[1], [1]], "hada_w2_b": [[1, 1]]}),
    ],
)
def test_dora_decomposes_every_low_rank_kind_alike(kind: str, tensors: dict[str, Any]) -> None:
    assert change(adapter(kind, **tensors, dora_scale=[[5], [10]]), BASE) == [[2, 2], [7, 6]]


@pytest.mark.parametrize(("magnitude", "norm"), [([[[8]]], 4), ([8], 4), ([[[8, 8]]], None)])
def test_dora_s_norm_runs_over_the_kernel_too(magnitude: Any, norm: float | None) -> None:
    """One output, two inputs, a kernel of two: a row of four ones, of norm 2 (per input: none of its kind)."""
    one = adapter("lora", up=[[1]], down=[[1, 1, 1, 1]], dora_scale=magnitude)
    if norm is None:
        with pytest.raises(FactorError, match=r"dora_scale \(1, 1, 2\) fits neither"):
            change(one, [[[0, 0], [0, 0]]])
    else:
        assert change(one, [[[0, 0], [0, 0]]]) == [[[norm, norm], [norm, norm]]]


def test_dora_per_input_over_the_kernel() -> None:
    """V = [[[3, 4], [0, 2]]]: inputs of norm 5 and 2."""
    one = adapter("lora", up=[[1]], down=[[3, 4, 0, 2]], dora_scale=[[[10], [3]]])
    assert change(one, [[[0, 0], [0, 0]]]) == [[[6, 8], [0, 3]]]


@pytest.mark.parametrize("magnitude", [[1, 2, 3], [[1, 2, 3]], [[[1], [2], [3]]]])
def test_a_magnitude_of_the_inputs_size_is_per_input(magnitude: Any) -> None:
    """2 outputs, 3 inputs; V = rows [1, 1, 1] and [0, 0, 0]: every column has norm 1."""
    one = adapter("lora", up=[[1], [0]], down=[[1, 1, 1]], dora_scale=magnitude)
    assert change(one, [[0, 0, 0], [0, 0, 0]]) == [[1, 2, 3], [0, 0, 0]]


def test_a_row_of_norm_zero_stays_zero() -> None:
    one = adapter("lora", up=[[1], [0]], down=[[3, 4]], dora_scale=[[10], [10]])
    assert change(one, ZERO) == [[6, 8], [0, 0]]


# Parts of a fused layer, and several kinds on one layer.


def test_rows_outside_a_part_are_zero() -> None:
    """v of a qkv with 2, 1 and 1 rows; the base is not zero, so DoRA's norm is of those rows alone."""
    weight = [[1, 1], [1, 1], [1, 1], [3, 4]]
    assert change(adapter("lora", rows=(3, 4), up=[[2]], down=[[1, 5]]), weight) == [[0, 0]] * 3 + [[2, 10]]
    dora = adapter("lora", rows=(3, 4), up=[[0]], down=[[1, 5]], dora_scale=[10])
    assert change(dora, weight) == [[0, 0]] * 3 + [[3, 4]]


def test_a_part_s_bias_delta_is_in_its_rows() -> None:
    assert forward(adapter("diff", 2.0, (1, 2), diff_b=[5]), x=[[0, 0]]) == [[0, 10]]


def test_q_and_v_of_unequal_sizes_by_hand() -> None:
    layer, x = Layer("linear", out=4, inp=1), f64([[1]])
    q, v = adapter("lora", rows=(0, 2), up=[[1], [2]], down=[[1]]), adapter("diff", rows=(3, 4), diff=[[7]])
    y = Truth().forward(layer, f64([[10], [20], [30], [40]]), None, [q, v], x)
    assert y.tolist() == [[11, 22, 30, 47]]


def test_each_delta_is_taken_from_the_base_weight() -> None:
    """The diff does not move what the DoRA normalises."""
    diff, dora = adapter("diff", diff=[[100, 100], [100, 100]]), adapter("lora", **FACTORS, dora_scale=[[5], [10]])
    for pair in ((diff, dora), (dora, diff)):
        assert forward(*pair, weight=BASE) == [[103, 108], [104, 106]]


# Refused by name.

BAD = {
    "magnitude of no size": (adapter("lora", **FACTORS, dora_scale=[1, 2, 3]), ZERO, "dora_scale (3,)"),
    "magnitude of the whole weight": (adapter("lora", **FACTORS, dora_scale=ZERO), ZERO, "dora_scale (2, 2)"),
    "magnitude of one number": (adapter("lora", **FACTORS, dora_scale=1), ZERO, "dora_scale ()"),
    "DoRA of a diff": (adapter("diff", diff=ZERO, dora_scale=[1, 2]), ZERO, "diff with dora_scale"),
    "norm layer": (adapter("diff", w_norm=[1, 2]), ZERO, "diff with w_norm"),
    "loha without w2_b": (adapter("loha", hada_w1_a=[[1]], hada_w1_b=[[1]], hada_w2_a=[[1]]), [[0]], "hada_w2_b"),
    "loha halves differ": (
        adapter("loha", hada_w1_a=[[1]], hada_w1_b=[[1, 1]], hada_w2_a=[[1]], hada_w2_b=[[1]]),
        [[0, 0]],
        "(1, 1)",
    ),
    "diff of another shape": (adapter("diff", diff=[[1, 2, 3]]), ZERO, "(1, 3)"),
    "rows beyond the weight": (adapter("diff", rows=(1, 3), diff=ZERO), ZERO, "rows 1 to 3"),
    "oft": (adapter("oft", oft_blocks=[[1]]), ZERO, "'oft' is unknown"),
    "lora without down": (adapter("lora", up=[[1], [1]]), ZERO, "lora_down.weight"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_an_error_that_names_it(name: str) -> None:
    one, weight, named = BAD[name]
    with pytest.raises(FactorError, match=re.escape(named)):
        change(one, weight)


def test_a_bias_delta_of_another_size_is_an_error_that_names_it() -> None:
    with pytest.raises(FactorError, match=re.escape("diff_b is (3,)")):
        forward(adapter("diff", diff_b=[1, 2, 3]))
