"""Each fault differs from the truth where its step matters, and is the truth where it does not."""

from __future__ import annotations

import pytest
import torch
from fault_pairs import PAIRS, Setting, conv, linear, lokr, lora, rank2
from msgspec import structs

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.harness.judge import judge
from fulldiff.harness.subjects.faulty import Faulty
from fulldiff.reference.faults import FAULTS
from fulldiff.reference.truth import Truth


def test_the_table_covers_the_faults_exactly() -> None:
    assert PAIRS.keys() == FAULTS.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_the_fault_differs_from_the_truth(name: str) -> None:
    setting = PAIRS[name].differs
    wrong, right = setting.run(FAULTS[name]), setting.run(Truth())
    assert wrong.shape == right.shape
    assert wrong.isfinite().all()
    assert not torch.equal(wrong, right)


@pytest.mark.parametrize("name", PAIRS)
def test_the_fault_is_the_truth_where_its_step_does_not_matter(name: str) -> None:
    setting = PAIRS[name].equals
    right = setting.run(Truth())
    assert torch.equal(setting.run(FAULTS[name]), right)
    assert right.any()


@pytest.mark.parametrize("name", FAULTS)
def test_without_adapters_a_fault_is_the_truth(name: str) -> None:
    setting = linear(1, 2, weight=[[5, 6]], bias=[7])
    assert setting.run(FAULTS[name]).tolist() == [[12], [13]]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_says_what_goes_wrong(name: str) -> None:
    kind = type(FAULTS[name])
    assert "__doc__" in vars(kind)
    assert kind.__doc__


# Wrong values by hand: what the fault gives, and what is right.

VALUES = {
    "scale-twice": ([[4, 8, 12], [16, 20, 24]], [[2, 4, 6], [8, 10, 12]]),
    "scale-twice-but-lora": ([[4, 8, 12], [16, 20, 24]], [[2, 4, 6], [8, 10, 12]]),
    "missing-alpha-is-one": ([[0.5, 1, 1.5], [2, 2.5, 3]], [[1, 2, 3], [4, 5, 6]]),
    "kron-swapped": ([[3, 6, 4, 8]], [[3, 4, 6, 8]]),
    "w2-a-then-b": ([[1, 1], [1, 2]], [[2, 1], [1, 1]]),
    "kernel-not-last": ([[[1, 3], [2, 4]]], [[[1, 2], [3, 4]]]),
    "kron-not-unsqueezed": ([[[1, 2], [2, 4], [3, 4], [6, 8]]], [[[1, 2], [3, 4], [2, 4], [6, 8]]]),
    "kernel-flipped": ([[[2, 1]]], [[[1, 2]]]),
    "kernel-axes-swapped": ([[[[1, 3], [2, 4]]]], [[[[1, 2], [3, 4]]]]),
    "loha-matrix-product": ([[4, 6], [4, 6]], [[1, 2], [3, 4]]),
    "fused-down-split": ([[1], [1], [0], [0]], [[3], [3], [0], [0]]),
    "diff-scaled": ([[3, 6]], [[1, 2]]),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_wrong_delta_by_hand(name: str) -> None:
    setting, (wrong, right) = PAIRS[name].differs, VALUES[name]
    weight = torch.zeros(setting.layer.weight_shape, dtype=torch.float64)
    assert FAULTS[name].delta(setting.adapters[0], weight).tolist() == wrong
    assert Truth().delta(setting.adapters[0], weight).tolist() == right


OUTPUTS = {
    "delta-padding-mode-zeros": ([3, 6, 9, 7], [7, 6, 9, 8]),
    "padding-mode-zeros": ([0 + 3, 1 + 6, 2 + 9, 3 + 7], [4 + 7, 1 + 6, 2 + 9, 3 + 8]),
    "delta-dilation-ignored": ([3, 6], [5, 10]),
    "lora-dilation-ignored": ([3 + 5, 6 + 10], [5 + 5, 10 + 10]),
    "stride-before-kernel": ([4, 0], [3, 7]),
    "first-group-input": ([1, 3], [1, 6]),
    "kron-groups-in-w2": ([201, 10050, 403, 20150], [21, 105, 4300, 21500]),
    "first-batch-only": ([3, 0], [3, 5]),
    "bias-twice": ([15, 16], [8, 9]),
    "fused-rows-packed": ([1, 1, 5, 0], [1, 1, 0, 5]),
    "fused-part-after-gap-dropped": ([1, 1, 0, 0], [1, 1, 0, 5]),
    "fused-equal-parts": ([6, 1, 0, 0], [5, 1, 1, 0]),
    "first-kind-only": ([1, 2], [2, 4]),
    "lokr-ignored": ([1, 2], [2, 4]),
    "dora-of-current": ([3, 8, 4, 6], [6, 12, 8, 9]),
    "dora-scales-earlier": ([6, 16, 8, 12], [6, 12, 8, 9]),
    "bias-delta-needs-bias": ([0, 1], [3, 4]),
    "dora-magnitude-ignored": ([3, 4, 4, 3], [3, 8, 4, 6]),
    "dora-strength-on-magnitude": ([3, 3 * 4, 4, 3 * 3], [5, 15, 6, 12]),
    "dora-row-magnitude-along-inputs": ([3, 4, 8, 6], [3, 8, 4, 6]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_wrong_output_by_hand(name: str) -> None:
    setting, (wrong, right) = PAIRS[name].differs, OUTPUTS[name]
    assert setting.run(FAULTS[name]).flatten().tolist() == wrong
    assert setting.run(Truth()).flatten().tolist() == right


@pytest.mark.parametrize(("alpha", "ratio"), [(8, 4), (2, 1), (1, 0.5)])
def test_scale_twice_over_the_truth_is_alpha_over_rank(alpha: float, ratio: float) -> None:
    setting = rank2(alpha=alpha)
    assert torch.equal(setting.run(FAULTS["scale-twice"]), ratio * setting.run(Truth()))


@pytest.mark.parametrize("name", ["kernel-flipped", "kernel-axes-swapped", "kernel-not-last"])
def test_kernel_faults_show_in_a_low_rank_lokr_and_in_a_locon(name: str) -> None:
    flat = [[1, 2, 3, 4, 5, 6, 7, 8]]
    for adapter in (lokr(w1=[[1]], w2_a=[[1]], w2_b=flat), lora(up=[[1]], down=flat)):
        setting = Setting(conv(1, 2, 2, 2), (adapter,))
        assert not torch.equal(setting.run(FAULTS[name]), setting.run(Truth()))


@pytest.mark.parametrize(("share", "outcome"), [(0.1, "wrong"), (1e-12, "passed")])
def test_a_scale_that_is_off_is_found_where_it_is_more_than_rounding(share: float, outcome: str) -> None:
    case = structs.replace(CATALOGUE["d1-low-rank"], seed=3)
    normal = structs.replace(case, body=structs.replace(case.body, values="normal"))
    assert judge(normal, Faulty(f"scale-off-{share}"), lambda stage: None).outcome == outcome


def test_a_delta_that_is_not_dilated_is_broadcast_over_a_base_of_one_position() -> None:
    setting = Setting(conv(1, 1, 2, dilation=2), (lokr(w1=[[1]], w2=[[[1, 1]]]),), x=[[[1, 2, 4]]])
    assert setting.run(Truth()).tolist() == [[[5]]]
    assert setting.run(FAULTS["delta-dilation-ignored"]).tolist() == [[[3, 6]]]
