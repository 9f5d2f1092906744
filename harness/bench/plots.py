"""The plots of a bench: time against memory, and the ways side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fulldiff.harness.bench.numbers import MIB, steps_of_layers
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER

COLOURS = {
    "full-diff": "tab:red", "full-diff-alive": "tab:brown", "streamed": "tab:orange", "runtime-lokr": "tab:blue",
    "hybrid": "tab:purple", "planned": "tab:green", "merged": "tab:gray",
}  # fmt: skip


def plot(table: pd.DataFrame, path: Path) -> None:
    """Each layer cell, a step's layers together, a whole step: side by side, what was measured of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = table[~table.way.isin([NO_ADAPTER, AGAIN])]
    layers, steps = (shown[shown.workload == workload] for workload in ("layer", "step"))
    sums = steps_of_layers(table[table.workload == "layer"])
    drawn = [(draw, of) for draw, of in ((scatter, layers), (bars, sums), (pareto, steps)) if len(of)]
    if not drawn:
        return
    figure, axes = plt.subplots(1, len(drawn), figsize=(17 / 3 * len(drawn), 5), layout="constrained", squeeze=False)
    for axis, (draw, of) in zip(axes[0], drawn, strict=True):
        draw(axis, of)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def scatter(axis: Any, cells: pd.DataFrame) -> None:
    """Time ratio against memory, one point per cell."""
    for way, group in cells.groupby("way"):
        axis.scatter(beyond(group), group.ratio, s=14, alpha=0.6, color=COLOURS[way], label=way)
    axis.set_yscale("log")
    decorate(axis, "single layers", "memory beyond the bare layer, buffer and held, MiB")


def beyond(cells: pd.DataFrame) -> pd.Series[float]:
    """Peak of a call and what is held, MiB; never 0, for a logarithmic axis."""
    return (cells.extra.clip(lower=0) + cells.held.clip(lower=0)) / MIB + 0.01


def bars(axis: Any, sums: pd.DataFrame) -> None:
    """A step's layers together, by image size, dtype and form."""
    wide = sums.pivot_table(index=["size", "dtype", "form"], columns="way", values="ratio")
    wide.index = [" ".join(map(str, key)) for key in wide.index]
    wide.plot.barh(ax=axis, color=[COLOURS[way] for way in wide.columns], legend=False)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set(xlim=(0.95, None), xlabel="time over the bare layers", title="the layers of a step, weighted", ylabel="")
    axis.tick_params(axis="y", labelsize=7)


def pareto(axis: Any, steps: pd.DataFrame) -> None:
    """Whole steps: time against buffer and held bytes, a marker for each image size."""
    markers = dict(zip(steps["size"].unique(), "os^D", strict=False))
    for way in steps.way.unique():
        axis.scatter([], [], color=COLOURS[way], label=way)
    for size, marker in markers.items() if len(markers) > 1 else ():
        axis.scatter([], [], color="white", edgecolor="black", marker=marker, label=size)
    for (way, size), group in steps.groupby(["way", "size"], sort=False):
        axis.scatter(beyond(group), group.ratio, color=COLOURS[way], marker=markers[size], s=40)
    decorate(axis, "a whole step", "memory beyond the bare model, buffer and held, MiB")


def decorate(axis: Any, title: str, label: str) -> None:
    """Logarithmic memory, the bare layer's time as a line."""
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", xlabel=label, ylabel="time over the bare layer", title=title)
    axis.legend(fontsize=7)
