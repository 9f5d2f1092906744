"""The commands `fulldiff diagnose` and `fulldiff peers`; a worker runs the subject."""

from __future__ import annotations

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
        raise typer.Exit(0 if outcome == "refused" else CONFORMANCE)
    console.print(str(answer.diagnosis), markup=False, highlight=False)
    raise typer.Exit(0 if answer.diagnosis.right else CONFORMANCE)


def peers(
    out: Annotated[Path, typer.Option(help="The folder for peers.md; result lines are in its runs/")] = Path("reports"),
    seed: Annotated[int, typer.Option(help="The seed of the conform runs")] = 1,
    into: Annotated[Path | None, typer.Option(help="Write the report here instead")] = None,
) -> None:
    """Diagnose what `fulldiff conform --subject PEER` found for each peer, and write peers.md."""
    from fulldiff.harness.peers import report as reporting

    runs = reporting.load(out / "runs", PEERS, seed)
    if not runs:
        raise typer.BadParameter(f"no runs of {', '.join(PEERS)} in {out / 'runs'}: run fulldiff conform first")
    with Worker() as worker, Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("diagnose", total=None)
        found = {
            peer: reporting.findings(peer, results, worker, lambda: progress.advance(task))
            for peer, results in runs.items()
        }
    path = into or out / "peers.md"
    path.write_text(reporting.markdown(runs, found))
    console.print(f"{sum(map(len, found.values()))} findings of {len(runs)} peers; wrote {path}")


def register(app: typer.Typer) -> None:
    """Add both commands to the program."""
    app.command()(diagnose)
    app.command()(peers)
