"""Exit codes: 0 ok, 1 conformance, 2 usage or bad input, 3 regression, 4 unfit or inconclusive, 5 backend absent,
70 harness error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fulldiff.cases.model import CaseError
from fulldiff.harness import conform as conforming
from fulldiff.harness.cli import bench as cli_bench
from fulldiff.harness.cli import gate as cli_gate
from fulldiff.harness.cli import join as cli_join
from fulldiff.harness.cli import peers as cli_peers
from fulldiff.harness.devices import devices as find_devices
from fulldiff.harness.manager import BackendAbsent, Worker, WorkerError
from fulldiff.harness.results import Result, ResultsError
from fulldiff.harness.search import FINE
from fulldiff.harness.shards import shard_of
from fulldiff.harness.suites import SUITES

CONFORMANCE, USAGE, ABSENT, HARNESS = 1, 2, 5, 70

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console, errors = Console(), Console(stderr=True)
Subject = Annotated[str, typer.Option(help="runtime-lokr, full-diff, fault:NAME or package.module:Name")]
Python = Annotated[str, typer.Option(help="The interpreter that runs the subject")]
Out = Annotated[Path, typer.Option(help="The folder for reports; result lines go to its runs/")]


@app.command()
def conform(
    subject: Subject = "runtime-lokr",
    suite: Annotated[str, typer.Option(help="The promise to check")] = "runtime",
    profile: Annotated[str, typer.Option(help="quick, ci or soak")] = "quick",
    seed: int = 1,
    python: Python = sys.executable,
    expect: Annotated[Path | None, typer.Option(help="Known failures (TOML) of your subject")] = None,
    shard: Annotated[str, typer.Option(help="i/n: the i-th of n parts; see `fulldiff report`")] = "1/1",
    out: Out = Path("reports"),
) -> None:
    """Check a subject against the full diff on named and generated cases. Run again to resume."""
    if suite not in SUITES:
        raise typer.BadParameter(f"suite {suite!r}: use one of {', '.join(SUITES)}")
    if profile not in conforming.PROFILES:
        raise typer.BadParameter(f"profile {profile!r}: use {', '.join(conforming.PROFILES)}")
    known = conforming.expectations(subject, expect)
    chosen = conforming.PROFILES[profile]
    part = shard_of(shard)
    outcome = conforming.conform(subject, chosen, seed, out / "runs", python, console, known, suite, part)
    conforming.show(outcome, subject, console)
    raise typer.Exit(0 if outcome.ok else CONFORMANCE)


@app.command()
def replay(case: str, subject: Subject = "runtime-lokr", python: Python = sys.executable) -> None:
    """Run one saved case (JSON), or a named one, and say what came out."""
    from fulldiff.cases.model import case_id

    loaded = conforming.named_case(case)
    with Worker(python) as worker:
        judgement = worker.judge(loaded, subject)
    console.print(conforming.describe(Result(case_id(loaded), subject, "cpu", loaded, judgement)), markup=False)
    raise typer.Exit(0 if judgement.outcome in FINE else CONFORMANCE)


@app.command(name="list")
def list_() -> None:
    """List suites, subjects, backends and named cases."""
    from fulldiff.harness.subjects.names import FAULT, PROGRAM

    for name, suite in SUITES.items():
        console.print(f"suite {name}: {suite.promise}", highlight=False)
        yours = f"{FAULT}NAME, package.module:Name, {PROGRAM}COMMAND"
        console.print(f"  subjects: {', '.join(suite.subjects)}, {yours}", highlight=False)
    console.print("backends: cpu (see `fulldiff devices`)", highlight=False)
    console.print("named cases:", highlight=False)
    for suite in SUITES.values():
        for name in suite.named():
            console.print(f"  {name}", highlight=False)


@app.command()
def devices() -> None:
    """List the backends, and for each what it is or exactly which piece is missing."""
    table = Table("backend", "state")
    for name, state in find_devices():
        table.add_row(name, state)
    console.print(table)


@app.command()
def faults(out: Out = Path("reports"), seed: int = 1, seconds: float = 20.0) -> None:
    """Run every named fault as a subject until it is flagged; find the smallest scale error; write faults.md."""
    from fulldiff.harness import fault_table

    docs = fault_table.docs()
    rows = fault_table.run(list(docs), out / "runs", seed, seconds, console)
    text = fault_table.markdown(rows, docs)
    text += fault_table.sensitivity(fault_table.smallest_scale_errors(out / "runs", seed, console))
    (out / "faults.md").write_text(text)
    missed = [row.fault for row in rows if not row.smallest]
    console.print(f"{len(rows) - len(missed)} of {len(rows)} faults flagged; wrote {out / 'faults.md'}")
    if missed:
        console.print(f"not flagged: {', '.join(missed)}")
    raise typer.Exit(CONFORMANCE if missed else 0)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="An adapter file (safetensors)")],
    model: Annotated[str, typer.Option(help="sd15, sdxl, flux, zimage, or a checkpoint's path")],
    subject: Subject = "runtime-lokr",
    header: Annotated[bool, typer.Option("--header", help="Read the header only; compute nothing")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Use the checkpoint's own weights, not made ones")] = False,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the whole report here (- for stdout)")] = None,
    python: Python = sys.executable,
    threads: Annotated[int, typer.Option(help="Threads of torch")] = os.cpu_count() or 1,
) -> None:
    """Say what an adapter file holds, what of it fits a model, and whether a subject applies it right.

    Exit code 1: the subject is wrong on a layer, or does not apply it. 2: the file is only partly usable.
    """
    from fulldiff.harness import check as checking
    from fulldiff.harness import check_report

    base, checkpoint = checking.base_of(model)
    report = checking.read(file, base)
    if weights and checkpoint is None:
        raise typer.BadParameter(f"--weights: {model} is a table of names and shapes; give a checkpoint's path")
    if not header:
        with (
            Worker(python, threads=threads) as worker,
            Progress(console=errors, disable=not errors.is_terminal) as progress,
        ):
            task = progress.add_task(f"check {file.name}", total=checking.count(report))
            own = checkpoint if weights else None
            report = checking.judge(report, worker, subject, own, lambda: progress.advance(task))
    if as_json:
        text = json.dumps(check_report.as_json(report), indent=1)
        print(text) if str(as_json) == "-" else as_json.write_text(text)
    if str(as_json) != "-":
        check_report.show(report, console)
    if any(layer.judgement.outcome == "absent" for layer in report.layers):
        raise typer.Exit(ABSENT)
    failed = report.wrong or report.untaken
    raise typer.Exit(CONFORMANCE if failed else 0 if report.whole else USAGE)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="An adapter file (safetensors)")],
    to: Annotated[str, typer.Option(help="kohya, lycoris, diffusers, diffusers-old, peft, comfyui or cloneofsimo")],
    model: Annotated[str, typer.Option(help="sd15, sdxl, flux or zimage")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write")],
) -> None:
    """Write an adapter file under another family's names, and check that every layer's delta is the same."""
    from fulldiff.harness import convert as converting

    if to not in converting.FAMILIES:
        raise typer.BadParameter(f"--to {to!r}: use {', '.join(converting.FAMILIES)}")
    if out.exists():
        raise typer.BadParameter(f"{out} exists; name another file")
    with Worker() as worker, Progress(console=errors, disable=not errors.is_terminal) as progress:

        def start(layers: int) -> Callable[[], None]:
            task = progress.add_task(f"compare {out.name}", total=layers)
            return lambda: progress.advance(task)

        made = converting.convert(file, model, to, out, worker, start)
    for name, judgement in made.wrong.items():
        console.print(f"FAILED {name}: {judgement.message or judgement.claim}", markup=False, highlight=False)
    for name, reason in made.left_out.items():
        console.print(f"left out {name}: {reason}", markup=False, highlight=False)
    state = f"wrote {out}" if not made.wrong else f"{out} NOT written"
    console.print(f"{state}: {len(made.layers) - len(made.wrong)} of {len(made.layers)} layers have the same delta")
    raise typer.Exit(CONFORMANCE if made.wrong else 0)


@app.command()
def load(
    files: Annotated[list[Path], typer.Argument(help="Adapter files (safetensors), in the order of loading")],
    model: Annotated[str, typer.Option(help="sd15, sdxl, flux or zimage")],
    strength: Annotated[list[float] | None, typer.Option(help="One for all files, or one for each")] = None,
    text_strength: Annotated[list[float] | None, typer.Option(help="The text encoders'; none: the same")] = None,
    rejection: Annotated[str, typer.Option(help="When a file is left out: 12-tensors, half or never")] = "12-tensors",
    loader: Annotated[str, typer.Option(help="indexed, referential, naive … or package.module:Name")] = "indexed",
    threads: Annotated[int, typer.Option(help="Threads of torch")] = os.cpu_count() or 1,
) -> None:
    """Load several adapter files onto one model, end to end; say what each did to which part.

    Exit code 2: a file is rejected or only partly used.
    """
    from fulldiff.harness.load import files as load_files

    with Worker(threads=threads, timed=True) as worker:
        strengths = strength or [1.0]
        made = load_files.load(files, model, strengths, text_strength or [], rejection, loader, worker)
    load_files.show(made, model, console)
    raise typer.Exit(0 if made.whole else USAGE)


app.command()(cli_bench.bench)
app.command(name="bench-load")(cli_bench.bench_load)
app.command()(cli_gate.gate)
app.command()(cli_gate.report)
app.add_typer(cli_gate.baseline, name="baseline")
app.command()(cli_join.join)
app.command(name="bench-join")(cli_join.bench_join)
cli_peers.register(app)


def main() -> None:
    """Run the command line; known errors become one line and an exit code."""
    from fulldiff.harness.files.container import FileError

    try:
        app()
    except (CaseError, ResultsError, conforming.ExpectationError, FileError) as error:
        console.print(f"fulldiff: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(USAGE)
    except BackendAbsent as error:
        console.print(f"fulldiff: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(ABSENT)
    except WorkerError as error:
        console.print(f"fulldiff: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(HARNESS)


if __name__ == "__main__":
    main()
