"""`fulldiff bench-join`: one joined LoRA against several apart, toggling, joining, and what other joins give."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from fulldiff.cases.factors import lora
from fulldiff.cases.joins import POOLS, layer_of
from fulldiff.cases.model import (
    AdapterFile,
    Alpha,
    BenchCase,
    Case,
    JoinCase,
    Layer,
    Model,
    RuntimeCase,
    case_id,
    numel,
)
from fulldiff.cases.tables import load_table
from fulldiff.harness import conform
from fulldiff.harness.bench import plan as bench_plan
from fulldiff.harness.bench.plan import Workload
from fulldiff.harness.bench.run import measured
from fulldiff.harness.files.writers import module_name
from fulldiff.harness.join import report as join_report
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Effect, Join, LoadCode, TimeToggle
from fulldiff.harness.results import Cell, Store
from fulldiff.harness.subjects.names import AGAIN, FAULT, NO_ADAPTER

PEFT_JOIN = "fulldiff.harness.subjects.peers.peft_join:"
JOINED, APART, PEFT = "ljl", "runtime-lokr", "peft"
WAYS = (NO_ADAPTER, AGAIN, JOINED, APART)
COUNTS, RANKS = (1, 2, 4, 8, 16), (4, 16, 64)
SHAPES = 5
# One cell is measured at these tokens too: eight LoRAs of rank 16.
OTHER_TOKENS = (77, 4096)
TOKENS, COUNT, RANK = 1024, 8, 16
TURNS = 2000
# The reference's named join faults; to import them would load torch.
JOIN_FAULTS = (
    "linear-cross-terms",
    "lpl-average",
    "concat-squared-ratios",
    "rslora-root-again",
    "weight-twice",
    "weight-sign-lost",
    "alpha-dropped",
    "alpha-in-both-factors",
    "alpha-of-part-over-whole-rank",
    "svd-to-largest-rank",
    "last-file-only",
    "diagonal-of-missing-file",
    "diagonal-as-integers",
    "diagonal-squared",
    "text-encoder-not-toggled",
    "scale-squared-on-realise",
    "diagonal-ignored-on-realise",
    "scale-ignored-on-realise",
)
PEERS = {
    "PEFT cat": "Cat",
    "PEFT cat, rsLoRA files": "CatRoot",
    "PEFT linear": "Linear",
    "PEFT svd": "Svd",
}


def bench(seconds: float, python: str, threads: int, out: Path, console: Console) -> None:
    """Measure, compare and write join.md, join.png and join.jsonl into ``out``.

    Raises:
        WorkerError: ``python`` cannot run a worker.
    """
    path = out / "runs" / "join.jsonl"
    with (
        Worker(python, threads=threads, timed=True) as worker,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        environment = conform.environment(worker, JOINED)
        peft = absent(worker)
        store = Store.begin(path, environment)
        plan = list(workloads(not peft))
        for workload in progress.track(plan, description="measure"):
            if case_id(workload.case) not in store.cells():
                store.add(measured(worker, workload, seconds))
        facts = [*effects(worker, peft), *files(worker)]
        cells = [store.cells()[case_id(workload.case)] for workload in plan]
        for fact in facts:
            store.add(fact)
    store.finish()
    shutil.copyfile(path, out / "join.jsonl")
    join_report.write(cells, facts, environment, peft, out)
    console.print(f"wrote {out / 'join.md'}, {out / 'join.png'}, {out / 'join.jsonl'}", highlight=False)


def absent(worker: Worker) -> str:
    """Why PEFT cannot be measured by this worker; empty where it can."""
    judgement = worker.ask(LoadCode(PEFT)).judgement
    return "" if judgement is None else judgement.message


def workloads(peft: bool) -> Iterator[Workload]:
    """SDXL's heaviest shapes with 1 to 16 LoRAs of each rank at 1024 tokens, and one cell at other token counts."""
    for shape in bench_plan.shapes("sdxl", [(1024, 1024)])[:SHAPES]:
        for rank in RANKS:
            for count in COUNTS:
                yield workload(shape.layer, TOKENS, count, rank, peft)
        for tokens in OTHER_TOKENS:
            yield workload(shape.layer, tokens, COUNT, RANK, peft)


def workload(layer: Layer, tokens: int, count: int, rank: int, peft: bool) -> Workload:
    """One cell: ``count`` LoRAs of one rank on one layer."""
    size = layer.inp // layer.groups
    each = tuple(lora(layer.out, size, rank, layer.kernel, alpha=Alpha("0d", 1.0), strength=0.5) for _ in range(count))
    body = RuntimeCase(layer, each, bench_plan.image(layer, tokens))
    ways = (*WAYS, PEFT) if peft else WAYS
    labels = {"layer": bench_plan.describe(layer), "tokens": tokens, "rank": rank, "files": count}
    name = f"join-{bench_plan.describe(layer)}-{tokens}-{count}x{rank}"
    return Workload(labels, Case(BenchCase(name, body, ways), 1))


# What other joins give


def effects(worker: Worker, peft: str) -> Iterator[Cell]:
    """The effect of ours, every named fault and PEFT's joins on the same two files."""
    subjects = {"ljl": "ljl"} | {name: f"{FAULT}{name}" for name in JOIN_FAULTS}
    if not peft:
        subjects |= {name: f"{PEFT_JOIN}{kind}" for name, kind in PEERS.items()}
    for name, subject in subjects.items():
        answer = worker.ask(Effect(pair(), subject))
        facts: dict[str, float] = {}
        if answer.bench is not None:
            facts = {key: answer.bench[key] for key in ("error", "realised") if key in answer.bench}
            facts |= {f"multiple {at}": value for at, value in enumerate(answer.bench["multiples"])}
        checks = {"effect": answer.judgement} if answer.judgement else {}
        yield Cell(f"effect/{name}", "cpu", {"effect": name}, {}, {}, checks, {}, facts)


def pair() -> Case:
    """Two files of rank 8 (alpha 4 and none) with weights 0.7 and -0.3, the second without the text encoder's layer."""
    query, conv, text, *_ = POOLS["sd15"]

    def file(names: tuple[str, ...], alpha: Alpha) -> AdapterFile:
        layers = {name: layer_of("sd15", name) for name in names}
        return AdapterFile(modules={n: lora(own.out, own.inp, 8, own.kernel, alpha=alpha) for n, own in layers.items()})

    both = (file((query, conv, text), Alpha("0d", 4.0)), file((query, conv), Alpha()))
    return Case(JoinCase(Model("sd15"), both, (0.7, -0.3), (1.0, 0.5), 0.8), 1)


# Files


def files(worker: Worker) -> Iterator[Cell]:
    """Two files on SDXL's 788 UNet modules joined, and the joined file's diagonals set."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / f"{at}.safetensors" for at in range(2)]
        for path in paths:
            write_random(path)
        out = folder / "joined.safetensors"
        answer = worker.ask(Join(tuple(map(str, paths)), (0.7, -0.3), "sdxl", "kohya", str(out)))
        assert answer.bench is not None, answer.judgement
        sizes = {"output": out.stat().st_size, "peak": answer.bench["peak_bytes"] or 0}
        facts = {"seconds": answer.bench["seconds"], "layer": float(largest_layer())}
        yield Cell("join/788", "cpu", {"join": "788 modules"}, {}, sizes, {}, {}, facts)
        answer = worker.ask(TimeToggle(str(out), "sdxl", TURNS))
        assert answer.bench is not None, answer.judgement
        grown = {} if answer.bench["grown_bytes"] is None else {"grown": answer.bench["grown_bytes"]}
        known = {"layers": float(answer.bench["layers"])}
        yield Cell(
            "toggle/788", "cpu", {"toggle": "788 modules"}, {"set": answer.bench["seconds"]}, grown, {}, {}, known
        )


def write_random(path: Path, rank: int = RANK) -> None:
    """A LoRA on each of SDXL's 788 UNet modules in f16, of small numbers that repeat, under kohya's names."""
    from fulldiff.harness.files.layout import Layout

    shapes: dict[str, Any] = {}
    for row in load_table("sdxl"):
        if row.part == "unet" and row.in_locon:
            own = lora(row.out, row.inp // row.groups, rank, row.kernel).factors
            shapes |= {f"{module_name('kohya', row, False)}.{n}": ("F16", shape) for n, shape in own.items()}
    most = max(bench_bytes(shape) for _, shape in shapes.values())
    # f16 numbers from 2⁻⁸ to 2⁻⁷: bytes that any machine can make without torch.
    pattern = bytes(byte for low in range(251) for byte in (low, 0x1C)) * (most // 502 + 1)
    with Layout(path, shapes, {}) as layout:
        for name, (_, shape) in shapes.items():
            layout.put(name, memoryview(pattern)[: bench_bytes(shape)])


def bench_bytes(shape: tuple[int, ...]) -> int:
    """The bytes of an f16 tensor."""
    return 2 * numel(shape)


def largest_layer() -> int:
    """The bytes of the largest joined layer's factors, of rank 32 in f16."""
    rows = [row for row in load_table("sdxl") if row.part == "unet" and row.in_locon]
    return max(2 * 2 * RANK * row.parameters_per_rank for row in rows)
