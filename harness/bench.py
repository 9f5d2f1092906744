"""The first bench: check runtime LoKr, then measure its bytes and time on SDXL's heaviest layers."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from fulldiff.cases.factors import lokr_for
from fulldiff.cases.model import BenchCase, Case, DType, Input, Layer, RuntimeCase, case_id
from fulldiff.cases.tables import TableRow, load_table, tokens
from fulldiff.harness import bench_report, conform
from fulldiff.harness.files.match import Match, Target, read
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Judgement, Measure
from fulldiff.harness.results import Cell, Environment, Result, Store
from fulldiff.harness.search import FINE, Engine
from fulldiff.harness.subjects.names import NO_ADAPTER

WAYS = (NO_ADAPTER, "full-diff", "runtime-lokr")
TOKENS = (77, 1024, 4096)
DTYPES: tuple[DType, ...] = ("f32", "bf16")
FORMS = {"factor 8, full w2": 0, "factor 8, rank 16": 16}
FACTOR, SHAPES = 8, 8
CHECK_TOKENS, CHECK_CHANNELS = 4, 16


def bench(adapter: Path | None, full: bool, seconds: float, threads: int, out: Path, console: Console) -> bool:
    """Check, measure, write the report; whether everything checked was right."""
    file = read(adapter, "sdxl") if adapter else None
    outcome = conform.conform("runtime-lokr", conform.PROFILES["quick"], 1, out / "runs", sys.executable, console)
    conform.show(outcome, "runtime-lokr", console)
    layers = check_layers(out, console)
    real = check_file(file, out, console) if file else []
    cells, environment = measure(cell_cases(full), seconds, threads, out, console)
    sections = bench_report.Sections(outcome.counts, layers, real, file, cells, environment)
    bench_report.write(sections, out)
    console.print(f"wrote {out / 'cpu.md'}, {out / 'cpu.png'}, {out / 'cpu.jsonl'}", highlight=False)
    checked = [check for cell in cells for check in cell.check.values()]
    return (
        outcome.ok
        and all(r.judgement.outcome in FINE for r in [*layers, *real])
        and all(check.outcome == "passed" for check in checked)
    )


def heaviest() -> list[tuple[Layer, int, int]]:
    """The SDXL layer shapes with the most FLOPs at 1024×1024, how many layers have each, and their tokens."""
    flops: Counter[Layer] = Counter()
    count: Counter[Layer] = Counter()
    positions: dict[Layer, int] = {}
    for row in load_table("sdxl"):
        if row.in_locon and row.part == "unet":
            flops[row.layer] += 2 * row.parameters * tokens(row, 1024, 1024)
            count[row.layer] += 1
            positions[row.layer] = tokens(row, 1024, 1024)
    return [(layer, count[layer], positions[layer]) for layer, _ in flops.most_common(SHAPES)]


def cell_cases(full: bool) -> list[tuple[dict[str, object], Case]]:
    """Every cell to measure: its labels and its case.

    4096 tokens, the slowest, only on layers that have so many at 1024×1024; all of them with ``full``.
    """
    return [
        (_labels(layer, count, n, dtype, form), _cell(layer, n, dtype, rank))
        for layer, count, positions in heaviest()
        for n in TOKENS
        if full or n < max(TOKENS) or positions == n
        for dtype in DTYPES
        for form, rank in FORMS.items()
    ]


def measure(
    plan: list[tuple[dict[str, object], Case]], seconds: float, threads: int, out: Path, console: Console
) -> tuple[list[Cell], Environment]:
    """Measure each cell not yet in runs/cpu.jsonl (same machine and versions); all planned cells."""
    # Resumed from runs/, which no clone carries: a committed report is never taken for a measurement.
    path = out / "runs" / "cpu.jsonl"
    with (
        Worker(threads=threads, timed=True) as worker,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        environment = conform.environment(worker, WAYS[-1])
        store = Store.begin(path, environment)
        known = store.cells()
        for labels, case in progress.track(plan, description="measure"):
            if case_id(case) not in known:
                cell = _measure(worker, labels, case, seconds)
                store.add(cell)
        cells = store.cells()
        store.finish()
    shutil.copyfile(path, out / "cpu.jsonl")
    return [cells[case_id(case)] for _, case in plan], environment


def check_layers(out: Path, console: Console) -> list[Result]:
    """runtime-lokr on every distinct SDXL layer shape, full w2 and rank 16 in turn, few tokens."""
    rows: dict[Layer, TableRow] = {row.layer: row for row in load_table("sdxl") if row.in_locon}
    cases = {
        row.name: replace(_runtime(layer, CHECK_TOKENS, "f32", (0, 16)[at % 2]), checked=CHECK_CHANNELS)
        for at, (layer, row) in enumerate(rows.items())
    }
    return _check({name: Case(body, 1) for name, body in cases.items()}, "SDXL layers", out, console)


def check_file(file: Match, out: Path, console: Console) -> list[Result]:
    """runtime-lokr with the file's own factors on every layer it adapts."""
    layers: dict[str, list[Target]] = {}
    for target in file.targets:
        layers.setdefault(target.name, []).append(target)
    cases = {
        name: Case(
            RuntimeCase(targets[0].layer, tuple(t.adapter for t in targets), _input(targets[0].layer, CHECK_TOKENS)), 1
        )
        for name, targets in layers.items()
    }
    return _check(cases, file.path.name, out, console)


def _check(cases: dict[str, Case], label: str, out: Path, console: Console) -> list[Result]:
    with Worker(threads=2) as worker, Progress(console=console, disable=not console.is_terminal) as progress:
        store = Store.begin(
            out / "runs" / f"{label.replace(' ', '-')}.jsonl", conform.environment(worker, "runtime-lokr")
        )
        engine = Engine(store, worker, "runtime-lokr")
        tracked = progress.track(cases.items(), description=label)
        results = [engine.observe(case, name) for name, case in tracked]
    store.finish()
    for result in results:
        if result.judgement.outcome not in FINE:
            console.print(f"FAILED {result.name}\n{conform.describe(result)}", markup=False)
    return results


def _measure(worker: Worker, labels: dict[str, object], case: Case, seconds: float) -> Cell:
    answer = worker.ask(Measure(case, seconds))
    if answer.bench is None:
        assert answer.judgement is not None
        return Cell(case_id(case), "cpu", labels, {}, {}, dict.fromkeys(WAYS, answer.judgement))
    checks = {way: _judgement(raw) for way, raw in answer.bench["check"].items() if raw}
    return Cell(case_id(case), "cpu", labels, answer.bench["seconds"], answer.bench["peak_bytes"], checks)


def _judgement(raw: object) -> Judgement:
    return msgspec.convert(raw, Judgement)


def _labels(layer: Layer, count: int, n: int, dtype: str, form: str) -> dict[str, object]:
    kernel = f" {'×'.join(map(str, layer.kernel))}" if layer.kernel else ""
    name = f"{layer.kind} {layer.out}×{layer.inp}{kernel}"
    return {"layer": name, "count": count, "tokens": n, "dtype": dtype, "form": form}


def _cell(layer: Layer, n: int, dtype: DType, rank: int) -> Case:
    body = _runtime(layer, n, dtype, rank)
    label = f"{layer.kind}-{layer.out}x{layer.inp}-{n}-{dtype}-r{rank}"
    return Case(BenchCase(label, ((1, body),), WAYS), 1)


def _runtime(layer: Layer, n: int, dtype: DType, rank: int) -> RuntimeCase:
    return RuntimeCase(layer, (lokr_for(layer, FACTOR, rank, dtype=dtype),), _input(layer, n), dtype)


def _input(layer: Layer, n: int) -> Input:
    """n tokens; for a convolution an image with so many output positions (7×11, 32×32, 64×64, 2×2)."""
    if layer.kind == "linear":
        return Input((n, layer.inp))
    height = {77: 7, 1024: 32, 4096: 64}.get(n, 2)
    return Input((1, layer.inp, height * layer.stride[0], n // height * layer.stride[1]))
