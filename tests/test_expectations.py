"""Known failures: they excuse what they name, they name something, and they go stale."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest
from rich.console import Console

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.model import case_id
from fulldiff.harness import protocol
from fulldiff.harness.conform import (
    Expectation,
    ExpectationError,
    Outcome,
    Profile,
    conform,
    expectations,
    named_case,
    show,
    stale,
)
from fulldiff.harness.protocol import Claim, Judgement
from fulldiff.harness.results import Result

FILES = [file for file in (files("fulldiff.cases") / "expectations").iterdir() if file.name.endswith(".toml")]
SUBJECT = "fault:rank-one-unscaled"
RANK_ONE = "".join(
    f'[[expect]]\npattern = "{pattern}"\noutcome = "wrong"\nreason = "rank 1 is not scaled"\n{pinned}'
    for pattern, pinned in (
        ("*_b.1x*", 'pinned = "d7-rank-1"\n'),
        ("*+down.1x*", 'pinned = "d7-rank-1-lora"\n'),
    )
)


def _run(folder: Path, subject: str, text: str) -> Outcome:
    path = folder / "expected.toml"
    path.write_text(text)
    known = expectations(subject, path)
    return conform(subject, Profile(80, 30, False), 1, folder, sys.executable, Console(quiet=True), known)


def test_what_is_expected_is_no_finding(tmp_path: Path) -> None:
    outcome = _run(tmp_path, SUBJECT, RANK_ONE)
    assert outcome.counts["wrong"] > 2
    assert outcome.ok, [outcome.findings, outcome.stale]
    assert sum(outcome.excused.values()) >= outcome.counts["wrong"]


def test_what_is_expected_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = _run(tmp_path, SUBJECT, RANK_ONE)
    show(outcome, SUBJECT, Console(width=120))
    printed = capsys.readouterr().out
    assert f"{max(outcome.excused.values())} wrong: rank 1 is not scaled" in printed and "FAILED" not in printed


def test_what_an_entry_says_may_be_the_broken_claim() -> None:
    case = CATALOGUE["single-vector-dora"]
    entry = Expectation("*", "wrong", "a dimension more", message="shape and dtype")
    for name, excused in (("output: shape and dtype", True), ("output: each element", False)):
        judgement = Judgement("wrong", claim=Claim(name, False, 1.0))
        assert entry.excuses(Result(case_id(case), "x", "cpu", case, judgement)) == excused


def test_a_backend_s_subject_has_the_expectations_of_every_backend_too() -> None:
    everywhere, vulkan = expectations("ggml-sdcpp-order"), expectations("ggml-sdcpp-order@vulkan")
    assert everywhere and vulkan[: len(everywhere)] == everywhere and len(vulkan) > len(everywhere)


@pytest.mark.parametrize("file", [file.name for file in FILES])
def test_every_expectation_has_a_reason_and_a_pinned_case(file: str) -> None:
    for entry in expectations(file.removesuffix(".toml")):
        assert entry.reason and named_case(entry.pinned)


def test_what_is_not_expected_is_found(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "fault:kron-swapped", RANK_ONE)
    assert outcome.findings


def test_an_expectation_s_message_is_a_part_of_what_was_said() -> None:
    case = CATALOGUE["d7-rank-1"]
    result = Result(case_id(case), "s", "cpu", case, Judgement("raised", message="TypeError: not None"))
    assert Expectation("*", "raised", "r", message="TypeError").excuses(result)
    assert not Expectation("*", "raised", "r", message="KeyError").excuses(result)
    assert not Expectation("*", "wrong", "r").excuses(result)


@pytest.mark.parametrize("outcome", ["wrong", "not finite", "raised"])
def test_an_entry_may_have_either_of_two_outcomes(outcome: protocol.Outcome) -> None:
    entry = Expectation("*", "wrong or not finite", "left over in memory")
    assert entry.met_by(Judgement(outcome)) == (outcome != "raised")
    assert Expectation("*", "wrong", "r").met_by(Judgement(outcome)) == (outcome == "wrong")


def test_an_expectation_goes_stale_when_its_pinned_example_says_something_else() -> None:
    case = CATALOGUE["d7-rank-1"]
    entries = [Expectation("*", "raised", "r", "d7-rank-1", message=said) for said in ("TypeError", "KeyError")]
    result = Result(case_id(case), "s", "cpu", case, Judgement("raised", message="TypeError: 1"), "d7-rank-1")
    (line,) = stale(entries, [result])
    assert "d7-rank-1 is raised (TypeError: 1), not raised (KeyError)" in line


@pytest.mark.parametrize(
    ("counts", "ok"),
    [({"passed": 1}, True), ({"refused": 3}, False), ({"unsupported": 1, "passed": 1}, True), ({}, True)],
)
def test_a_run_in_which_no_case_passed_is_not_ok_but_one_without_cases(counts: dict[str, int], ok: bool) -> None:
    """The last is a shard of fewer cases than shards."""
    assert Outcome(Counter(counts), {}, {}, [], Counter()).ok == ok


def test_an_expectation_goes_stale_when_its_pinned_example_passes(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "full-diff", RANK_ONE)
    assert not outcome.findings
    assert len(outcome.stale) == 2
    assert not outcome.ok


def test_a_pattern_that_matches_no_case_fails_the_run(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "full-diff", '[[expect]]\npattern = "x-*"\noutcome = "wrong"\nreason = "none"\n')
    assert outcome.stale == ["x-*: matches no case"]


@pytest.mark.parametrize("text", ["[[expect]]\npattern = 'a'\n", "expect = 3", "[[", "[[expect]]\nnonsense = 1\n"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "expected.toml"
    path.write_text(text)
    with pytest.raises(ExpectationError, match=r"expected\.toml"):
        expectations("full-diff", path)


def test_a_subject_that_computes_nothing_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    outcome = _run(tmp_path, "bad_subjects:Nothing", "expect = []\n")
    assert set(outcome.counts) == {"unsupported"}
    assert not outcome.ok
