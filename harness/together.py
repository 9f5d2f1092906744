"""`fulldiff report`: shards and machines put together: conform.md and BACKEND.md, and what is missing, by name.

A function of the result lines and the expectations: the files of n shards give the report of one run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd
from msgspec import structs

from fulldiff.cases.model import CaseError
from fulldiff.harness.bench import report as bench_report
from fulldiff.harness.bench.run import SUBJECT, Options, planned
from fulldiff.harness.conform import Expectation, describe, excused, expectations, stale, unmatched
from fulldiff.harness.results import Cell, End, Environment, Line, Planned, Result, pooled, read
from fulldiff.harness.search import FINE, RANKS
from fulldiff.harness.shards import Shard

# A report names so many failures of one run; its lines hold all.
SHOWN = 20


@dataclass
class Found:
    """The files written; what failed, and what is missing, one line each."""

    written: list[Path] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass
class Run:
    """A conform run, its shards together."""

    plan: Planned
    results: dict[str, Result] = field(default_factory=dict)
    finished: set[Shard] = field(default_factory=set)

    @property
    def title(self) -> str:
        return f"{self.plan.suite}, {self.plan.subject}, seed {self.plan.seed}"

    def add(self, result: Result) -> None:
        """Of two results of one case, from two machines, the worse counts."""
        named = structs.replace(result, name=self._names.get(result.id, ""))
        known = self.results.get(result.id, named)
        self.results[result.id] = max(known, named, key=lambda each: RANKS[each.judgement.outcome])

    @cached_property
    def _names(self) -> dict[str, str]:
        """The first of a case's names, by id."""
        return {own: name for name, own in reversed(self.plan.named.items())}

    def missing(self) -> list[str]:
        """The shards that are not there or did not end, and the named cases that were not run."""
        count = self.plan.shard[1]
        shards = [f"{i}/{count}" for i in range(1, count + 1) if (i, count) not in self.finished]
        names = [name for name, own in self.plan.named.items() if own not in self.results]
        found = [f"shard {shard} is not here or did not end" for shard in shards]
        return found + [f"named case {name} was not run" for name in names]

    def failures(self, known: Sequence[Expectation]) -> list[Result]:
        """Results that are neither fine nor expected, in the order of their ids."""
        bad = [r for r in self.results.values() if r.judgement.outcome not in FINE and not excused(r, known)]
        return sorted(bad, key=lambda result: result.id)


def report(files: Sequence[Path], expect: Path | None, out: Path) -> Found:
    """Write conform.md and BACKEND.md from the files' lines; raises CaseError if there is nothing for either."""
    lines = {path: list(read(path)) for path in files}
    found = Found()
    out.mkdir(parents=True, exist_ok=True)
    runs = conform_runs(lines.values())
    if runs:
        _write_conform(runs, _environments(lines.values()), expect, out, found)
    everything = [line for own in lines.values() for line in own]
    cells = pooled(line for line in everything if isinstance(line, Cell) and "workload" in line.labels)
    for backend in dict.fromkeys(cell.backend for cell in cells.values()):
        own = {name: cell for name, cell in cells.items() if cell.backend == backend}
        _write_bench(backend, own, runs, list(lines.values()), out, found)
    if not found.written:
        raise CaseError(f"{', '.join(map(str, files))}: neither a conform run nor cells of a bench")
    return found


def conform_runs(files: Iterable[Sequence[Line]]) -> list[Run]:
    """The conform runs in the files, by suite, subject and seed; a case that two files have counts once."""
    runs: dict[tuple[str, str, int, int], Run] = {}
    for lines in files:
        plans = [line for line in lines if isinstance(line, Planned)]
        for plan in plans[-1:]:
            run = runs.setdefault((plan.suite, plan.subject, plan.seed, plan.shard[1]), Run(plan))
            for result in lines:
                if isinstance(result, Result) and result.subject == plan.subject:
                    run.add(result)
            run.finished |= {plan.shard} if End() in lines else set()
    return sorted(runs.values(), key=lambda run: run.title)


def _write_conform(
    runs: Sequence[Run], environments: Sequence[Environment], expect: Path | None, out: Path, found: Found
) -> None:
    parts = ["# Conformance\n", *dict.fromkeys(map(bench_report.environment, environments)), _counts(runs)]
    for run in runs:
        known, results = expectations(run.plan.subject, expect), list(run.results.values())
        failures = run.failures(known)
        wrong = [f"- FAILED {result.name or result.id}\n{describe(result)}" for result in failures[:SHOWN]]
        wrong += [f"- FAILED {len(failures) - SHOWN} more"] if len(failures) > SHOWN else []
        old = [f"- STALE expectation {line}" for line in stale(known, results) + unmatched(known, results)]
        gone = [f"- MISSING {line}" for line in run.missing()]
        if wrong or old or gone:
            parts += [f"\n## {run.title}\n", *wrong, *old, *gone]
        found.failed += [f"{run.title}: {line.removeprefix('- ')}" for line in wrong + old]
        found.missing += [f"{run.title}: {line.removeprefix('- ')}" for line in gone]
    path = out / "conform.md"
    path.write_text("\n".join([*parts, ""]), encoding="utf-8")
    found.written.append(path)


def _counts(runs: Iterable[Run]) -> str:
    """How many cases of each run ended how."""
    rows: list[dict[str, object]] = []
    for run in runs:
        counts: Counter[str] = Counter(run.results[name].judgement.outcome for name in sorted(run.results))
        rows.append({"suite": run.plan.suite, "subject": run.plan.subject, "cases": len(run.results), **counts})
    return bench_report.to_markdown(pd.DataFrame(rows).fillna(0).convert_dtypes())


def _write_bench(
    backend: str, cells: dict[str, Cell], runs: Sequence[Run], files: Sequence[Sequence[Line]], out: Path, found: Found
) -> None:
    """One backend's report, its cells in the order of the plan, whichever file they are in."""
    plan, full = (planned(Options(backend, full=f), None) for f in (False, True))
    # A cell that only `bench --full` plans: the whole of that was meant.
    if (full.keys() - plan.keys()) & cells.keys():
        plan = full
    # All at token counts that the user gave (see `plan.layers_at`): which those were is not known here.
    if all(cell.labels.get("count_at", "planned") is None for cell in cells.values()):
        plan = {}
    ordered = [cells[name] for name in dict.fromkeys([*plan, *cells]) if name in cells]
    missing = {name: workload for name, workload in plan.items() if name not in cells}
    own = [run for run in runs if (run.plan.suite, run.plan.subject) == ("runtime", SUBJECT)]
    outcomes: Counter[str] = Counter(result.judgement.outcome for run in own for result in run.results.values())
    measured = [lines for lines in files if any(isinstance(x, Cell) and x.backend == backend for x in lines)]
    environment = _as_one(_environments(measured))
    layers = _checked_layers(files)
    sections = bench_report.Sections(outcomes, layers, [], None, ordered, environment, list(missing.values()))
    bench_report.write(sections, out, backend)
    found.written.append(out / f"{backend}.md")
    found.missing += [f"bench {backend}: {name} was not measured" for name in missing]


def _checked_layers(files: Iterable[Sequence[Line]]) -> list[Result]:
    """What a bench checked of its subject beside the conform run, each case once."""
    others = [lines for lines in files if not any(isinstance(line, Planned) for line in lines)]
    results = {r.id: r for lines in others for r in lines if isinstance(r, Result) and r.subject == SUBJECT}
    return [results[name] for name in sorted(results)]


def _environments(files: Iterable[Sequence[Line]]) -> list[Environment]:
    """The distinct environments that the lines come from."""
    found: list[Environment] = []
    for lines in files:
        found += [line for line in lines if isinstance(line, Environment) and line not in found]
    return sorted(found, key=str)


def _as_one(environments: Sequence[Environment]) -> Environment:
    """What a report opens with where its cells come from several machines: all their devices and platforms."""
    if not environments:
        raise CaseError("measured cells without the line that says on what: give whole result files")
    devices = " and ".join(dict.fromkeys(each.device for each in environments))
    platforms = " and ".join(dict.fromkeys(each.platform for each in environments))
    return structs.replace(environments[0], device=devices, platform=platforms)
