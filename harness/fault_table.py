"""`fulldiff faults`: every named fault run as a subject until the suite flags it.

On exact cases, but for DoRA's: a quotient by a norm is not exact, so they are hunted in f32 with its budget; and but
for a rounding that powers of two do not show.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from hypothesis.strategies import SearchStrategy
from rich.console import Console
from rich.progress import Progress

from fulldiff.cases.model import DTYPES, Case, DType
from fulldiff.cases.strategies import runtime_cases
from fulldiff.harness.asking import ask
from fulldiff.harness.manager import Worker
from fulldiff.harness.results import Store
from fulldiff.harness.search import Engine, Search

EXAMPLES = 2000
# How small an error of the scale is found on random values, in so many cases of LoRA and LoKr.
SHARES, SHARE_EXAMPLES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 1e-4, 1e-5), 150
DORA, ROUNDING = "dora-", "scale-in-f32"


DOCS = """
import json
from fulldiff.reference.faults import FAULTS
print(json.dumps({name: " ".join((type(fault).__doc__ or "").split()) for name, fault in FAULTS.items()}))
"""


def docs() -> dict[str, str]:
    """What each named fault does; asked in a process of its own, for the faults load torch."""
    known: dict[str, str] = ask(DOCS)
    return known


@dataclass(frozen=True)
class Flagged:
    """How one fault was found: on which values, after how many cases and seconds, the smallest that shows it."""

    fault: str
    values: str
    cases: int
    seconds: float
    smallest: str


def run(names: list[str], folder: Path, seed: int, seconds: float, console: Console) -> list[Flagged]:
    """Search for each fault, ``seconds`` at most; an empty ``smallest``: not found."""
    rows = []
    with Worker() as worker, Progress(console=console, disable=not console.is_terminal) as progress:
        worker.start()
        for name in progress.track(names, description="faults"):
            path = folder / f"fault-{name}-{seed}.jsonl"
            path.unlink(missing_ok=True)
            store, start = Store(path), time.monotonic()
            search = Search(Engine(store, worker, f"fault:{name}"), EXAMPLES, seconds, 1.0, first_only=True)
            values, cases_of = _strategy(name)
            found = search.run(cases_of, seed)
            cases = search.first_after or len(store.results())
            smallest = min((r.id for r in found.values()), key=len, default="")
            rows.append(Flagged(name, values, cases, time.monotonic() - start, smallest))
            store.close()
    return rows


def _strategy(name: str) -> tuple[str, SearchStrategy[Case]]:
    """Which values show a fault, in words, and the cases with them."""
    if name.startswith(DORA):
        return "normal, f32", runtime_cases(values=("normal",), dtypes=("f32",))
    if name == ROUNDING:
        return "normal, f64", runtime_cases(values=("normal",), dtypes=("f64",))
    return "exact", runtime_cases(values=("exact",))


def smallest_scale_errors(folder: Path, seed: int, console: Console) -> dict[DType, float]:
    """For each dtype the smallest error of the scale that normal values show, the next smaller one being missed."""
    found: dict[DType, float] = {}
    with Worker() as worker, Progress(console=console, disable=not console.is_terminal) as progress:
        for dtype in progress.track(DTYPES, description="scale errors"):
            strategy = runtime_cases(("lora", "lokr"), ("normal",), (dtype,), extras=())
            for share in SHARES:
                path = folder / f"scale-off-{dtype}-{share}.jsonl"
                path.unlink(missing_ok=True)
                store = Store(path)
                engine = Engine(store, worker, f"fault:scale-off-{share}")
                flagged = Search(engine, SHARE_EXAMPLES, 20.0, 0.0, first_only=True).run(strategy, seed)
                store.close()
                if not flagged:
                    break
                found[dtype] = share
    return found


def sensitivity(found: dict[DType, float]) -> str:
    """The table of smallest errors, in words and percent."""
    rows = [
        {"dtype": dtype, "smallest scale error found": f"{found[dtype]:.3%}" if dtype in found else "none"}
        for dtype in DTYPES
    ]
    return (
        "\n## How small an error is found on random values\n\n"
        f"A subject that is exact but for its scale, {SHARE_EXAMPLES} LoRA and LoKr cases with normal values; tried: "
        + ", ".join(f"{share:.3%}" for share in SHARES)
        + ".\nExact cases find any error at all, in every dtype.\n\n"
        + str(pd.DataFrame(rows).to_markdown(index=False))
        + "\n"
    )


def markdown(rows: list[Flagged], docs: dict[str, str]) -> str:
    """The table of reports/faults.md."""
    frame = pd.DataFrame(
        {
            "fault": row.fault,
            "what it does": docs[row.fault],
            "values": row.values,
            "flagged": "yes" if row.smallest else "NO",
            "cases until flagged": row.cases,
            "smallest case": f"`{row.smallest}`",
        }
        for row in rows
    )
    found = sum(bool(row.smallest) for row in rows)
    total = sum(row.seconds for row in rows)
    head = (
        "# Named faults\n\nEach known wrong way to compute, run as a subject on generated cases: "
        f"{found} of {len(rows)} flagged, {total:.0f} s in all, shrinking included.\n"
        "Exact values leave a correct subject no error at all; DoRA divides by a norm, so its faults are hunted\n"
        "with normal values in f32 and the budget of rounding. Written by `fulldiff faults`.\n\n"
    )
    return str(head + frame.to_markdown(index=False) + "\n")
