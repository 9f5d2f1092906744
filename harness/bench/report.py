"""reports/BACKEND.md, .csv and .png: a pure function of the measured cells and the checks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd

from fulldiff.harness.bench import plots as bench_plots
from fulldiff.harness.bench.numbers import MIB, advice, against_better, break_even, frame, noise, steps_of_layers
from fulldiff.harness.bench.plan import Workload, share
from fulldiff.harness.files.match import Match
from fulldiff.harness.results import Cell, Environment, Result
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER

# stable-diffusion.cpp, pull request 1233: SDXL on its author's AMD card, compute buffer MB and seconds per step.
PUBLISHED = """| published: stable-diffusion.cpp, AMD GPU | 512×512 | 1024×1024 | 1024×1536 |
|:--|--:|--:|--:|
| ROCm, full diff | 3295.83 MB, 0.89 s | 3993.52 MB, 2.14 s | 4860.33 MB, 3.20 s |
| ROCm, runtime LoKr | 137.05 MB, 1.3 s | 830.86 MB, 4.8 s | 1701.55 MB, 3.84 s |
| Vulkan, full diff | 3363.80 MB, 1.02 s | 4056.49 MB, 2.38 s | 4986.61 MB, 3.57 s |
| Vulkan, runtime LoKr | 137.05 MB, 0.92 s | 830.86 MB, 2.98 s | 1746.55 MB, 4.04 s, later 3.07 |
"""
DIFFERS = (
    "Theirs is ggml with f16 weights on a GPU and keeps every layer's W' alive at once (our `full-diff-alive`); "
    "830.86 MB is also their buffer without any adapter. Ours is torch, whose attention and convolutions need other "
    "buffers: compare each column with its own bare row, not across the tables.\n"
)
NOT_WAYS = (NO_ADAPTER, AGAIN)
NONE_RUN = "none run"


@dataclass(frozen=True)
class Sections:
    """Everything that the report shows. ``missing``: planned, but not measured."""

    conform: Counter[str]
    layers: list[Result]
    real: list[Result]
    file: Match | None
    cells: list[Cell]
    environment: Environment
    missing: list[Workload]


def write(sections: Sections, out: Path, backend: str) -> None:
    """Write the report, its plots, and every cell as CSV."""
    table = frame(cell for cell in sections.cells if cell.peak_bytes)
    table.drop(columns=["count_at"], errors="ignore").to_csv(out / f"{backend}.csv", index=False)
    (out / f"{backend}.md").write_text(markdown(sections, table, backend), encoding="utf-8")
    if table.seconds.notna().any():
        bench_plots.plot(table, out / f"{backend}.png")


def markdown(sections: Sections, table: pd.DataFrame, backend: str) -> str:
    """The report's text."""
    layers, timed = table[table.workload == "layer"], table.seconds.notna().any()
    parts = [
        f"# What an adapter costs: {backend}\n",
        environment(sections.environment),
        noise_floor(table),
        *missing(sections),
        "## Is it right?\n",
        checked(sections),
        *step_section(sections, table[table.workload == "step"]),
        *(layer_sections(layers, sections.cells, backend) if len(layers) else ["No single layer was measured.\n"]),
        *file_section(table),
        *merge_section(sections.cells),
        f"\nEvery cell{' with its 95 % interval' * bool(timed)} is in the CSV file beside this report.\n",
    ]
    return "\n".join(parts)


def step_section(sections: Sections, steps: pd.DataFrame) -> list[str]:
    """A whole step, beside the published one; nothing where none was asked for."""
    asked = [*(cell.labels for cell in sections.cells), *(workload.labels for workload in sections.missing)]
    if not any(labels["workload"] == "step" for labels in asked):
        return []
    return ["## A whole step of SDXL's UNet\n", *step_tables(steps), PUBLISHED, DIFFERS]


def layer_sections(layers: pd.DataFrame, cells: list[Cell], backend: str) -> list[str]:
    """What single layers cost, in a step together, and from how many tokens on streamed is the faster."""
    return [
        "## Its layers one by one\n",
        f"{measured_shapes(layers)}\n",
        "Time over the bare layer, median over the shapes; extra: peak memory of a call beyond the bare layer's; "
        "held: what stays between calls.\n",
        layer_summary(layers),
        planned_line(cells),
        *layer_steps(layers),
        f"\n![time against memory]({backend}.png)\n",
        "## Runtime or streamed?\n",
        *(f"- {line}" for line in advice(break_even(layers))),
        "\nTokens above which `streamed` is the faster, by shape:\n",
        break_even_table(layers),
    ]


def measured_shapes(layers: pd.DataFrame) -> str:
    """How much of each model's step was measured."""
    found = layers.groupby("model").layer.unique()
    parts = [
        f"{len(names)} layer shapes of {model}, {share(model, set(names)):.0%} of a step's FLOPs"
        for model, names in found.items()
    ]
    return f"Measured: {'; '.join(parts)}; a LoKr of factor 8 where no other is named."


def environment(env: Environment) -> str:
    """One line of versions."""
    versions = ", ".join(f"{name} {version}" for name, version in env.versions.items())
    return f"{env.device}; {env.platform}; {versions}.\n"


def noise_floor(table: pd.DataFrame) -> str:
    """How much two equal ways differ here."""
    found = noise(table)
    if not found["cells"]:
        return "The bytes alone were measured, no times.\n"
    loud = (
        " **Too noisy to tell small differences: close other programs and run again.**" if found["half"] > 0.03 else ""
    )
    return (
        f"Noise floor: the bare layer against itself, {found['cells']:.0f} cells: 95 % interval ±{found['half']:.1%} "
        f"(median), farthest ratio {found['worst']:.1%} from 1, interval holds 1 in {found['hold']:.0%}.{loud}\n"
    )


def missing(sections: Sections) -> list[str]:
    """What the budget left out, and what could not be run."""
    failed = [cell for cell in sections.cells if not cell.peak_bytes and not cell.facts]
    lines = [f"Not measured: {c.labels} — {next(iter(c.check.values())).message}\n" for c in failed]
    if sections.missing:
        lines.append(
            f"Not measured before the budget or the run ended: {len(sections.missing)} cells; run again with "
            "--budget MINUTES.\n"
        )
    return lines


def checked(sections: Sections) -> str:
    """What was compared with the oracle."""
    counts = ", ".join(f"{n} {name}" for name, n in sections.conform.most_common()) or NONE_RUN
    timed = Counter(check.outcome for cell in sections.cells for check in cell.check.values())
    lines = [
        f"- `runtime-lokr`, generated and named cases: {counts}",
        f"- `runtime-lokr`, SDXL's distinct layer shapes: {tally(sections.layers)}",
        f"- outputs of the timed calls, all ways: {', '.join(f'{n} {name}' for name, n in timed.items())}",
    ]
    if sections.file:
        file = sections.file
        lines.append(
            f"- `{file.path.name}`: {len(file.targets)} modules, {tally(sections.real)}; tensors unmatched "
            f"{len(file.unmatched)}, skipped {len(file.skipped)}; modules refused {len(file.refused)}"
        )
    return "\n".join(lines) + "\n"


def tally(results: list[Result]) -> str:
    """Outcomes, and the largest share of the error budget."""
    if not results:
        return NONE_RUN
    counts = Counter(result.judgement.outcome for result in results)
    worst = max(result.judgement.used for result in results)
    return ", ".join(f"{n} {name}" for name, n in counts.items()) + f" (at most {worst:.0%} of the error budget)"


def step_tables(steps: pd.DataFrame) -> list[str]:
    """Compute buffer, held bytes, seconds and ratio of each way, one table per dtype and width."""
    if steps.empty:
        return ["No whole step was measured.\n"]
    made = []
    for (narrowed, dtype, form), group in steps.groupby(["narrowed", "dtype", "form"]):
        width = "real size" if narrowed == 1 else f"channels divided by {narrowed:.0f}"
        made.append(f"SDXL's UNet, {width}, random weights, {dtype}, {form}.")
        made.append("Buffer: peak beyond what is resident; held: what the way keeps beyond the bare model, MiB.")
        if group.ratio.notna().any():
            made.append("First step: kernels chosen, caches cold, what is kept not yet made; attaching is not in it.")
        made[-1] += "\n"
        made.append(step_table(group) + "\n")
    return made


def step_table(group: pd.DataFrame) -> str:
    """Ways down, image sizes across."""
    rows = []
    for way in dict.fromkeys(group.way):
        row = {"way": way}
        for cell in group[group.way == way].to_dict("records"):
            size = cell["size"]
            row[f"{size}: buffer MiB"] = f"{cell['peak'] / MIB:,.1f}"
            row[f"{size}: held MiB"] = f"{cell['held'] / MIB:,.1f}"
            if math.isnan(cell["ratio"]):
                continue
            row[f"{size}: first step, s"] = f"{cell['first']:.3f}"
            row[f"{size}: s/step"] = f"{cell['seconds']:.3f}"
            row[f"{size}: ratio"] = interval(cell)
        rows.append(row)
    return to_markdown(pd.DataFrame(rows))


def interval(cell: dict[str, float]) -> str:
    """``1.07 [1.05, 1.09]``."""
    return f"{cell['ratio']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"


def layer_summary(layers: pd.DataFrame) -> str:
    """Median ratio and extra MiB by form, dtype, way and kind of token count."""
    shown = layers[~layers.way.isin(NOT_WAYS)].copy()
    shown["over floor"] = shown.ratio / shown.floor
    keys = ["form", "dtype", "way"]
    grouped = shown.groupby(keys)
    few = shown[shown.tokens == 77].groupby(keys).ratio.median()
    many = shown[shown.tokens > 77].groupby(keys).ratio.median()
    table = pd.DataFrame({"ratio, all": grouped.ratio.median(), "ratio, 77 tokens": few, "ratio, more tokens": many})
    table["slowest shape"] = grouped.ratio.max()
    table["over FLOP floor"] = [
        value if key[2] == "runtime-lokr" else None for key, value in grouped["over floor"].median().items()
    ]
    table = table.map(lambda value: "" if pd.isna(value) else f"{value:.3f}")
    table["extra MiB, median"] = (grouped.extra.median() / MIB).map("{:,.2f}".format)
    table["held MiB, median"] = (grouped.held.median() / MIB).map("{:,.2f}".format)
    table["extra MiB, most"] = (grouped.extra.max() / MIB).map("{:,.2f}".format)
    return to_markdown(table.reset_index())


def planned_line(cells: list[Cell]) -> str:
    """How often the planner took the wrong way."""
    found = against_better(cells)
    if not found:
        return ""
    ratios = [middle for middle, *_ in found]
    return (
        f"\n`planned` over the faster of `streamed` and `runtime-lokr` in {len(found)} cells: median "
        f"{median(ratios):.3f}, most {max(ratios):.3f}; slower by over 3 % in "
        f"{sum(each > 1.03 for each in ratios)}, of which certain (the whole 95 % interval) "
        f"{sum(low > 1.03 for _, low, _ in found)}."
    )


def layer_steps(layers: pd.DataFrame) -> list[str]:
    """Weighted ratios, image sizes across; nothing where no layer was measured at a token count of an image."""
    if not layers.count_at.map(bool).any():
        return []
    sums = steps_of_layers(layers)
    wide = sums.pivot_table(index=["model", "form", "dtype", "way"], columns="size", values="ratio")
    return [
        "\nThe measured shapes as often as each occurs in a step, over the bare layers:\n",
        to_markdown(wide.map("{:.3f}".format).reset_index()),
    ]


def break_even_table(layers: pd.DataFrame) -> str:
    """Shapes down, dtypes and forms across."""
    points = break_even(layers)
    points["tokens"] = points.tokens.map(lambda n: "always runtime" if n == float("inf") else f"{n:.0f}")
    points["of"] = points.dtype + ", " + points.form
    wide = points.pivot(index=["model", "layer"], columns="of", values="tokens")
    return to_markdown(wide.reset_index())


def file_section(table: pd.DataFrame) -> list[str]:
    """The user's own file."""
    own = table[(table.workload == "file") & ~table.way.isin(NOT_WAYS)]
    if own.empty:
        return []
    shown = own.assign(ratio=[interval(row) for row in own.to_dict("records")])
    shown["extra bytes"] = own.extra.map("{:,}".format)
    columns = ["layer", "form", "layers", "tokens", "way", "ratio", "extra bytes", "check"]
    return ["\n## Your file\n", to_markdown(shown[columns])]


def merge_section(cells: list[Cell]) -> list[str]:
    """How much of ΔW arrives, by base dtype and size, summed once and one by one."""
    text = (
        "Eight LoRAs of equal size merged into a random 640×640 base: the share of ΔW that arrives (1: all of it), and "
        "in brackets what arrives besides, both over ‖ΔW‖. Each rounded on its own, or summed in f32 and cast once.\n\n"
    )
    rows: dict[tuple[str, float], dict[str, str]] = {}
    for cell in (cell for cell in cells if cell.labels["workload"] == "merge"):
        row = rows.setdefault((cell.labels["dtype"], cell.labels["size"]), {})
        name = "one by one" if cell.labels["one_by_one"] else "summed once"
        row[name] = f"{cell.facts['along']:.3f} (±{cell.facts['noise']:.2f})"
    named = [{"base": dtype, "‖ΔW‖/‖W‖": f"{size:.1%}", **row} for (dtype, size), row in rows.items()]
    return ["\n## Merging into a narrow base\n", text + to_markdown(pd.DataFrame(named))] if named else []


def to_markdown(table: pd.DataFrame) -> str:
    """Aligned, numbers as they are given."""
    return str(table.to_markdown(index=False, disable_numparse=True))
