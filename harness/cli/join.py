"""The commands `fulldiff join` and `fulldiff bench-join`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.progress import Progress

from fulldiff.cases.model import DType
from fulldiff.harness.files.writers import WRITERS
from fulldiff.harness.manager import Worker

CONFORMANCE = 1
MIB = 1 << 20
THREADS = os.cpu_count() or 1
console, errors = Console(), Console(stderr=True)
Threads = Annotated[int, typer.Option(help="Threads of torch")]


def join(
    files: Annotated[list[Path], typer.Argument(help="LoRA files (safetensors), one or more")],
    model: Annotated[str, typer.Option(help="sd15, sdxl, flux or zimage")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write")],
    weights: Annotated[str, typer.Option(help="One number for each file, with commas; none: all 1")] = "",
    to: Annotated[str, typer.Option(help=f"{', '.join(WRITERS)}; none: the files' own, else kohya")] = "",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(get_args(DType))}; none: each layer's own")] = "",
    threads: Threads = THREADS,
) -> None:
    """Join LoRA files into one of rank Σr, say what went in, and check that it is their weighted sum.

    Exit code 1: a layer is not the sum, and OUT is not written. 2: a file cannot be joined, and why.
    """
    from fulldiff.harness.join import run as joining

    known = numbers(weights, len(files))
    family = next((family for family in WRITERS if family == to), None)
    kept = next((each for each in get_args(DType) if each == dtype), None)
    if to and family is None:
        raise typer.BadParameter(f"--to {to!r}: use {', '.join(WRITERS)}")
    if dtype and kept is None:
        raise typer.BadParameter(f"--dtype {dtype!r}: use {', '.join(get_args(DType))}")
    if out.exists():
        raise typer.BadParameter(f"{out} exists; name another file")
    with (
        Worker(threads=threads, timed=True) as worker,
        Progress(console=errors, disable=not errors.is_terminal) as progress,
    ):

        def start(layers: int) -> Callable[[], None]:
            task = progress.add_task(f"check {out.name}", total=layers)
            return lambda: progress.advance(task)

        made = joining.join(files, known, model, family, kept, out, worker, start)
    show(made, files, out)


def numbers(text: str, files: int) -> list[float]:
    """``0.7,-1`` as numbers, one for each file."""
    try:
        found = [float(part) for part in text.split(",")] if text else [1.0] * files
    except ValueError:
        raise typer.BadParameter(f"--weights {text!r}: give numbers with commas, such as 0.7,-1") from None
    if len(found) != files:
        raise typer.BadParameter(f"--weights {text!r}: {len(found)} numbers for {files} files; give one for each")
    return found


def show(made: object, files: list[Path], out: Path) -> None:
    """Print the report; exit with 1 where a layer is wrong."""
    from fulldiff.harness.join.run import Joined, describe

    assert isinstance(made, Joined)
    for line in describe(made, files):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    peak = "n/a" if made.peak_bytes is None else f"{made.peak_bytes / MIB:.1f} MiB"
    console.print(f"written in {made.seconds:.1f} s, peak memory {peak}", highlight=False)
    for name, judgement in made.wrong.items():
        reason = judgement.message or judgement.claim
        console.print(f"FAILED {name}: {reason}", markup=False, highlight=False, soft_wrap=True)
    for name in made.bad_tokens:
        console.print(f"FAILED token {name}: not the file's own", markup=False, highlight=False)
    failed = bool(made.wrong or made.bad_tokens)
    used = max((j.used for j in made.layers.values()), default=0.0)
    right = len(made.layers) - len(made.wrong)
    state = f"{out} NOT written" if failed else f"wrote {out}"
    console.print(
        f"{state}: {right} of {len(made.layers)} layers are the weighted sum "
        f"(at most {used:.0%} of what rounding allows)",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip
    raise typer.Exit(CONFORMANCE if failed else 0)


def bench_join(
    seconds: Annotated[float, typer.Option(help="At least so long per cell, beside the minimum of blocks")] = 0.1,
    python: Annotated[
        str, typer.Option(help="An interpreter that has fulldiff and PEFT; without PEFT it is left out")
    ] = sys.executable,
    threads: Threads = THREADS,
    out: Annotated[Path, typer.Option(help="The folder for reports; result lines go to its runs/")] = Path("reports"),
) -> None:
    """Time one joined LoRA against several apart, toggling and joining; compare other joins; write join.md."""
    from fulldiff.harness.bench import join as benching

    benching.bench(seconds, python, threads, out, console)
