"""Launches: each cell measured once, in a process of its own. Each is written down, so none is measured twice."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from fulldiff.cases.model import BenchCase, Case
from fulldiff.harness.gate.sides import GateError, Side
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Answer, Judgement, Measure, Outcome
from fulldiff.harness.subjects.names import NO_ADAPTER

# At least so long per cell and launch, beside the bench's minimum of blocks.
SECONDS = 0.5


class Figures(msgspec.Struct, frozen=True, omit_defaults=True):
    """One cell in one launch: the outcome, and where it ran the median seconds of a call, its median time over that
    of the bare layer timed in turn with it, and the peak bytes of a call."""

    outcome: Outcome
    message: str = ""
    seconds: float = 0.0
    over_bare: float = 0.0
    peak_bytes: int = 0


Measured = Mapping[str, Figures]


def figure(launch: Figures) -> float:
    """What the verdict compares from launch to launch: the time over the bare layer's, which takes off what slows a
    whole launch. (Two vCPUs of a shared machine, the same code twice: ±6 % of seconds, ±2 % of this.)"""
    return launch.over_bare


def launch(side: Side, worker: Worker, cells: Mapping[str, Case]) -> Measured:
    """Measure each cell with the side's subject, in new processes."""
    found = {name: _figures(side.subject, worker.ask(Measure(_of(side, c), SECONDS))) for name, c in cells.items()}
    if not worker.fork:
        worker.stop()
    return found


def _of(side: Side, case: Case) -> Case:
    """The cell in the side's own way, beside the bare layer."""
    body = case.body
    assert isinstance(body, BenchCase)
    return Case(BenchCase(body.label, body.runtime, (NO_ADAPTER, side.subject)), case.seed)


def _figures(subject: str, answer: Answer) -> Figures:
    if answer.bench is None:
        assert answer.judgement is not None
        return Figures(answer.judgement.outcome, answer.judgement.message)
    check = msgspec.convert(answer.bench["check"][subject], Judgement)
    own, bare = answer.bench["seconds"][subject], answer.bench["seconds"][NO_ADAPTER]
    ratio = statistics.median(one / other for one, other in zip(own, bare, strict=True))
    peak = answer.bench["peak_bytes"][subject]
    return Figures(check.outcome, check.message, statistics.median(own), ratio, peak)


class Line(msgspec.Struct, frozen=True):
    """One line of a file of launches."""

    launch: str
    measured: dict[str, Figures]


class Launches:
    """Every launch as one JSON line, so that a gate that was killed goes on and measures none twice."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.known = {line.launch: line.measured for line in _lines(path)}

    def get(self, label: str, cells: Sequence[str], run: Callable[[], Measured]) -> Measured:
        """The launch of that label if it is in the file with these cells; else run now and appended."""
        known = self.known.get(label, {})
        if set(known) != set(cells):
            known = self.known[label] = dict(run())
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(Line(label, known)) + b"\n")
        return known

    def finish(self) -> None:
        """The next gate starts anew; these lines stay beside it, as NAME.previous.jsonl."""
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".previous.jsonl"))


def _lines(path: Path) -> list[Line]:
    """The lines that are there; a last one that a kill tore is cut off, for what is appended to start on its own."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    try:
        return msgspec.json.Decoder(Line).decode_lines(whole)
    except msgspec.DecodeError as error:
        raise GateError(f"{path}: {error}; move the file away, and the gate starts anew") from error
