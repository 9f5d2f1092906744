"""The gate on real launches and real kills: what it measures, from which code, and that a killed one goes on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gated_subjects import EXTRA

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.model import case_id
from fulldiff.harness.conform import Expectation
from fulldiff.harness.gate import conformance as conforming
from fulldiff.harness.gate import run as gating
from fulldiff.harness.gate.cells import cells
from fulldiff.harness.gate.launches import Figures, Launches, launch
from fulldiff.harness.gate.sides import GateError, Side, digest, side_of
from fulldiff.harness.protocol import Judgement, Outcome
from fulldiff.harness.results import Result

TESTS = Path(__file__).parent
NAMES = ("d1-low-rank", "d7-rank-1", "d7-rank-1-lora")


@pytest.fixture(autouse=True)
def gated_subjects_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def test_one_mebibyte_more_is_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gating, "BLOCKS", 1)
    monkeypatch.setattr(conforming, "named_cases", lambda *_: {name: CATALOGUE[name] for name in NAMES})
    base, head = Side("gated_subjects:Same"), Side("gated_subjects:Big")
    report = gating.compare(base, head, 1, 1, None, tmp_path, lambda: None)
    ((name, (before, now)),) = report.changed_bytes.items()
    assert name == "gated_subjects:Big: linear 1280×1280, 1024 tokens, LoKr, full w2"
    assert now - before == EXTRA
    assert report.exit_code == 3
    assert (report.cases, report.worse, report.same_code) == (len(NAMES), {}, False)
    assert [path.suffixes for path in tmp_path.iterdir()] == [[".previous", ".jsonl"]]
    report.accepted = {name: now}
    assert not report.changed_bytes


def test_a_launch_gives_the_bare_layer_beside_the_subject_and_says_what_is_unsupported() -> None:
    side = Side("gated_subjects:OnlyLoRA")
    with side.worker(1) as worker:
        kronecker, lora = launch(side, worker, cells("OnlyLoRA", 2)).values()
    assert (kronecker.outcome, kronecker.message) == ("unsupported", "LoRA only")
    assert lora.outcome == "passed"
    assert lora.seconds > 0
    assert 0.5 < lora.over_bare < 5


# Kills of a gate at random moments.
KILLS = 5
GATE = """
import json, random, sys, time
from pathlib import Path
from fulldiff.harness.gate.launches import Figures, Launches
from fulldiff.harness.gate.run import gate
launches = Launches(Path(sys.argv[1]))

def fake(label, place, names):
    time.sleep(0.005)
    chance = random.Random(label)
    slow = {"a": 1.10, "b": 1.03}
    return {
        name: Figures("passed", "", 1.0, (slow[name] if place == "head" else 1.0) * (1 + 0.02 * chance.random()), 8)
        for name in names
    }

report = gate(["a", "b"], lambda label, *at: launches.get(label, at[1], lambda: fake(label, *at)))
print(json.dumps([report.verdicts, report.blocks, report.confirmed]))
"""


def test_a_killed_gate_goes_on_to_the_same_verdict_and_measures_no_launch_twice(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    command = [sys.executable, "-c", GATE]
    expected = subprocess.run([*command, str(whole)], capture_output=True, text=True, check=True).stdout
    assert '"a": "REGRESSED"' in expected
    chance = random.Random(2)
    for _ in range(KILLS):
        lines = killed.read_bytes().count(b"\n") if killed.exists() else 0
        process = subprocess.Popen([*command, str(killed)], stdout=subprocess.DEVNULL)
        while process.poll() is None and (not killed.exists() or killed.read_bytes().count(b"\n") < lines + 3):
            time.sleep(0.005)
        time.sleep(0.1 * chance.random())
        process.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
        assert process.wait() != 0
    with killed.open("ab") as file:
        file.write(b'{"launch": "torn')
    found = subprocess.run([*command, str(killed)], capture_output=True, text=True, check=True).stdout
    assert found == expected
    assert killed.read_bytes() == whole.read_bytes()


def test_finished_launches_are_set_aside_and_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gate.jsonl"
    launches = Launches(path)
    launches.get("one", ["a"], lambda: {"a": Figures("passed")})
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(GateError, match=r"gate\.jsonl.*move the file away"):
        Launches(path)
    launches.finish()
    assert not Launches(path).known
    assert (tmp_path / "gate.previous.jsonl").exists()


def _ended(outcome: Outcome, name: str = "d1-low-rank") -> dict[str, Result]:
    case = CATALOGUE[name]
    return {case_id(case): Result(case_id(case), "mine", "cpu", case, Judgement(outcome), name)}


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ("passed", "wrong", "passed before, wrong now"),
        ("passed", "refused", "passed before, refused now"),
        ("unsupported", "crashed", "unsupported before, crashed now"),
        ("wrong", "crashed", "wrong before, crashed now"),
        ("passed", None, "passed before, lost now"),
        (None, "wrong", "not there before, wrong now"),
        ("passed", "passed", ""),
        ("wrong", "wrong", ""),
        ("wrong", "passed", ""),
        (None, "unsupported", ""),
    ],
)
def test_what_became_worse_is_named_case_by_case(before: Outcome | None, now: Outcome | None, words: str) -> None:
    old, new = (_ended(outcome) if outcome else {} for outcome in (before, now))
    assert conforming.worse(old, new) == ({"mine d1-low-rank": words} if words else {})


def test_a_known_failure_is_not_worse() -> None:
    known = [Expectation("d1-*", "wrong", "not done yet")]
    assert not conforming.worse(_ended("passed"), _ended("wrong"), known)
    assert conforming.worse(_ended("passed"), _ended("raised"), known)


def test_a_named_case_that_is_gone_is_lost_and_a_renamed_one_is_not() -> None:
    before = {"one": "id-1", "two": "id-2", "three": "id-3"}
    assert set(conforming.lost(before, {"new name": "id-1", "two": "changed"})) == {"three"}


def test_both_sides_run_and_a_stale_expectation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conforming, "named_cases", lambda *_: {NAMES[0]: CATALOGUE[NAMES[0]]})
    base = Side("gated_subjects:Same")
    known = [Expectation("d7-rank-1", "wrong", "rank 1 is not scaled", pinned="d7-rank-1")]
    count, worse = conforming.conformance(base, Side("gated_subjects:Wrong"), known)
    assert count == 2
    assert worse == {"gated_subjects:Wrong d1-low-rank": "passed before, wrong now"}
    _, worse = conforming.conformance(base, base, known)
    (line,) = worse
    assert line.startswith("expectation d7-rank-1: its pinned example d7-rank-1 is passed, not wrong")
    assert worse[line] == "stale"


MINE = "from fulldiff.harness.subjects.full_diff import FullDiff\nclass Mine(FullDiff):\n    number = {}\n"


@pytest.mark.parametrize("under", ["", "src"])
def test_each_side_runs_its_own_code(tmp_path: Path, under: str) -> None:
    codes = []
    for name, number in (("base", 1), ("head", 2), ("same", 2)):
        (tmp_path / name / under).mkdir(parents=True)
        (tmp_path / name / under / "mine.py").write_text(MINE.format(number))
        with side_of(str(tmp_path / name), "mine:Mine", sys.executable) as side:
            codes.append(side.code())
    assert codes[0] != codes[1] == codes[2]


def test_fulldiffs_own_tree_is_a_side() -> None:
    with side_of(str(TESTS.parent), "runtime-lokr", sys.executable) as side:
        assert set(side.path.split(os.pathsep)) != {str(TESTS.parent)}
        assert NAMES[0] in side.named_cases()


def test_a_gate_with_other_options_or_code_is_another_gate() -> None:
    base, head = Side("a"), Side("b")
    names = [digest(base, head, code, most) for code, most in (("one", 1), ("one", 2), ("two", 1), ("one", 1))]
    assert names[0] == names[3]
    assert len(set(names)) == 3


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_git_revision_is_a_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "mine.py").write_text(MINE.format(1))
    for command in (["init", "-q"], ["add", "mine.py"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "mine.py").write_text(MINE.format(2))
    monkeypatch.chdir(tmp_path)
    with side_of("HEAD", "mine:Mine", sys.executable) as base, side_of(".", "mine:Mine", sys.executable) as head:
        assert base.code() != head.code()
        tree = Path(base.path)
        assert "number = 1" in (tree / "mine.py").read_text()
    assert not tree.exists()


def test_what_is_no_side_or_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    with (
        pytest.raises(GateError, match="'no-such-revision' is no folder, subject or git revision"),
        side_of("no-such-revision", "runtime-lokr", "python"),
    ):
        pass
    with pytest.raises(GateError, match=r"subject 'absent:Mine' cannot be imported"):
        Side("absent:Mine").code()
