"""The command line's `gate`, `baseline` and `report`; what they need is imported when they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

console, errors = Console(), Console(stderr=True)
FORMS = ("markdown", "json")
# A plan may have many cells: so many of those that are missing are named.
MISSING_SHOWN = 30
Subject = Annotated[str, typer.Option(help="runtime-lokr, full-diff, … or package.module:Name")]
Out = Annotated[Path, typer.Option(help="The folder for reports; result lines go to its runs/")]
Expect = Annotated[Path | None, typer.Option(help="Known failures (TOML) of your subject")]


def gate(
    base: Annotated[str, typer.Option(help="A git revision, a folder, a subject, or a stored result file")],
    head: Annotated[str, typer.Option(help="The same, of the change")] = ".",
    subject: Subject = "runtime-lokr",
    base_python: Annotated[str, typer.Option(help="The interpreter that runs the base")] = sys.executable,
    head_python: Annotated[str, typer.Option(help="The interpreter that runs the head")] = sys.executable,
    cells: Annotated[int, typer.Option(help="How many cells to time")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch")] = os.cpu_count() or 1,
    expect: Expect = None,
    form: Annotated[str, typer.Option("--format", help="markdown or json")] = "markdown",
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit file")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write a JSON file")] = None,
    out: Out = Path("reports"),
) -> None:
    """Compare base and head side by side: conformance, bytes exactly, times by interval.

    Exit code 1: conformance; 3: regression; 4: unfit machine or inconclusive. A gate that was killed goes on.
    """
    from fulldiff.harness.gate import report as gate_report
    from fulldiff.harness.gate import run as gating
    from fulldiff.harness.gate.baseline import accepted_bytes
    from fulldiff.harness.gate.sides import side_of

    if form not in FORMS:
        raise typer.BadParameter(f"--format {form!r}: use {' or '.join(FORMS)}")
    accepted = accepted_bytes(out / "baseline")
    if base.endswith(".jsonl") and head.endswith(".jsonl"):
        report = gating.compare_stored(Path(base), Path(head), expect)
    else:
        with (
            side_of(base, subject, base_python) as one,
            side_of(head, subject, head_python) as other,
            Progress(console=errors, disable=not errors.is_terminal) as progress,
        ):
            task = progress.add_task("gate: blocks", total=None)
            report = gating.compare(one, other, cells, threads, expect, out / "runs", lambda: progress.advance(task))
    report.accepted = accepted
    print(gate_report.text_of(report, form))
    if junit:
        junit.write_text(gate_report.junit(report), encoding="utf-8")
    if as_json:
        as_json.write_text(gate_report.text_of(report, "json"), encoding="utf-8")
    raise typer.Exit(report.exit_code)


baseline = typer.Typer(no_args_is_help=True, help="Numbers of bytes that a person accepted.")


@baseline.command()
def accept(
    cell: Annotated[str, typer.Argument(help="The cell, as the gate names it")],
    peak_bytes: Annotated[int, typer.Argument(help="Its new peak")],
    reason: Annotated[str, typer.Option(help="Why it is meant")],
    out: Out = Path("reports"),
) -> None:
    """Write the line that lets a changed number of bytes pass the gate: baseline/accepted.jsonl."""
    from fulldiff.harness.gate import baseline as baselines

    baselines.accept(out / "baseline", cell, peak_bytes, reason)
    console.print(f"wrote {out / 'baseline' / baselines.NAME}; commit it", highlight=False)


@baseline.command(name="list")
def list_accepted(out: Out = Path("reports")) -> None:
    """List what is accepted."""
    from fulldiff.harness.gate.baseline import accepted_bytes

    for cell, count in accepted_bytes(out / "baseline").items():
        console.print(f"{count:>15,} bytes  {cell}", highlight=False, markup=False)


def report(
    files: Annotated[list[Path], typer.Argument(help="Result files (JSON lines) of shards or machines")],
    expect: Expect = None,
    out: Out = Path("reports"),
) -> None:
    """Put shards and machines together: conform runs into conform.md, bench cells into BACKEND.md.

    Exit code 1: a case failed, or an expectation is stale; 4: planned cases or cells are missing, the first by name.
    """
    from fulldiff.harness import together

    found = together.report(files, expect, out)
    for path in found.written:
        console.print(f"wrote {path} from {len(files)} files", highlight=False)
    more = len(found.missing) - MISSING_SHOWN
    for line in [
        *found.failed,
        *found.missing[:MISSING_SHOWN],
        *([f"and {more:,} more are missing"] if more > 0 else []),
    ]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if found.failed else 4 if found.missing else 0)
