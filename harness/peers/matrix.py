"""Implementation and kind × layer: how many cases were right, wrong, failed and left out; as a table and a heat map."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fulldiff.cases.model import SPATIAL_DIMS, RuntimeCase
from fulldiff.harness.results import Result

WRONG = ("wrong", "not finite")
RIGHT, UNTAKEN = ("passed",), ("refused", "unsupported", "absent")
CLASSES = {"passed": "right"} | dict.fromkeys(WRONG, "wrong") | dict.fromkeys(UNTAKEN, "left out")
SHOWN = ("right", "wrong", "failed", "left out")
# (implementation, kind, layer) → the cases of each class.
Cells = Mapping[tuple[str, str, str], Counter[str]]


def cells(runs: Mapping[str, Sequence[Result]]) -> Cells:
    """A case with adapters of several kinds is in no cell; crashes and what is raised count as failed."""
    found: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for peer, results in runs.items():
        for result in results:
            body = result.case.body
            kinds = {adapter.kind for adapter in body.adapters} if isinstance(body, RuntimeCase) else set()
            if isinstance(body, RuntimeCase) and len(kinds) == 1:
                found[peer, kinds.pop(), body.layer.kind][CLASSES.get(result.judgement.outcome, "failed")] += 1
    return found


def table(runs: Mapping[str, Sequence[Result]]) -> str:
    """The matrix as a markdown table."""
    found = cells(runs)
    rows = dict.fromkeys((peer, kind) for peer, kind, _ in found)
    frame = pd.DataFrame(
        {"implementation": peer, "kind": kind} | {layer: _cell(found, (peer, kind, layer)) for layer in SPATIAL_DIMS}
        for peer, kind in rows
    )
    return str(frame.to_markdown(index=False))


def _cell(found: Cells, key: tuple[str, str, str]) -> str:
    counts = found.get(key, Counter())
    text = ", ".join(f"{counts[name]} {name}" for name in SHOWN if counts[name]) or "–"
    return f"**{text}**" if counts["wrong"] or counts["failed"] else text


def plot(runs: Mapping[str, Sequence[Result]], path: Path) -> None:
    """The share of wrong and failed cases among those computed; grey where all are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = cells(runs)
    peers, kinds = list(runs), list(dict.fromkeys(kind for _, kind, _ in found))
    columns = [(kind, layer) for kind in kinds for layer in SPATIAL_DIMS]
    shares = [[_share(found.get((peer, *column), Counter())) for column in columns] for peer in peers]
    figure, axis = plt.subplots(figsize=(3 + 0.55 * len(columns), 1.8 + 0.4 * len(peers)), layout="constrained")
    axis.set_facecolor("lightgrey")
    image = axis.imshow(shares, cmap="RdYlGn_r", vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(len(columns)), [f"{kind} {layer}" for kind, layer in columns], rotation=60, ha="right")
    axis.set_yticks(range(len(peers)), peers)
    _write_shares(axis, shares)
    figure.colorbar(image, label="share of cases wrong or failed")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _share(counts: Counter[str]) -> float:
    bad = counts["wrong"] + counts["failed"]
    computed = bad + counts["right"]
    return bad / computed if computed else float("nan")


def _write_shares(axis: Any, shares: list[list[float]]) -> None:
    for row, own in enumerate(shares):
        for column, share in enumerate(own):
            if share > 0:
                axis.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=7)
