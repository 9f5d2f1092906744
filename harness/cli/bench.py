"""The command line's `bench` and `bench-load`; what they need is imported when they run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fulldiff.harness.shards import shard_of

console = Console()
CONFORMANCE = 1
# How long a quick bench measures; with its checks it ends within five minutes on two cores.
QUICK_MINUTES = 3.0
Out = Annotated[Path, typer.Option(help="The folder for reports; result lines go to its runs/")]


def bench(
    backend: Annotated[str, typer.Option(help="cpu, cuda, rocm, vulkan (ggml) or torchvulkan")] = "cpu",
    adapter: Annotated[Path | None, typer.Option(help="An adapter file of yours (safetensors), measured too")] = None,
    model: Annotated[str, typer.Option(help="The file's base: sdxl, sd15, flux or zimage")] = "sdxl",
    full: Annotated[bool, typer.Option(help="All models' shapes and sizes; SDXL's UNet at real size")] = False,
    factor: Annotated[list[int] | None, typer.Option(help="The LoKr's (8); again: on layers too", min=1)] = None,
    rank: Annotated[int, typer.Option(help="The LoKr's rank on the whole UNet; 0: full w2")] = 0,
    attention_only: Annotated[bool, typer.Option(help="On the UNet's 722 attention layers, not all 788")] = False,
    tokens: Annotated[list[int] | None, typer.Option(help="Only layers, with so many; again for more", min=1)] = None,
    shard: Annotated[str, typer.Option(help="i/n: only every n-th cell, from the i-th (1 to n)")] = "1/1",
    budget: Annotated[float | None, typer.Option(help="Minutes of measuring; default 3, with --full no limit")] = None,
    seconds: Annotated[float, typer.Option(help="At least so long per cell, beside the minimum of blocks")] = 0.05,
    memory_only: Annotated[bool, typer.Option(help="Whole steps, bytes and no times: also on a busy machine")] = False,
    threads: Annotated[int, typer.Option(help="Threads of torch")] = os.cpu_count() or 1,
    out: Out = Path("reports"),
) -> None:
    """Check the ways of applying an adapter, then measure their bytes and time; write BACKEND.md and its data.

    A run that was interrupted goes on when started again.
    """
    if tokens and memory_only:
        raise typer.BadParameter("--memory-only measures whole steps, --tokens single layers: use one of them")
    minutes = budget if budget is not None else float("inf") if full else QUICK_MINUTES
    if backend == "vulkan":
        from fulldiff.harness.bench import vulkan as bench_vulkan

        raise typer.Exit(0 if bench_vulkan.bench(out, threads, (budget or 0) * 60, console) else CONFORMANCE)
    from fulldiff.harness.bench import run as benching
    from fulldiff.harness.bench.plan import FACTOR, Lokr

    first, *more = factor or [FACTOR]
    own = Lokr(first, rank, not attention_only)
    options = benching.Options(
        backend=backend, adapter=adapter, model=model, full=full, lokr=own, more_factors=tuple(more),
        tokens=tuple(tokens or []), seconds=seconds, budget=minutes, threads=threads, out=out, shard=shard_of(shard),
        memory_only=memory_only,
    )  # fmt: skip
    raise typer.Exit(0 if benching.bench(options, console) else CONFORMANCE)


def bench_load(
    seconds: Annotated[float, typer.Option(help="At least so long per workload, beside the minimum of blocks")] = 5,
    files: Annotated[int, typer.Option(help="How many rank-16 SDXL files to load end to end; 0: none")] = 8,
    threads: Annotated[int, typer.Option(help="Threads of torch")] = os.cpu_count() or 1,
    out: Out = Path("reports"),
) -> None:
    """Time loaders on the eight sets of the referential-loading pull request; write load.md, load.png, load.jsonl."""
    from fulldiff.harness.bench import load as benching

    benching.bench(out, seconds, threads, files, console)
