"""The commands `fulldiff diagnose` and `fulldiff peers`; a worker runs the subject."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from fulldiff.cases.model import RuntimeCase
from fulldiff.harness import conform as conforming
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Diagnose
from fulldiff.harness.search import FINE
from fulldiff.harness.subjects.names import PEERS

CONFORMANCE = 1
console = Console()


def diagnose(
    case: Annotated[str, typer.Argument(help="A case's JSON file, or a name from `fulldiff list`")],
    subject: Annotated[str, typer.Option(help="The subject that is wrong on it")],
    python: Annotated[str, typer.Option(help="The interpreter that runs the subject")] = sys.executable,
) -> None:
    """Say which known fault, or pair of faults, gives the subject's numbers on a case of the runtime suite."""
    loaded = conforming.named_case(case)
    if not isinstance(loaded.body, RuntimeCase):
        raise typer.BadParameter(f"{case} is a {loaded.suite} case; only runtime cases are diagnosed")
    with Worker(python) as worker:
        answer = worker.ask(Diagnose(loaded, subject))
    if answer.diagnosis is None:
        assert answer.judgement is not None
        outcome, message = answer.judgement.outcome, answer.judgement.message
        if outcome == "absent":
            raise typer.BadParameter(message)
        console.print(f"not computed: {message}", markup=False, highlight=False)
        raise typer.Exit(0 if outcome in FINE else CONFORMANCE)
    console.print(str(answer.diagnosis), markup=False, highlight=False)
    raise typer.Exit(0 if answer.diagnosis.right else CONFORMANCE)


def peers(
    out: Annotated[Path, typer.Option(help="The folder for peers.md; result lines are in its runs/")] = Path("reports"),
    seed: Annotated[int, typer.Option(help="The seed of the conform runs")] = 1,
    bench: Annotated[bool, typer.Option("--bench", help="First measure the peers' runtime ways beside ours")] = False,
    budget: Annotated[float, typer.Option(help="Minutes of measuring at most")] = 10.0,
    seconds: Annotated[float, typer.Option(help="At least so long per workload, beside the minimum of blocks")] = 0.05,
    threads: Annotated[int, typer.Option(help="Threads of torch while measuring")] = os.cpu_count() or 1,
) -> None:
    """Diagnose what `fulldiff conform --subject PEER` found, reproduce it with the peer alone, and write peers.md.

    Run it in an environment that has the peers. Exit code 1: a finding's reproduction does not confirm it.
    """
    from fulldiff.harness.peers import bench as benching
    from fulldiff.harness.peers import report as reporting

    runs = reporting.load(out / "runs", PEERS, seed)
    if not runs:
        raise typer.BadParameter(f"no runs of {', '.join(PEERS)} in {out / 'runs'}: run fulldiff conform first")
    if bench:
        benching.bench(out / "runs", seconds, budget * 60, threads, console)
    found = {}
    with Worker() as worker, Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("diagnose and reproduce", total=None)
        for peer, results in runs.items():
            made = reporting.findings(peer, results, worker, lambda: progress.advance(task))
            found[peer] = reporting.confirmed(made, worker, lambda: progress.advance(task))
    reporting.write(runs, found, out)
    every = [finding for own in found.values() for finding in own]
    held = sum(finding.confirmed for finding in every)
    console.print(f"{held} of {len(every)} findings of {len(runs)} peers confirmed; wrote {out / 'peers.md'}")
    raise typer.Exit(0 if held == len(every) else CONFORMANCE)


def register(app: typer.Typer) -> None:
    """Add both commands to the program."""
    app.command()(diagnose)
    app.command()(peers)
