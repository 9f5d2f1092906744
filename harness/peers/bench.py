"""`fulldiff peers --bench`: the peers' runtime ways beside ours, on the same layers, interleaved in one run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from msgspec import structs
from rich.console import Console
from rich.progress import Progress

from fulldiff.cases.model import BenchCase
from fulldiff.harness import conform
from fulldiff.harness.bench import numbers, plan, run
from fulldiff.harness.bench.plan import Workload
from fulldiff.harness.manager import Worker
from fulldiff.harness.results import Cell, Environment, Store, pooled, read
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER

OURS = ("runtime-lokr", "planned")
THEIRS = ("peft", "lycoris", "lycoris-bypass")
WAYS = (NO_ADAPTER, AGAIN, *OURS, *THEIRS)
SIZE = (1024, 1024)
FILE = "peers-bench.jsonl"


def planned() -> Iterator[Workload]:
    """SDXL's heaviest layer shapes, each with 77 and its own tokens, both forms and dtypes."""
    for workload in plan.layers(["sdxl"], (SIZE,), plan.SHAPES):
        body = workload.case.body
        assert isinstance(body, BenchCase)
        named = structs.replace(body, label=f"peers-{body.label}", ways=WAYS)
        yield Workload(workload.labels, structs.replace(workload.case, body=named))


def bench(folder: Path, seconds: float, budget: float, threads: int, console: Console) -> None:
    """Measure ``budget`` seconds at most, in the launches of a bench; result lines go to ``folder``."""
    end = time.monotonic() + budget
    with (
        Worker(threads=threads, timed=True, forked=True) as worker,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        store = Store.begin(folder / FILE, conform.environment(worker, OURS[0]))
        run.launches(list(planned()), partial(run.measured, worker, seconds=seconds), worker, store, end, progress)
    store.finish()


def section(folder: Path) -> str:
    """The report's section on speed and memory; empty where nothing was measured."""
    path = folder / FILE
    if not path.exists():
        return ""
    lines = list(read(path))
    cells = list(pooled(line for line in lines if isinstance(line, Cell)).values())
    measured = [cell for cell in cells if cell.seconds]
    if not measured:
        return ""
    environment = next(line for line in lines if isinstance(line, Environment))
    table = numbers.frame(measured)
    return f"\n## Speed and memory\n\n{_head(environment, table, cells)}\n\n{summary(table)}\n\n{verdict(table)}\n"


def _head(environment: Environment, table: pd.DataFrame, cells: Sequence[Cell]) -> str:
    left = len(cells) - table.id.nunique()
    return (
        f"LoKr on SDXL's heaviest layer shapes, workloads: {table.id.nunique()}"
        + (f" ({left} more could not be measured)" if left else "")
        + f"; {environment.device}. Time as a ratio to the bare layer in the same run,\n"
        f"memory as the peak of one call beyond the bare layer's. A/A noise floor: "
        f"±{numbers.noise(table)['half']:.1%} (half of a 95 % interval, median)."
    )


def summary(table: pd.DataFrame) -> str:
    """Per form, dtype and way: the median and largest ratio and extra memory."""
    shown = table[~table.way.isin([NO_ADAPTER, AGAIN])]
    groups = shown.groupby(["form", "dtype", "way"], sort=False)
    frame = groups.agg(
        median=("ratio", "median"), largest=("ratio", "max"), extra=("extra", "median"), most=("extra", "max")
    ).reset_index()
    frame.extra, frame.most = frame.extra / numbers.MIB, frame.most / numbers.MIB
    frame.columns = pd.Index(
        ["form", "dtype", "way", "time ratio, median", "largest", "extra MiB, median", "largest MiB"]
    )
    return str(frame.to_markdown(index=False, floatfmt=".3f"))


def verdict(table: pd.DataFrame) -> str:
    """Where runtime-lokr is slower or takes more memory than a peer, workload by workload; or that it is nowhere."""
    ours = table[table.way == OURS[0]].set_index("id")
    lines = []
    for way in THEIRS:
        theirs = table[table.way == way].set_index("id").add_suffix("_peer")
        beside = ours.join(theirs, how="inner")
        if beside.empty:
            lines.append(f"- {way}: not measured.")
            continue
        slower = beside[beside.low > beside.high_peer]
        bigger = beside[beside.extra > beside.extra_peer]
        medians = f"median ratio {beside.ratio.median():.3f} against {beside.ratio_peer.median():.3f}"
        lines.append(
            f"- {way}: {medians}; {_where('slower', slower, len(beside))}; {_where('bigger', bigger, len(beside))}."
        )
    return "runtime-lokr against each peer (slower: the intervals do not overlap):\n\n" + "\n".join(lines)


def _where(word: str, rows: pd.DataFrame, of: int) -> str:
    if rows.empty:
        return f"nowhere {word}"
    names = [f"{row.layer}, {row.tokens} tokens, {row.dtype}, {row.form}" for row in rows.itertuples()]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{word} on {len(names)} of {of} ({'; '.join(names[:4])}{more})"
