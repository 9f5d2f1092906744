"""Result lines: one JSON object a line, appended and flushed at once, never rewritten.

A run that is killed leaves at worst a torn last line, which the next run cuts off; every case already
there is looked up, not run again. Lines of several machines may be put together in one file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fulldiff.cases.model import Case, case_id
from fulldiff.harness.protocol import Judgement


class ResultsError(ValueError):
    """A result file that cannot be read; the message names the file and line."""


class Environment(msgspec.Struct, frozen=True, tag="environment"):
    """What a run ran on: library versions, device, threads, a machine's id, a hash of the code under work."""

    versions: dict[str, str]
    device: str
    threads: int
    platform: str
    machine: str = ""
    code: str = ""


class End(msgspec.Struct, frozen=True, tag="end"):
    """The last line of a run that came to its end: the next one starts anew."""


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """What a conform run is to do, all shards together: its named cases (name → id), and how many it draws.

    ``shard`` (i, n) is the part of it whose lines are in this file."""

    suite: str
    subject: str
    seed: int
    shard: tuple[int, int]
    named: dict[str, str]
    examples: int


class Result(msgspec.Struct, frozen=True, tag="result", omit_defaults=True):
    """What was observed of one subject on one case."""

    id: str
    subject: str
    backend: str
    case: Case
    judgement: Judgement
    name: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.subject, self.backend, self.id)


class Cell(msgspec.Struct, frozen=True, tag="cell", omit_defaults=True):
    """One workload measured in one launch (a process), per way: seconds of each sample and of the very first call
    (kernels chosen, caches cold), the peak bytes of a call and what is held between calls, both as the
    allocator saw them; on a GPU also what the allocator has reserved. ``facts`` are numbers of the workload
    itself (the FLOP floor, …)."""

    id: str
    backend: str
    labels: dict[str, Any]
    seconds: dict[str, list[float]]
    peak_bytes: dict[str, int]
    check: dict[str, Judgement]
    held_bytes: dict[str, int] = {}
    facts: dict[str, float] = {}
    reserved_bytes: dict[str, int] = {}
    launch: int = 1
    first_seconds: dict[str, list[float]] = {}

    def pooled(self, other: Cell) -> Cell:
        """This launch and a later one as one: all samples, the larger bytes, the worse of two checks."""
        if not self.seconds or not other.seconds:
            return other if self.seconds else self
        return msgspec.structs.replace(
            self,
            seconds={way: [*own, *other.seconds[way]] for way, own in self.seconds.items()},
            first_seconds={way: [*own, *other.first_seconds[way]] for way, own in self.first_seconds.items()},
            peak_bytes={way: max(n, other.peak_bytes[way]) for way, n in self.peak_bytes.items()},
            held_bytes={way: max(n, other.held_bytes[way]) for way, n in self.held_bytes.items()},
            reserved_bytes={way: max(n, other.reserved_bytes[way]) for way, n in self.reserved_bytes.items()},
            check={way: max(one, other.check[way], key=_badness) for way, one in self.check.items()},
        )


def _badness(judgement: Judgement) -> tuple[bool, float]:
    return judgement.outcome != "passed", judgement.used


def pooled(cells: Iterable[Cell]) -> dict[str, Cell]:
    """By id, the launches of each cell put together."""
    found: dict[str, Cell] = {}
    for cell in cells:
        found[cell.id] = found[cell.id].pooled(cell) if cell.id in found else cell
    return found


Line = Environment | Planned | Result | Cell | End
_decoder = msgspec.json.Decoder(Line)


class Store:
    """An open result file: what is in it, and appending to it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self.path = path
        self.lines = list(read(path)) if path.exists() else []
        self._results = {line.key: line for line in self.lines if isinstance(line, Result)}
        self._launches = {(line.id, line.launch): line for line in self.lines if isinstance(line, Cell)}
        self._file = path.open("ab", buffering=0)

    @classmethod
    def begin(cls, path: Path, environment: Environment) -> Store:
        """Go on with the run in ``path`` if it was interrupted, on this machine with this code; else a new run.

        The lines of an older run are kept beside it, as NAME.previous.jsonl.
        """
        store = cls(path)
        if store.lines and (store.lines[0] != environment or End() in store.lines):
            store.close()
            path.replace(path.with_suffix(".previous.jsonl"))
            store = cls(path)
        if not store.lines:
            store.add(environment)
        return store

    def finish(self) -> None:
        """Mark the run as complete, and close the file."""
        self.add(End())
        self.close()

    def plan(self, planned: Planned) -> None:
        """Note what this run is to do, unless that is there already."""
        if planned not in self.lines:
            self.add(planned)

    def find(self, subject: str, backend: str, case: Case) -> Result | None:
        """The line of this case, if it has been run."""
        return self._results.get((subject, backend, case_id(case)))

    def add(self, line: Line) -> None:
        """Append one line, in a single write."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self.lines.append(line)
        if isinstance(line, Result):
            self._results[line.key] = line
        elif isinstance(line, Cell):
            self._launches[line.id, line.launch] = line

    def has(self, cell: str, launch: int) -> bool:
        """Whether this cell's launch has been measured."""
        return (cell, launch) in self._launches

    def results(self) -> list[Result]:
        return list(self._results.values())

    def cells(self) -> dict[str, Cell]:
        """By id, the launches of each pooled."""
        return pooled(self._launches.values())

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Line]:
    """The lines of a result file; raises ResultsError with the line number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ResultsError(f"{path}, line {number}: {error}; move the file away or mend the line") from error


def _cut_torn_line(path: Path) -> None:
    """Cut what follows the last newline: a write that a kill interrupted."""
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
