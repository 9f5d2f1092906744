"""`fulldiff bench-load`: the seed's eight sets matched and timed in every way, then files loaded end to end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from safetensors.numpy import save_file

from fulldiff.cases.load_names import factor_key
from fulldiff.cases.load_sets import SETS, lora_file, rows_of, set_case
from fulldiff.cases.model import AdapterFile, Case, LoadCase, Model, case_id
from fulldiff.cases.tables import load_table
from fulldiff.harness.bench import load_report as bench_load_report
from fulldiff.harness.conform import environment
from fulldiff.harness.manager import Worker, WorkerError
from fulldiff.harness.protocol import TimeLoad
from fulldiff.harness.results import Cell, Store
from fulldiff.harness.subjects.loaders.names import WARM

INDEXED_WARM = f"indexed{WARM}"
WAYS = ("naive", "naive-concatenating", "hoisted", "referential", "referential-forced", "indexed", INDEXED_WARM)
COUNTS = (1, 2, 4, 8, 16, 32)
COUNT_WAYS = ("naive", "hoisted", "referential", "indexed", INDEXED_WARM)
SIZES = {"sdxl": (4, 100, 200, 400, 788), "sd15": (4, 50, 100, 192, 278)}
SIZE_WAYS = ("naive", INDEXED_WARM)
END_TO_END = ("naive", "indexed")
RANK = 16


@dataclass(frozen=True)
class Workload:
    """One thing to time: its case, ways and labels; ``plan`` says which table of the report it is for."""

    plan: str
    label: str
    case: Case
    ways: tuple[str, ...]
    end_to_end: bool = False


def bench(out: Path, seconds: float, threads: int, files: int, console: Console) -> None:
    """Measure what is not yet in runs/load.jsonl (same machine and code), and write load.md, .png and .jsonl.

    ``files`` is how many rank-16 files are loaded end to end; 0 leaves that out.
    """
    path = out / "runs" / "load.jsonl"
    with tempfile.TemporaryDirectory() as folder, Worker(threads=threads, timed=True) as worker:
        plan = [*matching(), *([whole(Path(folder), files)] if files else [])]
        started = environment(worker, "indexed", "load")
        store = Store.begin(path, started)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            for work in progress.track(plan, description="measure"):
                if name(work) not in store.cells():
                    store.add(measured(worker, work, seconds))
        cells = [store.cells()[name(work)] for work in plan]
        store.finish()
    shutil.copyfile(path, out / "load.jsonl")
    bench_load_report.write(cells, started, out)
    console.print(f"wrote {out / 'load.md'}, {out / 'load.png'}, {out / 'load.jsonl'}", highlight=False)


def name(work: Workload) -> str:
    """The cell's id: an end-to-end case names temporary files, so it goes by its label alone."""
    return f"load/{work.plan}/{work.label}" + ("" if work.end_to_end else f"/{case_id(work.case).rsplit('/', 1)[1]}")


def matching() -> Iterator[Workload]:
    """Matching alone: the sets, the number of files, the size of a file."""
    for number in SETS:
        yield Workload("set", str(number), set_case(number), WAYS)
    unet = [row for row in rows_of("full") if row.part == "unet"]
    for count in COUNTS:
        files = tuple(lora_file(unet, False, copy=copy) for copy in range(count))
        yield Workload("count", str(count), _case("sdxl", files), COUNT_WAYS)
    for model, sizes in SIZES.items():
        rows = [row for row in load_table(model) if row.part == "unet" and (row.in_lora or row.in_locon)]
        for size in sizes:
            yield Workload("size", f"{model} {size}", _case(model, (lora_file(rows[:size], False),)), SIZE_WAYS)


def _case(model: str, files: tuple[AdapterFile, ...]) -> Case:
    return Case(LoadCase(Model(model, "f16"), files), 1)


def whole(folder: Path, count: int) -> Workload:
    """So many rank-16 files of SDXL's 722 attention layers, written now, to be loaded end to end."""
    unet = [row for row in rows_of("full") if row.part == "unet"]
    paths = [
        write(folder / f"{copy}.safetensors", lora_file(unet, False, rank=RANK, copy=copy)) for copy in range(count)
    ]
    files = tuple(AdapterFile(path=str(path)) for path in paths)
    return Workload("end to end", f"{count} files", _case("sdxl", files), END_TO_END, True)


def write(path: Path, file: AdapterFile) -> Path:
    """The file with made values in f16: which ones does not matter for its time."""
    values = np.resize(np.linspace(-0.05, 0.05, 9973, dtype=np.float16), 1 << 20)
    tensors: dict[str, Any] = {}
    for module, adapter in file.modules.items():
        for factor, shape in adapter.factors.items():
            tensors[factor_key(module, adapter.spelling, factor)] = np.resize(values, shape)
        tensors[f"{module}.alpha"] = np.array(adapter.alpha.value, dtype=np.float16)
    save_file(tensors, path)
    return path


def measured(worker: Worker, work: Workload, seconds: float) -> Cell:
    """One cell; raises WorkerError where the worker could not measure it."""
    answer = worker.ask(TimeLoad(work.case, work.ways, seconds, work.end_to_end))
    if answer.bench is None:
        reason = answer.judgement.message if answer.judgement else "no answer"
        raise WorkerError(
            f"bench-load {work.plan} {work.label}: {reason}; run it again, or leave it out with --files 0"
        )
    body = work.case.body
    assert isinstance(body, LoadCase)
    labels: dict[str, Any] = {"plan": work.plan, "label": work.label, "files": len(body.files)}
    if work.end_to_end:
        return _end_to_end(name(work), labels, answer.bench)
    counters = {"counters": answer.bench["counters"], "tensors": answer.bench["tensors"]}
    return Cell(name(work), "cpu", labels | counters, answer.bench["seconds"], {}, {})


def _end_to_end(cell: str, labels: dict[str, Any], bench: Mapping[str, Any]) -> Cell:
    """Samples by stage and way: ``naive: match``, …; opening is the same for all."""
    seconds = {f"{way}: {stage}": bench[stage][way] for stage in ("match", "merge") for way in bench[stage]}
    facts = {"bytes": bench["bytes"], "weights": bench["weights"], "shapes": bench["shapes"]}
    return Cell(cell, "cpu", labels | facts, seconds | {"open": bench["open"]}, {}, {})
