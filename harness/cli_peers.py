"""The commands `fulldiff diagnose` and `fulldiff peers`; both load torch and run the subject in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from fulldiff.harness import conform as conforming
from fulldiff.harness.subjects.names import PEERS

CONFORMANCE = 1
console = Console()


def diagnose(
    case: Annotated[str, typer.Argument(help="A case's JSON file, or a name from `fulldiff list`")],
    subject: Annotated[str, typer.Option(help="The subject that is wrong on it")],
) -> None:
    """Say which known fault, or pair of faults, gives the subject's numbers on a case of the runtime suite."""
    from fulldiff.cases.model import RuntimeCase
    from fulldiff.harness.diagnosis import diagnose as diagnosing
    from fulldiff.harness.subjects.base import Refused, Unsupported
    from fulldiff.harness.subjects.registry import SubjectError
    from fulldiff.harness.subjects.registry import subject as subject_called

    loaded = conforming.named_case(case)
    if not isinstance(loaded.body, RuntimeCase):
        raise typer.BadParameter(f"{case} is a {loaded.suite} case; only runtime cases are diagnosed")
    try:
        found = diagnosing(loaded, subject_called(subject))
    except (Refused, Unsupported) as reason:
        console.print(f"not computed: {reason}", markup=False, highlight=False)
        return
    except SubjectError as error:
        raise typer.BadParameter(str(error)) from error
    console.print(str(found), markup=False, highlight=False)
    raise typer.Exit(0 if found.right else CONFORMANCE)


def peers(
    out: Annotated[Path, typer.Option(help="The folder for peers.md; result lines are in its runs/")] = Path("reports"),
    seed: Annotated[int, typer.Option(help="The seed of the conform runs")] = 1,
    into: Annotated[Path | None, typer.Option(help="Write the report here instead")] = None,
) -> None:
    """Diagnose what `fulldiff conform --subject PEER` found for each peer, and write peers.md."""
    from fulldiff.harness import peers as reporting

    runs = reporting.load(out / "runs", PEERS, seed)
    if not runs:
        raise typer.BadParameter(f"no runs of {', '.join(PEERS)} in {out / 'runs'}: run fulldiff conform first")
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("diagnose", total=None)
        found = {
            peer: reporting.findings(peer, results, lambda: progress.advance(task)) for peer, results in runs.items()
        }
    path = into or out / "peers.md"
    path.write_text(reporting.markdown(runs, found))
    console.print(f"{sum(map(len, found.values()))} findings of {len(runs)} peers; wrote {path}")


def register(app: typer.Typer) -> None:
    """Add both commands to the program."""
    app.command()(diagnose)
    app.command()(peers)
