"""Workers that die, result files that are torn, searches that shrink."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.model import decode, encode
from fulldiff.cases.strategies import runtime_cases
from fulldiff.harness import conform
from fulldiff.harness.manager import CAN_FORK, BackendAbsent, Worker
from fulldiff.harness.protocol import Judgement
from fulldiff.harness.results import Environment, Result, Store, read
from fulldiff.harness.search import Engine, Search, save

CASE = CATALOGUE["d1-low-rank"]


@pytest.fixture(autouse=True)
def bad_subjects_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.parametrize(
    ("subject", "outcome", "says"),
    [
        ("Aborts", "crashed", "SIGABRT"),
        ("Segfaults", "crashed", "SIGSEGV"),
        ("IsKilled", "crashed", "SIGKILL"),
        ("Hangs", "timed out", "no answer within"),
        ("Raises", "raised", "ZeroDivisionError: on purpose"),
        ("GivesNan", "not finite", ""),
        ("Prints", "unsupported", "prints only"),
        ("RunsOutOfMemory", "out of memory", "memory"),
    ],
)
@pytest.mark.parametrize("fork", [False, pytest.param(True, marks=pytest.mark.skipif(not CAN_FORK, reason="no fork"))])
def test_each_misbehaviour_is_its_own_outcome_and_the_run_goes_on(
    subject: str, outcome: str, says: str, fork: bool
) -> None:
    with Worker(limit=2.0 if subject == "Hangs" else 60.0) as worker:
        worker.fork = fork
        judgement = worker.judge(CASE, f"bad_subjects:{subject}")
        assert judgement.outcome == outcome
        assert says in judgement.message
        assert worker.judge(CASE, "full-diff").outcome == "passed"


def test_of_what_torch_raises_the_place_that_called_it_is_named() -> None:
    with Worker() as worker:
        judgement = worker.judge(CASE, "bad_subjects:RaisesInTorch")
    assert judgement.where.startswith("bad_subjects.py:"), judgement


@pytest.mark.skipif(not CAN_FORK, reason="elsewhere each crash costs a cold start")
def test_a_crash_is_shrunk_saved_and_replayed(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.jsonl")
    with Worker() as worker:
        search = Search(Engine(store, worker, "bad_subjects:AbortsOnLowRank"), 200, 60.0, 10.0, first_only=True)
        found = search.run(runtime_cases(), 1)
        ((_, path),) = save(found, tmp_path).items()
        smallest = decode(path.read_bytes())
        assert worker.judge(smallest, "bad_subjects:AbortsOnLowRank").outcome == "crashed"
    assert len(smallest.body.adapters) == 1
    assert smallest.body.layer.out <= 4


def test_an_absent_subject_is_said_to_be_absent() -> None:
    with Worker() as worker:
        judgement = worker.judge(CASE, "no_such_module:Subject")
    assert judgement.outcome == "absent"
    assert "no_such_module" in judgement.message


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        ("no_such_module:Subject", "no_such_module"),
        ("bad_subjects:CannotBeMade", r"raised: KeyError.*bad_subjects.py:\d"),
    ],
)
def test_a_subject_that_cannot_be_made_ends_the_run_before_its_first_case(
    tmp_path: Path, subject: str, says: str
) -> None:
    with pytest.raises(BackendAbsent, match=says):
        conform.conform(subject, conform.PROFILES["quick"], 1, tmp_path, sys.executable, Console(quiet=True))
    assert not list(tmp_path.iterdir())


def test_a_torn_line_is_cut_and_its_case_run_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Worker() as worker:
        store = Store(path)
        Engine(store, worker, "full-diff").observe(CASE)
        store.close()
        whole = path.read_bytes()
        path.write_bytes(whole + whole[:40])
        again = Store(path)
        assert path.read_bytes() == whole
        Engine(again, worker, "full-diff").observe(CASE)
        assert path.read_bytes() == whole


# Kills of the manager at random moments; each gets 25 cases of its own.
KILLS = int(os.environ.get("FULLDIFF_KILLS", "6"))
RUN = """
import sys
from pathlib import Path
from fulldiff.cases.strategies import runtime_cases
from fulldiff.harness.manager import Worker
from fulldiff.harness.results import Store
from fulldiff.harness.search import Engine, Search
with Worker() as worker:
    Search(Engine(Store(Path(sys.argv[1])), worker, "full-diff"), int(sys.argv[2]), 300.0).run(runtime_cases(), 3)
"""


def test_killing_the_manager_loses_and_doubles_nothing(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    search = [sys.executable, "-c", RUN]
    examples = str(25 * KILLS)
    subprocess.run([*search, str(whole), examples], check=True)
    chance = random.Random(4)
    for _ in range(KILLS):
        process = subprocess.Popen([*search, str(killed), examples])
        time.sleep(1.5 + chance.random())
        process.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
        process.wait()
    subprocess.run([*search, str(killed), examples], check=True)
    assert _ids(killed) == _ids(whole)
    assert len(_ids(killed)) == len(set(_ids(killed))) > 100


def _ids(path: Path) -> list[str]:
    return sorted(line.id for line in read(path) if isinstance(line, Result))


HUNG = """
import sys
from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.harness.manager import Worker
worker = Worker(forked=sys.argv[1] == "fork")
worker.start()
print(worker._process.pid, flush=True)
worker.judge(CATALOGUE["d1-low-rank"], "bad_subjects:Hangs")
"""


@pytest.mark.skipif(not CAN_FORK, reason="Linux lists its processes in files")
@pytest.mark.parametrize("mode", ["whole", "fork"])
def test_a_killed_manager_leaves_no_worker_behind(mode: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HUNG, mode], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        group = process.stdout.readline().strip()
        end = time.monotonic() + 60
        # The subject hangs by then, or is about to.
        while len(_alive(group)) < (2 if mode == "fork" else 1) and time.monotonic() < end:
            time.sleep(0.05)
        assert _alive(group)
        time.sleep(0.5)
        process.kill()
    end = time.monotonic() + 20
    while _alive(group) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(group)


def _alive(group: str) -> list[str]:
    """The processes of a process group; one that ended and was not waited for is none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, own = path.read_text().rpartition(")")[2].split()[:3]
            if own == group and state != "Z":
                found.append(path.parent.name)
    return found


# Every module of the manager's side; the others are only imported by a worker.
MANAGERS = (
    "bench.join", "bench.load", "bench.run", "bench.vulkan", "check", "check_report", "cli.main", "conform", "convert",
    "devices", "fault_table", "gate.report", "gate.run", "join.report", "join.run", "load.files", "peers.report",
    "search", "suites", "together",
)  # fmt: skip


def test_the_manager_never_imports_torch() -> None:
    modules = ", ".join(f"fulldiff.harness.{name}" for name in MANAGERS)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_case_survives_its_json_form() -> None:
    assert decode(encode(CASE)) == CASE


ENVIRONMENT = Environment({"torch": "2"}, "CPU", 1, "Linux", "m", "c")


def _begun(path: Path, environment: Environment, finish: bool) -> int:
    """Results found in the file; then one is added."""
    store = Store.begin(path, environment)
    known = len(store.results())
    store.add(Result(f"id-{known}", "full-diff", "cpu", CASE, Judgement("passed")))
    store.finish() if finish else store.close()
    return known


def test_only_an_interrupted_run_of_the_same_code_goes_on(tmp_path: Path) -> None:
    path, other = tmp_path / "run.jsonl", structs.replace(ENVIRONMENT, code="edited")
    assert _begun(path, ENVIRONMENT, finish=False) == 0
    assert _begun(path, ENVIRONMENT, finish=True) == 1
    assert _begun(path, ENVIRONMENT, finish=False) == 0
    assert sum(isinstance(line, Result) for line in read(tmp_path / "run.previous.jsonl")) == 2
    assert _begun(path, other, finish=False) == 0


def test_an_edited_subject_has_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = "from fulldiff.harness.subjects.full_diff import FullDiff\nclass Mine(FullDiff):\n    number = {}\n"
    hashes = []
    for number in (1, 1, 2):
        (tmp_path / "mine.py").write_text(text.format(number))
        with Worker() as worker:
            hashes.append(worker.code("mine:Mine"))
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0]
