"""reports/vulkan.md: a pure function of the result lines and the devices' descriptions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import pandas as pd

from fulldiff.harness.backends.vulkan import Device
from fulldiff.harness.results import Cell, Result

MAIN = "ggml@vulkan"
MIB = 1 << 20
# What the author of stable-diffusion.cpp's pull request 1233 measured: SDXL on an AMD card, MB and seconds a step.
PUBLISHED = """\
| Vulkan, AMD card, SDXL | 512² | 1024² | 1024×1536 |
|:---|---:|---:|---:|
| full diff | 3363.80 MB, 1.02 s | 4056.49 MB, 2.38 s | 4986.61 MB, 3.57 s |
| runtime LoKr | 137.05 MB, 0.92 s | 830.86 MB, 2.98 s | 1746.55 MB, 4.04 s, later 3.07 |

Full diff minus runtime is about 3,230 MB at every resolution: the all-alive column above, for a whole UNet. The
author's times are of different versions of that code."""


def markdown(
    results: Sequence[Result], cells: Sequence[Cell], devices: Sequence[Device], absent: Mapping[str, str]
) -> str:
    """The report's text; ``absent``: subjects that cannot be made here, and why."""
    software = all(device.software for device in devices)
    parts = [
        "# ggml on Vulkan\n",
        *(f"- {device.describe()}" for device in devices),
        *(f"- left out: {without_folders(reason)}" for reason in absent.values()),
        "\n## Is it right?\n",
        "Runtime LoKr, strict arithmetic (f32 in the shaders, f32 kernels), on generated cases:",
        _tally([r for r in results if r.subject == MAIN and not r.name]),
        "\nNamed cases, by subject. As shipped: convolution kernels in f16 and the shaders' own f16 arithmetic, with "
        "the error budget of f16. Split: the factors on the CPU, the base on the device.\n",
        table(subjects(results)),
        "\n## Every case that did not pass\n",
        "`ggml-sdcpp-order` is stable-diffusion.cpp's own sequence of operations (pull request 1233), "
        "`ggml-sdcpp-head` with its head's cutting of tokens.\n",
        table(failures(results)),
        "\n## What does it hold?\n",
        "ggml's compute buffer, MiB (of other runtimes' figures none is comparable): outputs and intermediates, "
        "without weights, factors and input. Error: RMS over RMS, of the delta alone (none: of the base).\n",
        table(layer_rows(cells, software)),
        "\nA chain of equal layers (1024→1024, f16 weights, 256 tokens, w1 16×16), compute buffer in MiB. All-alive is "
        "what ggml makes of a finished chain by itself: it walks depth-first from the last output, so every W' comes "
        "before the first activation, as in stable-diffusion.cpp before the pull request.\n",
        table(chain_rows(cells)),
        f"\nPublished figures, for comparison:\n\n{PUBLISHED}",
        *(["\n**Software Vulkan: its times mean nothing and gate nothing.**"] if software else []),
        "",
    ]
    return "\n".join(parts)


def table(rows: Sequence[dict[str, object]]) -> str:
    return str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)) if rows else "(none)"


def subjects(results: Sequence[Result]) -> list[dict[str, object]]:
    """One row a subject: how its named cases ended."""
    names = dict.fromkeys(r.subject for r in results if r.name)
    return [
        {"subject": name, "named cases": _tally([r for r in results if r.subject == name and r.name])} for name in names
    ]


def failures(results: Iterable[Result]) -> list[dict[str, object]]:
    """One row for each case that ended otherwise than passed, but for generated ones that are unsupported."""
    shown = [r for r in results if r.judgement.outcome != "passed" and (r.name or r.judgement.outcome != "unsupported")]
    return [
        {"subject": r.subject, "case": r.name or r.id, "outcome": r.judgement.outcome, "why": _why(r)} for r in shown
    ]


def layer_rows(cells: Sequence[Cell], software: bool) -> list[dict[str, object]]:
    """One row a layer and way: bytes, error and time on each backend."""
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for cell in cells:
        if "layer" not in cell.labels:
            continue
        layer, way, backend = (str(cell.labels[key]) for key in ("layer", "way", "backend"))
        row = rows.setdefault((layer, way), {"layer": layer, "way": way})
        row[f"{backend}, MiB"] = _size(cell, way)
        row[f"{backend}, error"] = f"{cell.facts['error']:.1e}" if cell.facts else ""
        timed = median(cell.seconds[way]) if way in cell.seconds else None
        meaningless = software and backend == "vulkan"
        row[f"{backend}, s"] = "" if timed is None else "(software)" if meaningless else f"{timed:.3f}"
    return list(rows.values())


def chain_rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row a way and backend: the bytes at each length."""
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for cell in cells:
        if "chain" in cell.labels:
            way, backend = str(cell.labels["way"]), str(cell.labels["backend"])
            row = rows.setdefault((way, backend), {"way": way, "backend": backend})
            row[f"{cell.labels['chain']} layers"] = _size(cell, way)
            if cell.facts:
                row["error"] = f"{cell.facts['error']:.1e}"
    return list(rows.values())


def _size(cell: Cell, way: str) -> str:
    if way in cell.peak_bytes:
        return f"{cell.peak_bytes[way] / MIB:g}"
    return cell.check[way].outcome if way in cell.check else "not measured"


def _tally(results: Sequence[Result]) -> str:
    counts = Counter(r.judgement.outcome for r in results)
    worst = max((r.judgement.used for r in results if r.judgement.outcome == "passed"), default=0.0)
    words = ", ".join(f"{n} {name}" for name, n in counts.most_common()) or "not run"
    return f"{words} (at most {worst:.0%} of the error budget)" if counts["passed"] else words


def _why(result: Result) -> str:
    """The claim broken, or the message without the folders of whoever built the library."""
    claim = result.judgement.claim
    if result.judgement.outcome in ("wrong", "not finite") and claim:
        return f"{claim.name} at {claim.index}: got {claim.got}, expected {claim.want}"
    return without_folders(result.judgement.message).replace("|", "/")


def without_folders(text: str) -> str:
    """Assertions and libraries with the file's name alone: the folders are those of whoever built or installed it."""
    return re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+\.(?:(?:cpp|c|h):\d+|so\b))", r"\1", text)
