"""`fulldiff gate`: did this change make it wrong, bigger or slower? Base and head side by side in one go.

Each launch is a process of its own that measures every cell once; launches alternate base head head base.
Times are compared by `gate_stats`; bytes exactly, unless an accepted line names the new number; outcomes of
the conform run case by case.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulldiff.cases.model import BenchCase, Case, CaseError
from fulldiff.harness import conform
from fulldiff.harness.bench import plan as bench_plan
from fulldiff.harness.gate.stats import BLOCKS, Block, Estimate, Verdict, estimate, verdicts
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Measure
from fulldiff.harness.results import Cell, Result, Store, read
from fulldiff.harness.search import FINE, Engine
from fulldiff.harness.subjects.names import NO_ADAPTER, OURS
from fulldiff.harness.suites import SUITES

PACKAGES = ("reference", "cases", "harness")
SECONDS = 0.15


class GateError(CaseError):
    """A gate that cannot be run as asked; the message says what to name instead."""


@dataclass(frozen=True)
class Side:
    """Base or head: the subject, the interpreter, and the folder its code comes from (empty: as installed)."""

    subject: str
    python: str = sys.executable
    folder: str = ""

    def worker(self, threads: int, timed: bool = True) -> Worker:
        """A worker that imports this side's code."""
        worker = Worker(self.python, threads=threads, timed=timed)
        if self.folder:
            path = os.pathsep.join(filter(None, [self.folder, os.environ.get("PYTHONPATH", "")]))
            worker.environment = {**worker.environment, "PYTHONPATH": path}
        return worker

    def code(self) -> str:
        """A hash of the code under work that the side's subject loads."""
        with self.worker(1) as worker:
            return worker.code(self.subject)


@dataclass
class Report:
    """What the gate found, cell by cell: bytes as (base, head); outcomes that became worse, by case."""

    blocks: dict[str, list[Block]] = field(default_factory=dict)
    peak_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    worse: dict[str, str] = field(default_factory=dict)
    confirmed: dict[str, bool] = field(default_factory=dict)

    @property
    def estimates(self) -> dict[str, Estimate]:
        return {name: estimate(blocks) for name, blocks in self.blocks.items() if len(blocks) > 1}

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The times' verdicts; a regression that its second run did not confirm is inconclusive."""
        found = verdicts(self.estimates)
        for name, again in self.confirmed.items():
            if found[name] == "REGRESSED" and not again:
                found[name] = "INCONCLUSIVE"
        return found

    @property
    def changed_bytes(self) -> dict[str, tuple[int, int]]:
        """Cells whose peak changed and is not accepted."""
        return {n: (a, b) for n, (a, b) in self.peak_bytes.items() if a != b and self.accepted.get(n) != b}

    @property
    def exit_code(self) -> int:
        """The design's table: 1 conformance, 3 regression, 4 unfit or inconclusive, 0 ok."""
        found = set(self.verdicts.values())
        grown = any(head > base for base, head in self.changed_bytes.values())
        if self.worse:
            return 1
        if "REGRESSED" in found or grown:
            return 3
        return 4 if found & {"UNFIT", "INCONCLUSIVE"} or self.changed_bytes else 0


def cells(subject: str, most: int) -> dict[str, Case]:
    """The first layer cells of the quick bench, in the subject's way alone."""
    found = {}
    for workload in bench_plan.layers(["sdxl"], bench_plan.SIZES[:1], most):
        body = workload.case.body
        assert isinstance(body, BenchCase)
        labels = workload.labels
        if labels["tokens"] > bench_plan.CLIP and labels["dtype"] == "f32":
            name = f"{labels['layer']}, {labels['tokens']} tokens, {labels['dtype']}, {labels['form']}"
            found[name] = Case(BenchCase(body.label, body.runtime, (NO_ADAPTER, subject)), 1)
    return dict(list(found.items())[:most])


def gate(
    base: Side, head: Side, most: int, threads: int, accepted: dict[str, int], path: Path, advance: Callable[[], None]
) -> Report:
    """Blocks until each cell is decided or doubled once; flagged cells are run again to be confirmed."""
    report = Report(accepted=accepted)
    store = Launches(path)
    names = list(cells("", most))
    for turn in range(2 * BLOCKS):
        undecided = [n for n in names if turn < BLOCKS or report.verdicts[n] in ("INCONCLUSIVE", "UNFIT")]
        for name, block in _block(base, head, most, threads, undecided, report, store, f"run {turn}").items():
            report.blocks.setdefault(name, []).append(block)
        advance()
    flagged = [name for name, verdict in report.verdicts.items() if verdict == "REGRESSED"]
    again: dict[str, list[Block]] = {name: [] for name in flagged}
    for turn in range(BLOCKS if flagged else 0):
        for name, block in _block(base, head, most, threads, flagged, report, store, f"confirm {turn}").items():
            again[name].append(block)
    report.confirmed = {name: estimate(blocks).slower for name, blocks in again.items()}
    return report


def _block(
    base: Side, head: Side, most: int, threads: int, names: list[str], report: Report, store: Launches, label: str
) -> dict[str, Block]:
    """One A B B A block of launches; every launch measures all the named cells."""
    if not names:
        return {}
    found: list[dict[str, float]] = []
    for place, side in enumerate((base, head, head, base)):
        found.append(store.get(f"{label} place {place}", lambda side=side: _launch(side, most, threads, names)))  # type: ignore[misc]
        for name in names:
            _note_bytes(report, name, int(found[-1][f"{name} bytes"]), side is base)
    return {name: (found[0][name], found[1][name], found[2][name], found[3][name]) for name in names}


def _launch(side: Side, most: int, threads: int, names: list[str]) -> dict[str, float]:
    """Median seconds and peak bytes of each cell, in a new process."""
    wanted, measured = cells(side.subject, most), {}
    with side.worker(threads) as worker:
        for name in names:
            answer = worker.ask(Measure(wanted[name], SECONDS))
            if answer.bench is None:
                assert answer.judgement is not None
                raise GateError(f"{side.subject} on {name}: {answer.judgement.outcome} {answer.judgement.message}")
            measured[name] = statistics.median(answer.bench["seconds"][side.subject])
            measured[f"{name} bytes"] = answer.bench["peak_bytes"][side.subject]
    return measured


def _note_bytes(report: Report, name: str, count: int, is_base: bool) -> None:
    base, head = report.peak_bytes.get(name, (count, count))
    report.peak_bytes[name] = (count, head) if is_base else (base, count)


def digest(*sides: Side) -> str:
    """A short name for one comparison, another one once a side's code has changed."""
    words = [word for side in sides for word in (side.subject, side.python, side.code())]
    return hashlib.blake2b("\0".join(words).encode(), digest_size=5).hexdigest()


class Launches:
    """Every launch as one JSON line, so that a gate that was killed goes on and measures none twice."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        text = path.read_text().splitlines() if path.exists() else []
        self.known = {entry["launch"]: entry["measured"] for entry in map(_read, text) if entry}

    def get(self, label: str, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The launch of that label: from the file, else run now and appended."""
        if label not in self.known:
            self.known[label] = run()
            with self.path.open("a") as file:
                file.write(json.dumps({"launch": label, "measured": self.known[label]}) + "\n")
        measured: dict[str, float] = self.known[label]
        return measured

    def finish(self) -> None:
        """The next gate starts anew."""
        self.path.unlink(missing_ok=True)


def _read(line: str) -> dict[str, Any] | None:
    """A line, None if it was torn by a kill."""
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return entry


def conformance(base: Side, head: Side, profile: conform.Profile) -> dict[str, str]:
    """Named cases that the base did right and the head does not."""
    return _worse(_outcomes(base, profile), _outcomes(head, profile))


def _worse(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """What was right and is not, or is not there."""
    now = {name: after.get(name, "lost") for name in before}
    return {n: f"{was} before, {now[n]} now" for n, was in before.items() if was in FINE and now[n] not in FINE}


def _outcomes(side: Side, profile: conform.Profile) -> dict[str, str]:
    """The named cases' outcomes."""
    with side.worker(1, timed=False) as worker, tempfile.TemporaryDirectory() as scratch:
        store = Store(Path(scratch) / "results.jsonl")
        engine = Engine(store, worker, side.subject)
        results = [engine.observe(case, name) for name, case in conform.named_cases(SUITES["runtime"], profile).items()]
        store.close()
    return {result.name: result.judgement.outcome for result in results}


def stored(path: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Outcomes by case and peak bytes by cell and way, of a stored result file."""
    lines = list(read(path))
    outcomes: dict[str, str] = {f"{r.subject} {r.id}": r.judgement.outcome for r in lines if isinstance(r, Result)}
    peaks = {f"{c.id} {way}": n for c in lines if isinstance(c, Cell) for way, n in c.peak_bytes.items()}
    return outcomes, peaks


def compare_stored(base: Path, head: Path, accepted: dict[str, int]) -> Report:
    """Two stored result files: bytes and outcomes only; times of two runs cannot gate."""
    (before, old), (after, new) = stored(base), stored(head)
    worse = {
        n: f"{o} before, {after.get(n, 'lost')} now"
        for n, o in before.items()
        if o in FINE and after.get(n) not in FINE
    }
    worse |= dict.fromkeys(old.keys() - new.keys(), "measured before, lost now")
    peaks = {name: (old[name], new[name]) for name in old.keys() & new.keys()}
    return Report(peak_bytes=peaks, accepted=accepted, worse=worse)


@contextmanager
def side_of(text: str, subject: str, python: str) -> Iterator[Side]:
    """A side from what the user named: a folder, a subject (package.module:Name or ours), or a git revision."""
    if Path(text).is_dir():
        with _layout(Path(text)) as folder:
            yield Side(subject, python, folder)
    elif text in OURS or ":" in text:
        yield Side(text, python)
    else:
        with _worktree(text) as tree, _layout(tree) as folder:
            yield Side(subject, python, folder)


@contextmanager
def _layout(tree: Path) -> Iterator[str]:
    """What to put on the path: the tree; for fulldiff's own tree a folder that has it as a package."""
    if not all((tree / name).is_dir() for name in PACKAGES):
        yield str(tree.resolve())
        return
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "fulldiff").mkdir()
        for name in PACKAGES:
            (Path(made) / "fulldiff" / name).symlink_to((tree / name).resolve(), target_is_directory=True)
        yield made


@contextmanager
def _worktree(revision: str) -> Iterator[Path]:
    """A checkout of a git revision of the repository here, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as made:
        tree = Path(made) / "tree"
        done = subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), revision], capture_output=True, text=True
        )
        if done.returncode:
            raise GateError(f"{revision!r} is no folder, subject or git revision: {done.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], capture_output=True)


def accepted_bytes(folder: Path) -> dict[str, int]:
    """The numbers that a person accepted: lines of baseline/accepted.jsonl, the last of each cell counting."""
    path = folder / "accepted.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        return {entry["cell"]: int(entry["peak_bytes"]) for entry in map(json.loads, lines)}
    except (ValueError, KeyError, TypeError) as error:
        raise GateError(f"{path}: {error}; each line needs cell, peak_bytes and reason") from error


def accept(folder: Path, cell: str, peak_bytes: int, reason: str) -> None:
    """Write one accepted line."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "accepted.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"cell": cell, "peak_bytes": peak_bytes, "reason": reason}, ensure_ascii=False) + "\n")
