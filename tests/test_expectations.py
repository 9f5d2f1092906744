"""Known failures: they excuse what they name, they name something, and they go stale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from fulldiff.harness.conform import ExpectationError, Outcome, Profile, conform, expectations

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


def test_what_is_not_expected_is_found(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "fault:kron-swapped", RANK_ONE)
    assert outcome.findings


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
