"""The suite ``restore``: it finds the two usual ways to leave a trace, and our subjects leave none."""

from __future__ import annotations

import pytest
from bad_subjects import ChainsForwards, Subtracts

from fulldiff.cases.restores import named_restores
from fulldiff.harness.bench.plan import LAYER_WAYS, STEP_WAYS
from fulldiff.harness.restore_judge import judge
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER
from fulldiff.harness.subjects.registry import subject

NAMED = named_restores()


def _silent(stage: str) -> None:
    pass


@pytest.mark.parametrize("name", sorted({*STEP_WAYS, *LAYER_WAYS, "ljl"} - {NO_ADAPTER, AGAIN}))
@pytest.mark.parametrize("case", NAMED)
def test_our_subjects_leave_no_trace(name: str, case: str) -> None:
    judgement = judge(NAMED[case], subject(name), _silent)
    has_lokr = "-loras-" not in case
    assert judgement.outcome == ("unsupported" if name == "ljl" and has_lokr else "passed"), judgement


def test_a_chain_of_saved_forwards_is_found_when_the_first_goes_first() -> None:
    chained = ChainsForwards()
    assert judge(NAMED["restore-last-first-f32"], chained, _silent).outcome == "passed"
    found = judge(NAMED["restore-first-first-f32"], chained, _silent)
    assert found.outcome == "wrong"
    assert found.claim is not None and "output after -2" in found.claim.name


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_subtracting_the_delta_does_not_restore_the_base(dtype: str) -> None:
    found = judge(NAMED[f"restore-100-cycles-{dtype}"], Subtracts(), _silent)
    assert found.outcome == "wrong"
