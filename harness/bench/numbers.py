"""From measured cells to numbers: ratios with intervals, the noise floor, steps put together, break-even points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pandas as pd
from scipy import stats

from fulldiff.harness.results import Cell
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER

LEVEL = 0.95
# The ways that ``planned`` chooses from.
CHOICES = ["streamed", "runtime-lokr"]
MIB = 2**20


def ratio(way: list[float], bare: list[float]) -> tuple[float, float, float]:
    """Geometric mean of the block-wise ratios to the bare layer, and its 95 % interval (Student's t)."""
    logs = [math.log(a / b) for a, b in zip(way, bare, strict=True)]
    mean, error = sum(logs) / len(logs), float(stats.sem(logs))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(logs) - 1)) * error
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def frame(cells: Iterable[Cell]) -> pd.DataFrame:
    """One row per cell and way: labels, seconds, ratio with interval, extra and held bytes, check.

    Of a cell whose bytes alone were measured the times are NaN.
    """
    return pd.DataFrame([_row(cell, way) for cell in cells for way in cell.peak_bytes])


def _row(cell: Cell, way: str) -> dict[str, Any]:
    timed = way in cell.seconds
    middle, low, high = ratio(cell.seconds[way], cell.seconds[NO_ADAPTER]) if timed else (math.nan,) * 3
    numbers = {
        "way": way,
        "seconds": stats.gmean(cell.seconds[way]) if timed else math.nan,
        "first": stats.gmean(cell.first_seconds[way]) if way in cell.first_seconds else math.nan,
        "ratio": middle,
        "low": low,
        "high": high,
        "peak": cell.peak_bytes[way],
        "extra": cell.peak_bytes[way] - cell.peak_bytes[NO_ADAPTER],
        "held": cell.held_bytes[way] - cell.held_bytes[NO_ADAPTER],
        "reserved": cell.reserved_bytes.get(way, math.nan),
        "check": cell.check[way].outcome if way in cell.check else "",
        "floor": cell.facts.get("flop_floor", math.nan),
    }
    return cell.labels | {"id": cell.id} | numbers


def noise(table: pd.DataFrame) -> dict[str, float]:
    """The A/A way: how wide its intervals are, how far its ratios are from 1, how many intervals hold 1."""
    again = table[(table.way == AGAIN) & table.ratio.notna()]
    half = (again.high / again.low).map(math.log) / 2
    return {
        "cells": len(again),
        "half": float(half.median()),
        "worst": float(again.ratio.map(math.log).abs().max()),
        "hold": float(((again.low <= 1) & (again.high >= 1)).mean()),
    }


def against_better(cells: Iterable[Cell]) -> list[tuple[float, float, float]]:
    """For each single layer the ratio (with interval) of ``planned`` to the faster of the ways that it plans with."""
    found = []
    for seconds in (cell.seconds for cell in cells if cell.labels["workload"] == "layer"):
        ways = [seconds[way] for way in CHOICES if way in seconds]
        if ways and "planned" in seconds:
            found.append(ratio(seconds["planned"], min(ways, key=lambda times: math.fsum(map(math.log, times)))))
    return found


def steps_of_layers(layers: pd.DataFrame) -> pd.DataFrame:
    """For each model, image size, dtype, form and way: the layers' time as often as each occurs, over the bare one."""
    keys = ["model", "size", "dtype", "form", "way"]
    rows = []
    for row in layers.to_dict("records"):
        for size, count in (row["count_at"] or {}).items():
            rows.append(
                {name: row.get(name) for name in (*keys, "extra")} | {"size": size, "weighted": count * row["seconds"]}
            )
    spread = pd.DataFrame(rows, columns=[*keys, "extra", "weighted"])
    sums = spread.groupby(keys, as_index=False).agg(seconds=("weighted", "sum"), extra=("extra", "max"))
    bare = sums[sums.way == NO_ADAPTER].set_index(keys[:-1]).seconds
    sums["ratio"] = [r.seconds / bare[tuple(getattr(r, k) for k in keys[:-1])] for r in sums.itertuples()]
    return sums[~sums.way.isin([NO_ADAPTER, AGAIN])]


def break_even(layers: pd.DataFrame) -> pd.DataFrame:
    """For each shape, dtype and form: the tokens above which streamed is faster than runtime.

    Interpolated on a logarithmic axis between measured token counts; infinite: runtime is always faster,
    0: never.
    """
    keys = ["model", "layer", "dtype", "form"]
    rows = []
    for key, group in layers[layers.way.isin(CHOICES)].groupby(keys):
        wide = group.pivot_table(index="tokens", columns="way", values="ratio").sort_index()
        if set(CHOICES) <= set(wide.columns):
            lead = (wide["streamed"] - wide["runtime-lokr"]).to_dict()
            rows.append(dict(zip(keys, key, strict=True)) | {"tokens": crossing(lead)})
    return pd.DataFrame(rows)


def crossing(lead: dict[int, float]) -> float:
    """Where a lead that is positive for few tokens ends."""
    points = sorted(lead.items())
    if all(value > 0 for _, value in points):
        return math.inf
    if points[0][1] <= 0:
        return 0.0
    for (left, above), (right, below) in itertools.pairwise(points):
        if below <= 0:
            share = above / (above - below)
            return math.exp(math.log(left) + share * (math.log(right) - math.log(left)))
    return math.inf


def advice(points: pd.DataFrame) -> list[str]:
    """One sentence per dtype and form that a maintainer can act on."""
    lines = []
    for (dtype, form), group in points.groupby(["dtype", "form"]):
        middle = float(group.tokens.median())
        if math.isinf(middle):
            text = "runtime is the faster at every token count measured, on most shapes"
        elif middle == 0:
            text = "streamed is the faster at every token count measured, on most shapes"
        else:
            low, high = float(group.tokens.min()), float(group.tokens.max())
            text = f"below {middle:.0f} tokens use runtime, above it streamed (by shape from {low:.0f} to {high:.0f})"
        lines.append(f"{dtype}, {form}: {text}.")
    return lines
