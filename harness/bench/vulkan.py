"""``fulldiff bench --backend vulkan``: is ggml right on this Vulkan device, where does it crash, what does it hold?

Named cases, generated cases, single layers and chains of layers, on the device and on the CPU beside it. Every
result line is written at once to runs/vulkan.jsonl, from which an interrupted run goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from fulldiff.cases.catalogue import HEAVY, pinned
from fulldiff.cases.factors import lokr, lokr_for
from fulldiff.cases.model import Case, Input, Layer, RuntimeCase, case_id
from fulldiff.cases.strategies import runtime_cases
from fulldiff.harness import conform
from fulldiff.harness.backends import vulkan
from fulldiff.harness.bench import vulkan_report as bench_vulkan_report
from fulldiff.harness.manager import BackendAbsent, Worker
from fulldiff.harness.protocol import Judgement, LoadCode, describe_exit
from fulldiff.harness.results import Cell, Result, Store
from fulldiff.harness.search import FINE, Engine, Search

MAIN = "ggml@vulkan"
# What needs ggml's CPU part: whatever is not on the device, and what is on both.
CPU, SPLIT = "ggml", "ggml-split@vulkan"
# What is run on the named cases: ours (which must not fail), then the order of stable-diffusion.cpp.
OURS = (CPU, MAIN, "ggml-shipped", "ggml-shipped@vulkan", SPLIT, "ggml-full-diff@vulkan")
OTHERS = ("ggml-sdcpp-order", "ggml-sdcpp-order@vulkan", "ggml-sdcpp-head@vulkan")
ON_LARGE = (MAIN, "ggml-sdcpp-order@vulkan")
NAMED = ("d1-", "d2-", "d3-", "d4-", "d5-", "d6-", "d7-rank-1", "nb10", "prime-", "vulkan-")
GENERATED, GENERATED_SECONDS = 1000, 1500.0
WAYS = {"none": ("ggml", True), "full diff": ("ggml-full-diff", False), "runtime": ("ggml", False)}
ORDER = "sd.cpp's order"
CHAIN_WAYS, CHAIN_LAYERS = ("none", "all-alive", "per-layer", "runtime"), (4, 16, 64)
CASE_LIMIT, CELL_LIMIT = 600.0, 900.0


def bench(out: Path, threads: int, seconds: float, console: Console) -> bool:
    """Run everything, write vulkan.md and vulkan.jsonl; whether our own subjects were right throughout.

    ``seconds`` limits the search on generated cases (0: `GENERATED_SECONDS`).

    Raises:
        BackendAbsent: no ggml, loader, driver or device, or a device that ggml cannot use; it says which.
    """
    if reason := vulkan.missing():
        raise BackendAbsent(f"backend vulkan: {reason}; see `fulldiff devices`")
    absent = {name: reason for name in (CPU, SPLIT) if (reason := absence(name))}
    for reason in absent.values():
        console.print(f"left out: {reason}", markup=False, highlight=False, soft_wrap=True)
    path = out / "runs" / "vulkan.jsonl"
    with Worker(threads=threads, limit=CASE_LIMIT) as worker:
        store = Store.begin(path, conform.environment(worker, MAIN))
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for name in (*OURS, *OTHERS):
            if not (name in absent or (CPU in absent and _backend(name) == "cpu")):
                _named(store, name, threads, progress)
        found = _generated(store, threads, seconds or GENERATED_SECONDS, progress)
        plan = [cell for cell in (*_layers(), *_chains()) if not (CPU in absent and cell[1]["backend"] == "cpu")]
        for cell_id, labels, spec in progress.track(plan, description="compute buffers"):
            if cell_id not in store.cells():
                store.add(_cell(cell_id, labels, spec, threads))
    results, cells = store.results(), list(store.cells().values())
    store.finish()
    lines = bench_vulkan_report.without_folders(path.read_text(encoding="utf-8"))
    (out / "vulkan.jsonl").write_text(lines, encoding="utf-8")
    text = bench_vulkan_report.markdown(results, cells, vulkan.ask(), absent)
    (out / "vulkan.md").write_text(text, encoding="utf-8")
    for diagnosis, result in found.items():
        console.print(f"FAILED {diagnosis}\n{conform.describe(result)}", markup=False, highlight=False)
    console.print(f"wrote {out / 'vulkan.md'}, {out / 'vulkan.jsonl'}", highlight=False)
    return all(r.judgement.outcome in FINE for r in results if r.subject in OURS)


def absence(name: str) -> str:
    """Why a subject cannot be made here; empty where it can."""
    with Worker() as worker:
        reason = worker.ask(LoadCode(name)).judgement
    return reason.message if reason else ""


def named_cases(subject: str) -> dict[str, Case]:
    """The named cases for a subject: the large ones only where they are the point."""
    chosen = {name: case for name, case in pinned().items() if name.startswith(NAMED) and case.suite == "runtime"}
    return {name: case for name, case in chosen.items() if name not in HEAVY or subject in ON_LARGE}


def _named(store: Store, name: str, threads: int, progress: Progress) -> None:
    with Worker(threads=threads, limit=CASE_LIMIT) as worker:
        engine = Engine(store, worker, name, _backend(name))
        for label, case in progress.track(named_cases(name).items(), description=name):
            engine.observe(case, label)


def _generated(store: Store, threads: int, seconds: float, progress: Progress) -> Mapping[str, Result]:
    """Cases drawn for what ggml can hold (f32, bf16, f16; no DoRA), on the device in strict arithmetic."""
    task = progress.add_task("generated cases", total=GENERATED)
    with Worker(threads=threads, limit=CASE_LIMIT) as worker:
        engine = Engine(store, worker, MAIN, "vulkan", on_result=lambda _: progress.advance(task))
        search = Search(engine, GENERATED, seconds)
        return search.run(runtime_cases(dtypes=("f32", "bf16", "f16"), extras=("diff_b", "scale", "rows")), 1)


def layer_cases() -> dict[str, Case]:
    """Single layers whose compute buffer is measured, f32, weights included in none of the figures."""
    one, same = (1, 1), (1, 1)
    conv = Layer("conv2d", 320, 320, (3, 3), one, same, one, bias=False)
    up, down = Layer("linear", 10240, 1280, bias=False), Layer("linear", 1280, 5120, bias=False)
    square = Layer("linear", 1280, 1280, bias=False)
    bodies = {
        "linear 1280→1280, 4096 tokens, w1 16×16": (square, lokr((16, 16), (80, 80)), (4096, 1280)),
        "linear 1280→10240, 1024 tokens, factor 8": (up, lokr_for(up, 8), (1024, 1280)),
        "linear 5120→1280, 1024 tokens, factor 8": (down, lokr_for(down, 8), (1024, 5120)),
        "linear 1280→1280, 4099 tokens (prime), rank 16": (square, lokr_for(square, 8, 16), (4099, 1280)),
        "conv 3×3 320→320, 64×64, w1 8×8": (conv, lokr((8, 8), (40, 40), (3, 3)), (1, 320, 64, 64)),
    }
    return {label: Case(RuntimeCase(layer, (a,), Input(shape)), 1) for label, (layer, a, shape) in bodies.items()}


def _layers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(id, labels, spec) of every layer, way and backend."""
    ways = {**WAYS, ORDER: ("ggml-sdcpp-order", False)}
    for label, case in layer_cases().items():
        for way, (subject, bare) in ways.items():
            for backend in ("cpu", "vulkan"):
                name = subject if backend == "cpu" else f"{subject}@vulkan"
                labels = {"layer": label, "way": way, "backend": backend}
                spec = {"type": "layer", "case": case, "subject": name, "bare": bare, "calls": 2}
                yield f"{case_id(case)}/{way}/{backend}", labels, spec


def _chains() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for way in CHAIN_WAYS:
        for layers in CHAIN_LAYERS:
            for backend in ("cpu", "vulkan"):
                labels = {"chain": layers, "way": way, "backend": backend}
                spec = {"type": "chain", "backend": backend, "way": way, "layers": layers}
                yield f"chain/{layers}/{way}/{backend}", labels, spec


def _cell(cell_id: str, labels: dict[str, Any], spec: dict[str, Any], threads: int) -> Cell:
    """The measured cell; a crash or time-out of its process is its judgement."""
    command = [sys.executable, "-m", "fulldiff.harness.bench.ggml_cell", str(threads)]
    way, backend = labels["way"], labels["backend"]
    try:
        done = subprocess.run(command, input=msgspec.json.encode(spec), capture_output=True, timeout=CELL_LIMIT)
    except subprocess.TimeoutExpired:
        late = Judgement("timed out", message=f"no answer within {CELL_LIMIT:g} s")
        return Cell(cell_id, backend, labels, {}, {}, {way: late})
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        words = f"{describe_exit(done.returncode)}; it last printed: {last[:300]}"
        return Cell(cell_id, backend, labels, {}, {}, {way: Judgement("crashed", message=words)})
    made = msgspec.json.decode(done.stdout.splitlines()[-1])
    if made["unsupported"]:
        return Cell(cell_id, backend, labels, {}, {}, {way: Judgement("unsupported", message=made["unsupported"])})
    sizes, facts = {way: made["compute_bytes"]}, {"error": made["error"]}
    return Cell(cell_id, backend, labels, {way: made["seconds"]}, sizes, {}, facts=facts)


def _backend(subject: str) -> str:
    return "vulkan" if subject.endswith("@vulkan") else "cpu"
