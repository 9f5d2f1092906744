"""Joins by hand, and each named wrong join against the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fulldiff.harness.bench.join import JOIN_FAULTS as NAMES
from fulldiff.reference.factors import FactorError, Factors
from fulldiff.reference.faults.joins import JOIN_FAULTS
from fulldiff.reference.join import Join, Part, Setting, ranks_of
from fulldiff.reference.truth import Truth

SHAPE = (2, 2)


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def part(up: Any, down: Any, weight: float = 1.0, file: int = 0, text: bool = False, **numbers: float) -> Part:
    tensors = {"lora_up.weight": f64(up), "lora_down.weight": f64(down)}
    return Part(Factors("lora", tensors | {n: f64(v) for n, v in numbers.items()}), weight, file, text)


# One of rank 1 with scale 2, one of rank 2 with scale 1/2: 2·[[1,2],[0,0]] and [[0,0],[1,2]]/2 scaled by -1.
ONE = part([[1], [0]], [[1, 2]], alpha=2.0)
TWO = part([[0, 0], [1, 2]], [[1, 0], [0, 1]], -1.0, 1, alpha=1.0)


def test_a_join_is_the_sum_of_weighted_deltas() -> None:
    assert Join().joined([ONE, TWO], SHAPE).tolist() == [[2, 4], [-0.5, -1]]
    assert Join().joined([], SHAPE).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("diagonal", "want"),
    [([1, 1, 1], [[2, 4], [-0.5, -1]]), ([1, 0, 0], [[2, 4], [0, 0]]), ([0, 0, 2.5], [[0, 0], [0, -2.5]])],
)
def test_toggled_is_the_sum_over_the_diagonal(diagonal: list[float], want: list[list[float]]) -> None:
    assert Join().toggled([ONE, TWO], diagonal, SHAPE).tolist() == want


def test_a_diagonal_per_file_and_one_per_rank() -> None:
    # The first of three files adapts another layer: its numbers are not used here.
    parts = [part([[1], [0]], [[1, 2]], file=1), part([[0, 0], [1, 2]], [[1, 0], [0, 1]], file=2)]
    assert Join().diagonal(parts, Setting([9, 2, 3], [2, 1, 2])) == [2, 3, 3]
    assert Join().diagonal(parts, Setting([9, 9, 2, 3, 4], [2, 1, 2])) == [2, 3, 4]


def test_running_and_realised_have_the_scale_once() -> None:
    setting = Setting([1, 0], [1, 2], -2.0)
    assert Join().running([ONE, TWO], setting, SHAPE).tolist() == [[-4, -8], [0, 0]]
    assert Join().realised([ONE, TWO], setting, SHAPE).tolist() == [[-4, -8], [0, 0]]


def test_a_core_is_split_by_its_rows() -> None:
    tensors = {
        "lora_up.weight": f64([[1.0, 2.0]]).reshape(1, 2, 1),
        "lora_mid.weight": f64([[1.0, 2.0], [3.0, 4.0]]).reshape(2, 2, 1),
        "lora_down.weight": f64([[1.0], [10.0]]).reshape(2, 1, 1),
        "alpha": f64(4.0),
    }
    whole = Part(Factors("lora", tensors), 1.0)
    alone = [Join().joined([one], (1, 1, 1)).item() for one in ranks_of(whole)]
    assert alone == [2 * 21, 2 * 2 * 43]
    assert sum(alone) == Truth().delta(whole.adapter, torch.zeros(1, 1, 1).double()).item()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Join().toggled([ONE], [1.0, 1.0], SHAPE), r"a diagonal of 2 for ranks \[1\]"),
        (lambda: Part(Factors("lokr", {"lokr_w1": f64([[1.0]])}), 1.0).rank, "a lokr of lokr_w1 has no place"),
    ],
)
def test_what_has_no_meaning_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(FactorError, match=message):
        call()


# What each fault gives for ONE and TWO, [joined], or for a setting, by hand.

SETTING = Setting([0.5, 2], [1, 2], 3.0)
TEXT = [part([[1], [0]], [[1, 2]], text=True)]
MISSING = [part([[1], [0]], [[1, 2]], file=1)]


def joined(fault: Join) -> list[list[float]]:
    return fault.joined([ONE, TWO], SHAPE).tolist()


def running(fault: Join, parts: list[Part], setting: Setting = SETTING) -> list[list[float]]:
    return fault.running(parts, setting, SHAPE).tolist()


RIGHT = [[2, 4], [-0.5, -1]]
WRONG: dict[str, tuple[Callable[[Join], Any], Any, Any]] = {
    # (√2·[1,0] with √½·[[0],[1]]…): the first rank's ups and downs each sum.
    "linear-cross-terms": (
        lambda f: f.joined([ONE, part([[0], [1]], [[1, 0]], 2.0, 1)], SHAPE).tolist(),
        [[4, 4], [4, 4]], [[2, 4], [2, 0]]
    ),
    "lpl-average": (
        lambda f: f.joined([ONE, part([[0], [1]], [[1, 0]], 1.0, 1)], SHAPE).tolist(),
        [[4, 4], [2, 2]], [[2, 4], [1, 0]]
    ),
    "concat-squared-ratios": (
        lambda f: f.joined([part([[1], [0]], [[3, 0]], 2.0), TWO], SHAPE).tolist(),
        [[4, 0], [-1 / 3, -2 / 3]],
        [[6, 0], [-0.5, -1]],
    ),
    "rslora-root-again": (
        lambda f: f.joined([ONE, part([[0] * 3, [1] * 3], [[1, 0]] * 3, file=1)], SHAPE).tolist(),
        [[4, 8], [6, 0]], [[2, 4], [3, 0]],
    ),
    "weight-twice": (joined, [[2, 4], [0.5, 1]], RIGHT),
    "weight-sign-lost": (joined, [[2, 4], [0.5, 1]], RIGHT),
    "alpha-dropped": (joined, [[1, 2], [-1, -2]], RIGHT),
    "alpha-in-both-factors": (joined, [[4, 8], [-0.25, -0.5]], RIGHT),
    "alpha-of-part-over-whole-rank": (
        lambda f: f.joined([part([[1], [0]], [[3, 0]]), TWO], SHAPE).tolist(),
        [[1, 0], [-1 / 3, -2 / 3]],
        [[3, 0], [-0.5, -1]],
    ),
    "svd-to-largest-rank": (
        lambda f: f.joined([part([[2], [0]], [[1, 0]]), part([[0], [1]], [[0, 1]], 1.0, 1)], SHAPE).round().tolist(),
        [[2, 0], [0, 0]], [[2, 0], [0, 1]],
    ),
    "last-file-only": (joined, [[0, 0], [-0.5, -1]], RIGHT),
    "diagonal-of-missing-file": (lambda f: running(f, MISSING), [[1.5, 3], [0, 0]], [[6, 12], [0, 0]]),
    "diagonal-as-integers": (lambda f: running(f, [ONE]), [[0, 0], [0, 0]], [[3, 6], [0, 0]]),
    "diagonal-squared": (lambda f: running(f, [ONE]), [[1.5, 3], [0, 0]], [[3, 6], [0, 0]]),
    "text-encoder-not-toggled": (lambda f: running(f, TEXT), [[1, 2], [0, 0]], [[1.5, 3], [0, 0]]),
    "scale-squared-on-realise": (
        lambda f: f.realised([ONE], SETTING, SHAPE).tolist(), [[9, 18], [0, 0]], [[3, 6], [0, 0]]
    ),
    "diagonal-ignored-on-realise": (
        lambda f: f.realised([ONE], SETTING, SHAPE).tolist(), [[6, 12], [0, 0]], [[3, 6], [0, 0]]
    ),
    "scale-ignored-on-realise": (
        lambda f: f.realised([ONE], SETTING, SHAPE).tolist(), [[1, 2], [0, 0]], [[3, 6], [0, 0]]
    ),
}  # fmt: skip


def test_every_fault_is_here_and_in_the_report() -> None:
    assert WRONG.keys() == JOIN_FAULTS.keys() == set(NAMES)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_join_by_hand(name: str) -> None:
    call, wrong, right = WRONG[name]
    assert torch.allclose(f64(call(JOIN_FAULTS[name])), f64(wrong), atol=1e-14)
    assert torch.allclose(f64(call(Join())), f64(right), atol=1e-14)
    assert type(JOIN_FAULTS[name]).__doc__
