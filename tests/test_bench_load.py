"""The bench of loaders: its cells, ratios and verdict, and that its report follows from its cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulldiff.cases.load_sets import SETS, lora_file, rows_of
from fulldiff.cases.model import Case, LoadCase, Model
from fulldiff.harness.bench import load as bench_load
from fulldiff.harness.bench import load_report as bench_load_report
from fulldiff.harness.load import worker as load_worker
from fulldiff.harness.protocol import Load, TimeLoad
from fulldiff.harness.results import Cell, Environment
from fulldiff.harness.subjects.loaders.names import FIRST, WARM


def test_a_bench_cell_is_timed_in_pairs_and_counted() -> None:
    body = LoadCase(
        Model("sdxl", layers=("unet.conv_out",)), tuple(lora_file(rows_of("tiny"), False, copy=n) for n in (0, 1))
    )
    ways = ("naive", f"indexed{WARM}")
    answer = load_worker.run(TimeLoad(Case(body), ways, 0.0))
    assert set(answer["seconds"]) == {*ways, *(way + FIRST for way in ways)}
    assert {len(samples) for samples in answer["seconds"].values()} == {load_worker.MIN_BLOCKS}
    assert answer["tensors"] == 24
    assert answer["counters"][f"indexed{WARM}"]["names"] == 24


def test_end_to_end_accounts_for_the_bytes(tmp_path: Path) -> None:
    path = bench_load.write(tmp_path / "a.safetensors", lora_file(rows_of("tiny"), False, rank=4))
    file = lora_file(rows_of("tiny"), False)
    body = LoadCase(Model("sdxl", "f16"), (type(file)(path=str(path)),))
    answer = load_worker.run(TimeLoad(Case(body), ("naive", "indexed"), 0.0, end_to_end=True))
    held = answer["bytes"]
    assert held["backups"] == 2 * sum(row.parameters for row in rows_of("tiny"))
    # One layer in f32, its result and its factors: the result counts as the backup that it makes necessary.
    assert held["peak of merging"] <= held["backups"] + 2 * held["largest layer, f32"]
    told = load_worker.run(Load(Case(body), "indexed"))
    assert told["files"][0]["parts"]["unet"] == {"tensors": 12, "weights": 4, "kinds": ["lora"], "strength": 1.0}


# Matching has more blocks than merging.
STAGES = (("match", 7), ("merge", 5))


def cell(label: str, files: int, **seconds: list[float]) -> Cell:
    samples = {way: [1.0, 1.01, 0.99] for way in bench_load.WAYS} | seconds
    samples |= {way + FIRST: [0.5, 0.5, 0.5] for way in bench_load.WAYS}
    counters = {way: {"names": 100, "lookups": 2100} for way in bench_load.WAYS}
    return Cell(
        label,
        "cpu",
        {"plan": "set", "label": label, "files": files, "counters": counters, "tensors": 9},
        samples,
        {},
        {},
    )


def test_ratios_and_marginal_costs() -> None:
    half = cell("5", 2, referential=[0.75, 0.755, 0.745])
    assert bench_load_report.ratio([2.0, 4.0], [1.0, 2.0]) == pytest.approx((2.0, 2.0, 2.0))
    found = bench_load_report.marginal(half, "referential")
    assert found is not None
    assert found[0] == pytest.approx(0.5, rel=0.01)
    assert bench_load_report.marginal(cell("5", 2, indexed=[0.4, 0.6, 0.6]), "indexed") is None


def test_the_verdict_says_where_the_claim_does_not_hold_and_why() -> None:
    text = bench_load_report._verdict([cell("5", 2, referential=[0.8, 0.8, 0.8]), cell("6", 3), cell("8", 1)])
    assert "Set 5" not in text
    assert "Set 6: the claim does not hold (1.00): text-encoder keys are left over" in text
    assert "referential still tries 100% of naive's names" in text
    assert "One LoRA (set 8): 1.000" in text


def test_the_report_is_written_from_cells_alone(tmp_path: Path) -> None:
    cells = [cell(str(n), len(SETS[n])) for n in SETS]
    env = Environment({"torch": "0"}, "CPU", 1, "here")
    for plan, labels in (("count", ("1", "2")), ("size", ("sdxl 4", "sdxl 8"))):
        for place, label in enumerate(labels, 1):
            made = cell(label, place)
            cells.append(Cell(label, "cpu", made.labels | {"plan": plan, "tensors": 3 * place}, made.seconds, {}, {}))
    stages = {f"{way}: {stage}": [t] * n for way, t in (("naive", 8.0), ("indexed", 2.0)) for stage, n in STAGES}
    held = {"files": 2**20, "backups": 2**21, "largest layer, f32": 2**20, "peak of merging": 3 * 2**20}
    labels = {"plan": "end to end", "label": "8 files", "files": 8, "bytes": held, "weights": 9, "shapes": 2}
    cells.append(Cell("whole", "cpu", labels, stages | {"open": [1.0]}, {}, {}))
    bench_load_report.write(cells, env, tmp_path)
    assert (tmp_path / "load.png").stat().st_size > 10_000
    text = (tmp_path / "load.md").read_text()
    assert "264" in text
    assert "288" in text
    assert text.count("\n| 8 ") == 2
    assert "| match and merge | 16.000     | 4.000        | 4.000 [4.000, 4.000] |" in text
    assert "beyond both, at most 1.0 MiB at once" in text
