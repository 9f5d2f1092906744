"""reports/cpu.md, cpu.png: a pure function of the measured cells and the checks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from fulldiff.harness.files.match import Match
from fulldiff.harness.results import Cell, Environment, Result
from fulldiff.harness.subjects.names import NO_ADAPTER

LEVEL = 0.95


@dataclass(frozen=True)
class Sections:
    """Everything that the report shows."""

    conform: Counter[str]
    layers: list[Result]
    real: list[Result]
    file: Match | None
    cells: list[Cell]
    environment: Environment


def ratio(way: list[float], bare: list[float]) -> tuple[float, float, float]:
    """Geometric mean of the block-wise ratios to the bare layer, and its 95 % interval (Student's t)."""
    logs = [math.log(a / b) for a, b in zip(way, bare, strict=True)]
    mean, error = sum(logs) / len(logs), float(stats.sem(logs))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(logs) - 1)) * error
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def frame(cells: list[Cell]) -> pd.DataFrame:
    """One row per cell and way: labels, ratio with interval, extra bytes over the bare layer."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        for way in cell.seconds:
            if way == NO_ADAPTER:
                continue
            middle, low, high = ratio(cell.seconds[way], cell.seconds[NO_ADAPTER])
            extra = cell.peak_bytes[way] - cell.peak_bytes[NO_ADAPTER]
            check = cell.check[way].outcome if way in cell.check else "see layers"
            rows.append(
                cell.labels | {"way": way, "ratio": middle, "low": low, "high": high, "extra": extra, "check": check}
            )
    return pd.DataFrame(rows)


def write(sections: Sections, out: Path) -> None:
    """Write cpu.md and cpu.png into ``out``."""
    table = frame(sections.cells)
    (out / "cpu.md").write_text(markdown(sections, table))
    plot(table, out / "cpu.png")


def markdown(sections: Sections, table: pd.DataFrame) -> str:
    """The report's text."""
    parts = [
        "# runtime-lokr on the CPU\n",
        _environment(sections.environment),
        "## Is it right?\n",
        _checks(sections),
        "## What does it cost?\n",
        "Time: ratio to the bare layer (no adapter), geometric mean over A B B A blocks in one process. "
        "Memory: peak bytes beyond the bare layer's, exact. Medians over the layer shapes:\n",
        summary(table).to_markdown(index=False),
        "\n![time ratio against extra memory](cpu.png)\n",
        "## Every cell\n",
        "`[low, high]` is the 95 % interval of the ratio. Convolutions: tokens are output "
        "positions. Check: the timed outputs against the float64 oracle.\n",
        cells_table(table).to_markdown(index=False, disable_numparse=True),
        "",
    ]
    return "\n".join(parts)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Median ratio and extra MiB by form, dtype, way and token count."""
    keys = ["form", "dtype", "way"]
    ratios = table.pivot_table(index=keys, columns="tokens", values="ratio", aggfunc="median").round(3)
    extra = (table.pivot_table(index=keys, columns="tokens", values="extra", aggfunc="median") / 2**20).round(2)
    ratios.columns = [f"time ratio, {n} tokens" for n in ratios.columns]
    extra.columns = [f"extra MiB, {n} tokens" for n in extra.columns]
    ratios["time ratio, all"] = table.groupby(keys)["ratio"].median().round(3)
    return ratios.join(extra).reset_index()


def cells_table(table: pd.DataFrame) -> pd.DataFrame:
    """All cells as text."""
    shown = table.copy()
    shown["time ratio"] = [
        f"{r:.3f} [{low:.3f}, {high:.3f}]" for r, low, high in zip(table.ratio, table.low, table.high, strict=True)
    ]
    shown["extra bytes"] = [f"{extra:,}" for extra in table.extra]
    columns = ["layer", "count", "tokens", "dtype", "form", "way", "time ratio", "extra bytes", "check"]
    return shown[columns].rename(columns={"count": "layers in SDXL"})


def plot(table: pd.DataFrame, path: Path) -> None:
    """Time ratio against extra memory, one panel per dtype, one marker per cell."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, dtype in zip(axes, ("f32", "bf16"), strict=True):
        for (way, form), group in table[table.dtype == dtype].groupby(["way", "form"]):
            marker = "o" if way == "runtime-lokr" else "s"
            axis.scatter(group.extra / 2**20 + 0.01, group.ratio, label=f"{way}: {form}", marker=marker, alpha=0.7)
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="peak memory beyond the bare layer, MiB", title=dtype)
    axes[0].set_ylabel("time over the bare layer")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _environment(env: Environment) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in env.versions.items())
    return f"{env.device}; {env.platform}; {versions}.\n"


def _checks(sections: Sections) -> str:
    counts = ", ".join(f"{n} {name}" for name, n in sections.conform.most_common())
    lines = [
        f"- generated and named cases: {counts}",
        f"- SDXL's distinct layer shapes: {_tally(sections.layers)}",
    ]
    if sections.file:
        file = sections.file
        lines.append(
            f"- `{file.path.name}`: {len(file.targets)} modules, {_tally(sections.real)}; tensors unmatched "
            f"{len(file.unmatched)}, skipped {len(file.skipped)}; modules refused {len(file.refused)}"
        )
    return "\n".join(lines) + "\n"


def _tally(results: list[Result]) -> str:
    counts = Counter(result.judgement.outcome for result in results)
    worst = max((result.judgement.used for result in results), default=0.0)
    return ", ".join(f"{n} {name}" for name, n in counts.items()) + f" (at most {worst:.0%} of the error budget)"
