"""`fulldiff bench`: check the runtime LoKr, measure every workload in every way, write the report."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs
from rich.console import Console
from rich.progress import Progress

from fulldiff.cases.factors import lokr_for
from fulldiff.cases.model import Case, Layer, RuntimeCase, StepCase, case_id
from fulldiff.cases.tables import TableRow, load_table
from fulldiff.harness import check, conform
from fulldiff.harness.bench import plan as bench_plan
from fulldiff.harness.bench import report as bench_report
from fulldiff.harness.bench.plan import Lokr, Workload
from fulldiff.harness.files import match
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Judgement, Measure
from fulldiff.harness.results import Cell, Environment, Result, Store
from fulldiff.harness.search import FINE, Engine
from fulldiff.harness.shards import WHOLE, Shard, suffix, within

SUBJECT = "runtime-lokr"
CHECK_TOKENS, CHECK_CHANNELS = 4, 16
# A quick bench narrows SDXL's UNet to this share of its channels.
NARROWED = 4
# Every cell is measured in so many launches (processes), as far as the budget goes.
LAUNCHES = 3
# Seconds after which a cell hangs: all ways and blocks of a whole step of the real size take up to an hour.
LIMIT = 4 * 3600.0
# Seconds within which an ended process's memory is free again.
RELEASE = 10.0
NO_CHECK = Judgement("unsupported", message="nothing to check")


@dataclass(frozen=True)
class Options:
    """What the user asked for. ``budget``: minutes for the measurements."""

    backend: str = "cpu"
    adapter: Path | None = None
    model: str = "sdxl"
    full: bool = False
    lokr: Lokr = bench_plan.ALL_LAYERS
    # Factors that single layers are measured with beside the step's.
    more_factors: tuple[int, ...] = ()
    # SDXL's heaviest layers (all with `full`), or the adapter file's, at these token counts and nothing else.
    tokens: tuple[int, ...] = ()
    seconds: float = 0.05
    budget: float = float("inf")
    threads: int = 1
    out: Path = Path("reports")
    shard: Shard = WHOLE
    # Whole steps, their bytes alone: nothing that another program on the machine changes.
    memory_only: bool = False

    @property
    def factors(self) -> tuple[int, ...]:
        """Of the LoKrs on single layers."""
        return (self.lokr.factor, *self.more_factors)

    @property
    def name(self) -> str:
        """Of the report and the result lines."""
        kinds = {"full": self.full, "memory": self.memory_only, "tokens": self.tokens}
        return "-".join([self.backend, *(kind for kind, asked in kinds.items() if asked)]) + suffix(self.shard)


def bench(options: Options, console: Console) -> bool:
    """Check, measure, write the report; whether everything checked was right.

    Raises:
        BackendAbsent: before anything else; it says which piece is missing.
    """
    runs = options.out / "runs"
    with Worker(backend=options.backend) as worker:
        worker.start()
    file = match.read(options.adapter, options.model) if options.adapter else None
    quick = conform.PROFILES["quick"]
    outcome = conform.conform(SUBJECT, quick, 1, runs, sys.executable, console, shard=options.shard)
    conform.show(outcome, SUBJECT, console)
    layers = check_layers(runs, console, options.shard)
    real = check_file(file, runs, console) if file else []
    plan = [workload for at, workload in enumerate(planned(options, file).values()) if within(options.shard, at)]
    cells, environment, missing = measure(plan, options, console)
    sections = bench_report.Sections(outcome.counts, layers, real, file, cells, environment, missing)
    bench_report.write(sections, options.out, options.name)
    kinds = ".md, .csv and .jsonl" if options.memory_only else ".md, .png, .csv and .jsonl"
    console.print(f"wrote {options.out / options.name}{kinds}", highlight=False)
    checks = [check for cell in cells for check in cell.check.values()]
    right = all(r.judgement.outcome in FINE for r in [*layers, *real]) and all(c.outcome in FINE for c in checks)
    return outcome.ok and right


def planned(options: Options, file: match.Match | None) -> dict[str, Workload]:
    """All workloads by their cases' ids, in the order of measuring."""
    return {case_id(workload.case): workload for workload in _listed(options, file)}


def _listed(options: Options, file: match.Match | None) -> Iterable[Workload]:
    """The most telling first, a few of each kind, so that a short budget shows all kinds; some come again."""
    if options.tokens and file:
        yield from (workload for n in options.tokens for workload in bench_plan.file_layers(file, n))
        return
    if options.tokens:
        most = None if options.full else bench_plan.SHAPES
        yield from bench_plan.layers_at(options.tokens, most, options.factors)
        return
    if options.memory_only:
        sizes = bench_plan.SIZES if options.full else ()
        yield bench_plan.step((256, 256), "f32", NARROWED, options.lokr)
        yield from (bench_plan.step(size, "bf16", 1, options.lokr) for size in sizes)
        return
    if file:
        yield from bench_plan.file_layers(file)
    heaviest = list(bench_plan.layers(["sdxl"], bench_plan.SIZES[:2], bench_plan.SHAPES, options.factors))
    yield bench_plan.step((256, 256), "f32", NARROWED, options.lokr)
    yield from heaviest[: len(bench_plan.DTYPES) * len(bench_plan.FORMS)]
    yield from bench_plan.merges()
    if options.full:
        yield from (bench_plan.step(size, "bf16", 1, options.lokr) for size in bench_plan.SIZES)
    # Where a processor has no bf16 arithmetic, one of its larger cells takes as long as all of f32.
    yield from sorted(heaviest, key=lambda w: (bench_plan.DTYPES.index(w.labels["dtype"]), w.labels["tokens"]))
    if options.full:
        yield from bench_plan.layers(bench_plan.MODELS, bench_plan.SIZES, None, options.factors)


def measure(plan: list[Workload], options: Options, console: Console) -> tuple[list[Cell], Environment, list[Workload]]:
    """Measure each workload of an interrupted run's rest, or all; the cells, and what the budget left out.

    One launch after the other: the first gives every cell, the others narrow its intervals.
    """
    path = options.out / "runs" / f"{options.name}.jsonl"
    end = time.monotonic() + options.budget * 60
    with (
        Worker(threads=options.threads, timed=True, backend=options.backend, forked=True) as worker,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        environment = conform.environment(worker, SUBJECT)
        store = Store.begin(path, environment)
        times = 1 if options.memory_only else LAUNCHES
        launches(plan, partial(_measure, worker, options=options), worker, store, end, progress, times)
    cells = store.cells()
    store.finish()
    shutil.copyfile(path, options.out / f"{options.name}.jsonl")
    return list(cells.values()), environment, [w for w in plan if case_id(w.case) not in cells]


def launches(
    plan: Sequence[Workload],
    measure: Callable[[Workload], Cell],
    worker: Worker,
    store: Store,
    end: float,
    progress: Progress,
    times: int = LAUNCHES,
) -> None:
    """Each workload so many ``times``, in new processes, until ``end`` (monotonic seconds); what is there stays."""
    for launch in range(1, times + 1):
        for workload in progress.track(plan, description=f"measure, launch {launch} of {times}"):
            if time.monotonic() < end and not store.has(case_id(workload.case), launch):
                store.add(structs.replace(measure(workload), launch=launch))
        if not worker.fork:
            worker.stop()


def _measure(worker: Worker, workload: Workload, options: Options) -> Cell:
    body = workload.case.body
    if isinstance(body, StepCase) and (short := _too_large(body)):
        refused = {"step": Judgement("out of memory", message=short)}
        return Cell(case_id(workload.case), options.backend, workload.labels, {}, {}, refused)
    return measured(worker, workload, None if options.memory_only else options.seconds, options.backend)


def measured(worker: Worker, workload: Workload, seconds: float | None, backend: str = "cpu") -> Cell:
    """One launch of a workload; where the worker could not measure it, its judgement alone."""
    name = case_id(workload.case)
    answer = worker.ask(Measure(workload.case, seconds, limit=LIMIT))
    if answer.bench is None:
        return Cell(name, backend, workload.labels, {}, {}, {"all": answer.judgement or NO_CHECK})
    found = answer.bench
    return Cell(
        name,
        backend,
        workload.labels,
        found.get("seconds", {}),
        found.get("peak_bytes", {}),
        {way: msgspec.convert(raw, Judgement) for way, raw in found.get("check", {}).items()},
        found.get("held_bytes", {}),
        found.get("facts", {}) | found.get("strength", {}),
        found.get("reserved_bytes", {}),
        first_seconds=found.get("first_seconds", {}),
    )


def _too_large(body: StepCase) -> str:
    """Why a step is not begun: less memory is free than it needs; empty where that is not known or fits.

    What the cell before it held may take a while to come back.
    """
    needed, end = bench_plan.needed_bytes(body), time.monotonic() + RELEASE
    while (free := available_bytes()) is not None and needed >= free and time.monotonic() < end:
        time.sleep(0.1)
    if free is None or needed < free:
        return ""
    return f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; close programs or use more memory"


def available_bytes() -> int | None:
    """Free memory, Linux; None elsewhere."""
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        lines = Path("/proc/meminfo").read_text().splitlines()
    except (OSError, ValueError, AttributeError):
        return None
    known = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return known[0] if known else pages


def check_layers(runs: Path, console: Console, shard: Shard = WHOLE) -> list[Result]:
    """runtime-lokr on every distinct SDXL layer shape, full w2 and rank 16 in turn, few tokens."""
    rows: dict[Layer, TableRow] = {row.layer: row for row in load_table("sdxl") if row.in_locon}
    cases = {row.name: _check_case(layer, (0, 16)[at % 2]) for at, (layer, row) in enumerate(rows.items())}
    own = {name: Case(body, 1) for at, (name, body) in enumerate(cases.items()) if within(shard, at)}
    return _check(own, f"SDXL layers{suffix(shard)}", runs, console)


def _check_case(layer: Layer, rank: int) -> RuntimeCase:
    adapter = lokr_for(layer, bench_plan.FACTOR, rank)
    return RuntimeCase(layer, (adapter,), bench_plan.image(layer, CHECK_TOKENS), checked=CHECK_CHANNELS)


def check_file(found: match.Match, runs: Path, console: Console) -> list[Result]:
    """runtime-lokr with the file's own factors on every layer it adapts."""
    groups = check.groups(found.targets)
    cases = {group[0].name: Case(check.runtime_case(group, None), 1) for group in groups}
    return _check(cases, found.path.name, runs, console)


def _check(cases: dict[str, Case], label: str, runs: Path, console: Console) -> list[Result]:
    with Worker(threads=2) as worker, Progress(console=console, disable=not console.is_terminal) as progress:
        store = Store.begin(runs / f"{label.replace(' ', '-')}.jsonl", conform.environment(worker, SUBJECT))
        engine = Engine(store, worker, SUBJECT)
        tracked = progress.track(cases.items(), description=label)
        results = [engine.observe(case, name) for name, case in tracked]
    store.finish()
    for result in results:
        if result.judgement.outcome not in FINE:
            console.print(f"FAILED {result.name}\n{conform.describe(result)}", markup=False)
    return results
