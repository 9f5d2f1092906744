"""reports/join.md and join.png: a pure function of what `fulldiff bench-join` measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from fulldiff.harness.bench.numbers import ratio
from fulldiff.harness.bench.report import environment as versions
from fulldiff.harness.results import Cell, Environment
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER

JOINED, APART, PEFT = "ljl", "runtime-lokr", "peft"
MIB = 1 << 20
# Above this half-width of the bare layer against itself small differences cannot be told.
QUIET = 0.03
# What is asked: joined over its FLOP floor, over ours apart, PEFT over it; seconds of a toggle.
FLOOR, SLOWER, PEFT_FASTER, TOGGLE = 1.05, 1.03, 1.5, 0.020


def frame(cells: list[Cell]) -> pd.DataFrame:
    """One row per measured cell: the paired ratios of the ways, and whether the outputs were right."""
    rows = [_row(cell) for cell in cells if cell.seconds]
    return pd.DataFrame(rows)


def _row(cell: Cell) -> dict[str, Any]:
    seconds = cell.seconds
    peft = PEFT if PEFT in seconds else None
    bare, low, high = ratio(seconds[JOINED], seconds[NO_ADAPTER])
    apart, apart_low, apart_high = ratio(seconds[JOINED], seconds[APART])
    _, again_low, again_high = ratio(seconds[AGAIN], seconds[NO_ADAPTER])
    over, over_low, over_high = ratio(seconds[peft], seconds[JOINED]) if peft else (math.nan,) * 3
    floor = cell.facts["flop_floor"]
    return cell.labels | {
        "bare_ms": 1000 * sorted(seconds[NO_ADAPTER])[len(seconds[NO_ADAPTER]) // 2],
        "bare": bare, "bare_low": low, "bare_high": high, "floor": floor, "over_floor": bare / floor,
        "over_floor_low": low / floor,
        "apart": apart, "apart_low": apart_low, "apart_high": apart_high,
        "peft": over, "peft_low": over_low, "peft_high": over_high,
        "noise": math.log(again_high / again_low) / 2,
        "right": all(check.outcome == "passed" for check in cell.check.values()),
    }  # fmt: skip


def write(cells: list[Cell], facts: list[Cell], environment: Environment, peft: str, out: Path) -> None:
    """Write the report and its plot into ``out``."""
    table = frame(cells)
    (out / "join.md").write_text(markdown(table, facts, environment, peft), encoding="utf-8")
    plot(table, out / "join.png")


def markdown(table: pd.DataFrame, facts: list[Cell], environment: Environment, peft: str) -> str:
    """The report's text."""
    parts = [
        "# Several LoRAs as one\n",
        versions(environment),
        noise_floor(table),
        "## What other joins give\n",
        "The same two files (rank 8, alpha 4 and none, weights 0.7 and −0.3; the second does not adapt the text "
        "encoder's layer). Error: ‖got − right‖ / ‖right‖. Effect: how many times each file's own delta is in the "
        "result (least squares). Realised: the error of the file that is written while diagonal (1, 0.5) and scale "
        "0.8 are set.\n",
        effects(facts),
        "" if not peft else f"\nPEFT is left out: {peft}\n",
        "\n## One pass for all files, or one for each\n",
        "Ratios of paired times (A B … B A blocks in one process), `[low, high]` the 95 % interval. Over the floor: "
        "joined over bare, over what its FLOPs alone allow.\n",
        *(f"- {line}" for line in targets(table)),
        "\nMedians over the shapes at 1024 tokens:\n",
        summary(table),
        "\n![joined against apart](join.png)\n",
        "## Files and toggling\n",
        *(f"- {line}" for line in files(facts)),
        "\n## Every cell\n",
        every_cell(table),
        "",
    ]
    return "\n".join(parts)


def noise_floor(table: pd.DataFrame) -> str:
    """How much two equal ways differ here, and whether that is too much."""
    half = float(table.noise.median())
    loud = " **Too noisy to tell small differences: close other programs and run again.**" if half > QUIET else ""
    return f"Noise floor: the bare layer against itself, 95 % interval ±{half:.1%} (median of the cells).{loud}\n"


def effects(facts: list[Cell]) -> str:
    """One row per way to join."""
    rows = []
    for cell in facts:
        if "effect" not in cell.labels:
            continue
        known = cell.facts
        said = next(iter(cell.check.values())).message if cell.check else ""
        rows.append(
            {
                "join": cell.labels["effect"],
                "error": _percent(known.get("error"), said),
                "effect of the first file (right: 0.7)": _number(known.get("multiple 0")),
                "of the second (right: −0.3)": _number(known.get("multiple 1")),
                "realised": _percent(known.get("realised"), "no diagonal"),
            }
        )
    return str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))


def _percent(value: float | None, otherwise: str) -> str:
    if value is None:
        return otherwise
    return f"{value:.1%}" if value > 5e-4 else f"{value:.0e}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def targets(table: pd.DataFrame) -> list[str]:
    """What was asked, and what was measured."""
    chosen = table[(table.files == 8) & (table["rank"] == 16)]
    at = chosen[chosen.tokens == 1024]
    several = table[table.files > 1]
    worst, floor = several.loc[several.apart.idxmax()], at.loc[at.over_floor.idxmax()]
    lines = [
        f"Eight of rank 16 at 1024 tokens: joined is {at.over_floor.median():.3f} × its floor in the median over the "
        f"shapes, {floor.over_floor:.3f} at the most ({floor.layer}); asked: {FLOOR}.",
        f"Joined over apart, eight of rank 16: median {chosen.apart.median():.3f}; over all {len(several)} cells with "
        f"more than one file: median {several.apart.median():.3f}, worst {worst.apart:.3f} "
        f"[{worst.apart_low:.3f}, {worst.apart_high:.3f}] ({worst.layer}, {worst.files} × rank {worst['rank']}, "
        f"{worst.tokens} tokens); asked: below {SLOWER}, {int((several.apart_low > SLOWER).sum())} cells are "
        "certainly above it.",
    ]
    if at.peft.notna().any():
        lines.append(
            f"PEFT's eight active adapters over joined at 1024 tokens: median {at.peft.median():.2f}, "
            f"{at.peft.min():.2f} at the least; asked: {PEFT_FASTER}. Over the bare layer: PEFT "
            f"{(at.peft * at.bare).median():.2f}, joined {at.bare.median():.2f}."
        )
    lines.append(f"Outputs of the timed calls: right in {int(table.right.sum())} of {len(table)} cells.")
    return lines


def summary(table: pd.DataFrame) -> str:
    """Median ratios by rank and number of files."""
    at = table[table.tokens == 1024]
    columns = ["bare", "floor", "over_floor", "apart", "peft"]
    medians = at.groupby(["rank", "files"])[columns].median().round(3).reset_index()
    names = {
        "bare": "joined / bare",
        "over_floor": "over the floor",
        "apart": "joined / apart",
        "peft": "PEFT / joined",
    }
    return str(medians.rename(columns=names).to_markdown(index=False))


def files(facts: list[Cell]) -> list[str]:
    """Joining two files of 788 modules, and setting the diagonals of the joined one."""
    by_id = {cell.id: cell for cell in facts}
    lines = []
    if joined := by_id.get("join/788"):
        peak, output, layer = joined.peak_bytes["peak"], joined.peak_bytes["output"], joined.facts["layer"]
        shown = f"{peak / MIB:.1f} MiB" if peak else "n/a"
        lines.append(
            f"Two files of 788 modules of rank 16 (f16) joined in {joined.facts['seconds']:.1f} s; peak memory "
            f"beyond what the process had: {shown}; the output has {output / MIB:.1f} MiB, "
            f"its largest layer {layer / MIB:.1f}."
        )
    if toggled := by_id.get("toggle/788"):
        times = sorted(toggled.seconds["set"])
        grown = toggled.peak_bytes.get("grown")
        kept = "n/a" if grown is None else f"{grown / 1024:.0f} KiB"
        lines.append(
            f"Setting the diagonal of {toggled.facts['layers']:.0f} modules: {1000 * times[len(times) // 2]:.3f} ms in "
            f"the median of {len(times)}, {1000 * times[-1]:.3f} ms at the most (asked: {1000 * TOGGLE:.0f}); "
            f"memory grown over all: {kept}."
        )
    return lines


def every_cell(table: pd.DataFrame) -> str:
    """All cells with their intervals."""
    shown = pd.DataFrame(
        {
            "layer": table.layer, "tokens": table.tokens, "rank": table["rank"], "files": table.files,
            "bare ms": table.bare_ms.map("{:.2f}".format),
            "joined / bare": _intervals(table, "bare"), "floor": table.floor.map("{:.3f}".format),
            "joined / apart": _intervals(table, "apart"), "PEFT / joined": _intervals(table, "peft"),
            "outputs": table.right.map({True: "right", False: "WRONG"}),
        }
    )  # fmt: skip
    return str(shown.to_markdown(index=False, disable_numparse=True))


def _intervals(table: pd.DataFrame, name: str) -> list[str]:
    columns = zip(table[name], table[f"{name}_low"], table[f"{name}_high"], strict=True)
    return ["" if middle != middle else f"{middle:.3f} [{low:.3f}, {high:.3f}]" for middle, low, high in columns]


def plot(table: pd.DataFrame, path: Path) -> None:
    """Joined over bare against the floor, and over apart, by number of files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    at = table[table.tokens == 1024]
    for rank, group in at.groupby("rank"):
        for axis, name in zip(axes, ("over_floor", "apart"), strict=True):
            by_count = group.groupby("files")[name]
            axis.plot(by_count.median(), marker="o", label=f"rank {rank}")
            axis.fill_between(by_count.median().index, by_count.min(), by_count.max(), alpha=0.15)
    for axis, title in zip(axes, ("joined over its FLOP floor", "joined over one pass for each file"), strict=True):
        axis.set(xscale="log", xlabel="files", ylabel="time ratio (median and range over the shapes)", title=title)
        axis.set_xticks(sorted(at.files.unique()), [str(n) for n in sorted(at.files.unique())])
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
