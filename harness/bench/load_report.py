"""reports/load.md and load.png: a pure function of the measured cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fulldiff.cases.load_sets import SETS
from fulldiff.harness.bench.numbers import MIB, ratio
from fulldiff.harness.results import Cell, Environment
from fulldiff.harness.subjects.loaders.names import FIRST, WARM

CLAIM = "0.75 … 0.85"
NAIVE = "naive"
OTHERS = ("naive-concatenating", "hoisted", "referential", "referential-forced", "indexed", f"indexed{WARM}")
MARGINAL = ("hoisted", "referential", "indexed", f"indexed{WARM}")
Interval = tuple[float, float, float]


def marginal(cell: Cell, way: str) -> Interval | None:
    """What each file beyond the first costs, over naive's, paired by block; None where a block has it below 0."""
    added = [
        [whole - first for whole, first in zip(cell.seconds[w], cell.seconds[w + FIRST], strict=True)]
        for w in (way, NAIVE)
    ]
    return None if min(map(min, added)) <= 0 else ratio(*added)


def write(cells: Sequence[Cell], environment: Environment, out: Path) -> None:
    """Write load.md and load.png into ``out``."""
    (out / "load.md").write_text(markdown(cells, environment))
    plot(cells, out / "load.png")


def of(cells: Iterable[Cell], plan: str) -> list[Cell]:
    return [cell for cell in cells if cell.labels["plan"] == plan]


def markdown(cells: Sequence[Cell], env: Environment) -> str:
    """The report's text."""
    versions = ", ".join(f"{name} {version}" for name, version in env.versions.items())
    sets, counts, sizes, whole = (of(cells, plan) for plan in ("set", "count", "size", "end to end"))
    parts = [
        "# Loading several LoRAs onto one model\n",
        f"{env.device}; {env.platform}; {versions}. Written by `fulldiff bench-load`.\n",
        INTRODUCTION,
        "## The eight sets: time over naive\n",
        _table(_set_row(cell) for cell in sets),
        "\n## Each LoRA beyond the first\n",
        "What the files after the first add, over what they add for naive; beside it the pull request's claim.\n",
        _table(_marginal_row(cell) for cell in sets if cell.labels["files"] > 1),
        _verdict(sets),
        "\n## Why: operations\n",
        COUNTERS,
        _table(_counter_row(cell) for cell in sets),
        "\n## Milliseconds per LoRA, for 1 to 32 LoRAs (722 modules each)\n",
        _table(_count_row(cell) for cell in counts),
        "\n## Milliseconds by the size of the file and of the model\n",
        _table(_size_row(cell) for cell in sizes),
        slopes(sizes),
        *(_whole(cell) for cell in whole),
        "\n![time over naive, per LoRA, by size](load.png)\n",
    ]
    return "\n".join(parts)


INTRODUCTION = """Matching alone, as the pull request "Proposed lora loading optimizations" timed it: key maps, scan, \
patch lists; no tensor
is computed with. CPU time of one thread. Naive = 1; [low, high] is the 95 % interval of the block-wise ratio
(A B … B A blocks in one process). `naive` spells each name with `str.format`, as its lineage does;
`naive-concatenating` differs in nothing else than `+`, and shows how much of its time that is. `indexed` makes its
index in every call; `indexed (warm)` has loaded these files before.

The files have SDXL's true names and counts: unet 788 modules, full 722 + 264, tiny 4; DMD2 is unet in another
spelling; SD1.5 is a LoRA of another model. The pull request speaks of 288 text-encoder modules; SDXL's two encoders
have 264.
"""
COUNTERS = """Names tried in the key maps (for `indexed`: keys looked up in its index, one a tensor) and tensor names \
spelled and
looked up in the files, 21 for a name that is not there.
"""


def _table(rows: Iterable[dict[str, Any]]) -> str:
    return str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))


def _shown(interval: Interval | None) -> str:
    return "n/a" if interval is None else "{:.3f} [{:.3f}, {:.3f}]".format(*interval)


def _ms(samples: Sequence[float]) -> float:
    return 1e3 * float(np.median(samples))


def _files(cell: Cell) -> str:
    return ", ".join(SETS[int(cell.labels["label"])])


def _set_row(cell: Cell) -> dict[str, Any]:
    ratios = {way: _shown(ratio(cell.seconds[way], cell.seconds[NAIVE])) for way in OTHERS}
    head = {"set": cell.labels["label"], "files": _files(cell), "tensors": cell.labels["tensors"]}
    return head | {"naive, ms": f"{_ms(cell.seconds[NAIVE]):.1f}"} | ratios


def _marginal_row(cell: Cell) -> dict[str, Any]:
    ratios = {way: _shown(marginal(cell, way)) for way in MARGINAL}
    return {"set": cell.labels["label"], "files": _files(cell), "claimed": CLAIM} | ratios


def _verdict(sets: Sequence[Cell]) -> str:
    """Where the claim does not hold for referential, and for one LoRA."""
    lines = []
    for cell in sets:
        if cell.labels["files"] == 1:
            one, forced = (
                ratio(cell.seconds[way], cell.seconds[NAIVE]) for way in ("referential", "referential-forced")
            )
            lines.append(f"One LoRA (set {cell.labels['label']}): {_shown(one)} (claimed: no cost); forced, over "
                         f"hoisted: {_shown(ratio(cell.seconds['referential-forced'], cell.seconds['hoisted']))} "
                         f"(claimed: 3 to 5 % slower); forced, over naive: {_shown(forced)}.")  # fmt: skip
        elif (found := marginal(cell, "referential")) and found[0] > 0.85:
            kinds = SETS[int(cell.labels["label"])]
            share = cell.labels["counters"]["referential"]["names"] / cell.labels["counters"][NAIVE]["names"]
            why = "text-encoder keys are left over after the UNet's known names, so its whole map follows"
            text = why if "full" in kinds else "a file of another model has keys left over in every pass"
            lines.append(f"Set {cell.labels['label']}: the claim does not hold ({found[0]:.2f}): {text}; "
                         f"referential still tries {share:.0%} of naive's names.")  # fmt: skip
    return "\n" + "\n".join(f"- {line}" for line in lines)


def _counter_row(cell: Cell) -> dict[str, Any]:
    counters = cell.labels["counters"]
    ways = (NAIVE, "referential", "referential-forced", "indexed")
    shown = {way: f"{counters[way]['names']:,} / {counters[way]['lookups']:,}" for way in ways}
    return {"set": cell.labels["label"], "files": _files(cell), "tensors": f"{cell.labels['tensors']:,}"} | shown


def _ways(cell: Cell) -> list[str]:
    return [way for way in cell.seconds if not way.endswith(FIRST)]


def _count_row(cell: Cell) -> dict[str, Any]:
    each = {way: f"{_ms(cell.seconds[way]) / cell.labels['files']:.2f}" for way in _ways(cell)}
    return {"LoRAs": cell.labels["label"]} | each


def _size_row(cell: Cell) -> dict[str, Any]:
    model, modules = cell.labels["label"].split()
    names = cell.labels["counters"][NAIVE]["names"]
    head = {"model": model, "names in its maps": f"{names:,}", "modules": modules, "tensors": cell.labels["tensors"]}
    return head | {way: f"{_ms(cell.seconds[way]):.3f}" for way in _ways(cell)}


def slopes(sizes: Sequence[Cell]) -> str:
    """Lines through the points of each model: microseconds a tensor, and what a file of no tensor would take."""
    lines = []
    for model in dict.fromkeys(cell.labels["label"].split()[0] for cell in sizes):
        own = [cell for cell in sizes if cell.labels["label"].split()[0] == model]
        for way in _ways(own[0]):
            fit = stats.linregress([c.labels["tensors"] for c in own], [_ms(c.seconds[way]) for c in own])
            lines.append(
                f"- {way} on {model}: {1e3 * fit.slope:.2f} µs a tensor, {fit.intercept:.2f} ms for a file of none"
            )
    return "\n" + "\n".join(lines)


def _whole(cell: Cell) -> str:
    """End to end: seconds of each stage, the ratios, the bytes."""
    stages = {
        stage: (cell.seconds[f"naive: {stage}"], cell.seconds[f"indexed: {stage}"]) for stage in ("match", "merge")
    }
    # Matching is quick and may have more blocks than merging: as many are put together as both have.
    naive, indexed = ([a + b for a, b in zip(*pair, strict=False)] for pair in zip(*stages.values(), strict=True))
    rows = [
        {"stage": stage, "naive, s": f"{_ms(n) / 1e3:.3f}", "indexed, s": f"{_ms(i) / 1e3:.3f}",
         "naive over indexed": _shown(ratio(n, i))}
        for stage, (n, i) in {**stages, "match and merge": (naive, indexed)}.items()
    ]  # fmt: skip
    held = cell.labels["bytes"]
    beyond = held["peak of merging"] - held["backups"]
    return "\n".join([
        f"\n## End to end: {cell.labels['label']} of rank 16, {cell.labels['weights']} weights of SDXL, f16\n",
        f"Opening takes {_ms(cell.seconds['open']) / 1e3:.3f} s for both. Merging: sums in f32, one cast; naive makes "
        "each delta whole and adds it,\nindexed adds all files' LoRAs of a weight in one product. Wall-clock "
        f"time; each of the {cell.labels['shapes']} shapes was\ntimed on one and counts as often as it occurs.\n",
        _table(rows),
        "\nBytes of a whole pass that keeps every weight it replaces (`indexed`): "
        f"files {held['files'] / MIB:,.1f} MiB, backups\n{held['backups'] / MIB:,.1f} MiB; beyond both, at most "
        f"{beyond / MIB:,.1f} MiB at once. The largest layer has {held['largest layer, f32'] / MIB:,.1f} MiB in f32.",
    ])  # fmt: skip


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Time over naive by set; milliseconds per LoRA by their number; milliseconds by the file's tensors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    panels: tuple[Callable[[Any, list[Cell]], None], ...] = (_bars, _per_lora, _by_size)
    for axis, panel, plan in zip(axes, panels, ("set", "count", "size"), strict=True):
        panel(axis, of(cells, plan))
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, sets: list[Cell]) -> None:
    width = 0.8 / len(MARGINAL)
    for place, way in enumerate(MARGINAL):
        ratios = [ratio(cell.seconds[way], cell.seconds[NAIVE])[0] for cell in sets]
        axis.bar(np.arange(len(sets)) + place * width, ratios, width, label=way)
    axis.axhline(1, color="gray", linewidth=0.8)
    axis.set(ylabel="time over naive", title="the eight sets", xlabel="set")
    axis.set_xticks(np.arange(len(sets)) + 0.3, [cell.labels["label"] for cell in sets])


def _per_lora(axis: Any, counts: list[Cell]) -> None:
    for way in _ways(counts[0]):
        axis.plot(
            [c.labels["files"] for c in counts],
            [_ms(c.seconds[way]) / c.labels["files"] for c in counts],
            "o-",
            label=way,
        )
    axis.set(xscale="log", yscale="log", xlabel="LoRAs", ylabel="ms per LoRA", title="722 modules each")


def _by_size(axis: Any, sizes: list[Cell]) -> None:
    for model in dict.fromkeys(cell.labels["label"].split()[0] for cell in sizes):
        own = [cell for cell in sizes if cell.labels["label"].split()[0] == model]
        for way in _ways(own[0]):
            axis.plot(
                [c.labels["tensors"] for c in own], [_ms(c.seconds[way]) for c in own], "o-", label=f"{way}, {model}"
            )
    axis.set(yscale="log", xlabel="tensors in the file", ylabel="ms", title="one file")
