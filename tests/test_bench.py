"""The bench: what its numbers mean, that its reports follow from its cells, that its meters say what is missing."""

from __future__ import annotations

import math
import random
import sys
import types
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from msgspec.structs import replace

from fulldiff.cases.model import StepCase
from fulldiff.harness.backends import cpu, cuda, rocm, torch_gpu
from fulldiff.harness.bench import merging
from fulldiff.harness.bench import numbers as bench_numbers
from fulldiff.harness.bench import plan as bench_plan
from fulldiff.harness.bench import report as bench_report
from fulldiff.harness.bench import run as bench
from fulldiff.harness.bench.worker import run
from fulldiff.harness.protocol import Judgement
from fulldiff.harness.results import Cell, Environment, Store
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER

ENVIRONMENT = Environment({"torch": "2.13.0"}, "CPU", 2, "Linux")


def test_a_ratio_is_the_geometric_mean_of_blocks_and_its_interval_holds_it() -> None:
    middle, low, high = bench_numbers.ratio([2.0, 2.2, 1.8, 2.0], [1.0, 1.0, 1.0, 1.0])
    assert middle == pytest.approx((2.0 * 2.2 * 1.8 * 2.0) ** 0.25)
    assert low < middle < high
    assert high / middle == pytest.approx(middle / low)


def test_two_identical_ways_give_an_interval_that_holds_one() -> None:
    chance, held = random.Random(5), 0
    for _ in range(200):
        bare = [1 + 0.01 * chance.gauss(0, 1) for _ in range(10)]
        again = [1 + 0.01 * chance.gauss(0, 1) for _ in range(10)]
        _, low, high = bench_numbers.ratio(again, bare)
        held += low <= 1 <= high
    assert 180 <= held <= 198


@pytest.mark.parametrize(
    ("lead", "tokens"),
    [
        ({77: 0.5, 1024: 0.1}, math.inf),
        ({77: -0.1, 1024: 0.2}, 0.0),
        ({64: 0.1, 1024: -0.1}, 256.0),
        ({64: 0.3, 256: 0.1, 1024: -0.1}, 512.0),
    ],
)
def test_break_even_is_where_the_lead_ends(lead: dict[int, float], tokens: float) -> None:
    assert bench_numbers.crossing(lead) == pytest.approx(tokens)


def test_the_planner_s_misses_are_counted_and_certain_only_with_their_interval() -> None:
    labels = {"workload": "layer"}
    steady = {"streamed": [1.0] * 4, "runtime-lokr": [2.0] * 4}
    ends = {"right": [1.0] * 4, "slower": [1.1, 1.1, 1.1, 1.1001], "perhaps": [1.0, 1.3, 0.9, 1.2]}
    cells = [Cell(name, "cpu", labels, {**steady, "planned": times}, {}, {}) for name, times in ends.items()]
    assert [middle for middle, *_ in bench_numbers.against_better(cells)] == pytest.approx([1.0, 1.1, 1.0886], abs=1e-3)
    line = bench_report.planned_line(cells)
    assert "in 3 cells: median 1.089, most 1.100; slower by over 3 % in 2, of which certain" in line
    assert line.endswith("interval) 1.")


def test_a_real_layer_is_measured_and_checked() -> None:
    workload = next(w for w in bench_plan.layers(["sd15"], [(256, 256)], None) if w.labels["layer"] == "linear 320×320")
    found = run(workload.case, 0.01, cpu)  # type: ignore[arg-type]
    assert set(found["seconds"]) == set(bench_plan.LAYER_WAYS)
    assert {check.outcome for check in found["check"].values()} == {"passed"}
    assert found["peak_bytes"][AGAIN] == found["peak_bytes"][NO_ADAPTER]
    weight = 320 * 320 * 4
    assert found["held_bytes"]["streamed"] - found["held_bytes"][NO_ADAPTER] >= weight
    assert found["peak_bytes"]["full-diff"] - found["peak_bytes"][NO_ADAPTER] >= weight
    assert found["peak_bytes"]["runtime-lokr"] - found["peak_bytes"][NO_ADAPTER] < weight
    assert 1 < found["facts"]["flop_floor"] < 2


def test_the_bytes_alone_are_those_of_a_timed_run() -> None:
    workload = next(w for w in bench_plan.layers(["sd15"], [(256, 256)], None) if w.labels["layer"] == "linear 320×320")
    timed, bare = run(workload.case, 0.01, cpu), run(workload.case, None, cpu)  # type: ignore[arg-type]
    assert bare["peak_bytes"] == timed["peak_bytes"] and bare["held_bytes"] == timed["held_bytes"]
    assert not {"seconds", "first_seconds"} & bare.keys()


def test_the_meter_counts_what_is_freed_on_the_way_and_what_stays() -> None:
    kept = []

    def call() -> None:
        torch.empty(1000, dtype=torch.uint8)
        kept.append(torch.empty(400, dtype=torch.uint8))

    found = cpu.memory(call)
    assert found.kept == kept[0].nbytes == 400
    assert found.peak == 1000


def test_merging_eight_small_deltas_one_by_one_into_bf16_loses_most() -> None:
    found = {
        (w.labels["dtype"], w.labels["size"], w.labels["one_by_one"]): merging.run(w.case)["strength"]["along"]
        for w in bench_plan.merges()
    }
    assert found["f16", 0.1, False] == pytest.approx(1, abs=0.01)
    assert found["bf16", 0.001, True] < 0.5 * found["bf16", 0.001, False]
    assert found["f8_e4m3", 0.01, True] < 0.2


def test_a_step_that_needs_more_memory_than_is_free_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = bench_plan.step((1024, 1024), "bf16", 1, bench_plan.ALL_LAYERS)
    assert isinstance(workload.case.body, StepCase)
    assert bench_plan.needed_bytes(workload.case.body) > 10 * 2**30
    monkeypatch.setattr(bench, "RELEASE", 0.0)
    monkeypatch.setattr(bench, "available_bytes", lambda: 2**30)
    cell = bench._measure(None, workload, bench.Options())  # type: ignore[arg-type]
    assert cell.check["step"].outcome == "out of memory"
    assert "1.0 GiB are free" in cell.check["step"].message


def test_memory_that_comes_back_in_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([2**30, 2**30, 2**40])
    monkeypatch.setattr(bench, "available_bytes", lambda: next(free))
    body = bench_plan.step((1024, 1024), "bf16", 1, bench_plan.ALL_LAYERS).case.body
    assert isinstance(body, StepCase)
    assert bench._too_large(body) == ""


def _cells() -> list[Cell]:
    """One workload of each kind, with made numbers: streamed is faster from 640 tokens on."""
    cells = []
    for n, streamed in ((77, 1.5), (256, 1.2), (1024, 1.02)):
        times = {
            NO_ADAPTER: 1.0,
            AGAIN: 1.0,
            "streamed": streamed,
            "runtime-lokr": 1.1,
            "full-diff": 2.0,
            "planned": 1.02,
        }
        labels = {"workload": "layer", "model": "sdxl", "layer": "linear 640×640", "tokens": n, "dtype": "f32",
                  "form": "full w2", "count_at": {"512×512": 3}}  # fmt: skip
        cells.append(_cell(labels, times))
    step = {"workload": "step", "model": "sdxl", "size": "512×512", "dtype": "bf16", "narrowed": 1, "form": "full w2"}
    cells.append(_cell(step, {NO_ADAPTER: 1.0, AGAIN: 1.0, "merged": 1.0}))
    merge = {"workload": "merge", "dtype": "bf16", "size": 0.01, "one_by_one": False}
    cells.append(Cell("merge", "cpu", merge, {}, {}, {}, {}, {"along": 0.75, "noise": 0.5}))
    return cells


def _cell(labels: dict[str, object], times: dict[str, float]) -> Cell:
    chance = random.Random(1)
    seconds = {way: [t * (1 + 0.001 * chance.random()) for _ in range(6)] for way, t in times.items()}
    memory = {way: 5 * 2**20 if way == "full-diff" else 2**20 for way in times}
    checks = {"runtime-lokr": Judgement("passed")}
    return Cell(str(labels), "cpu", labels, seconds, memory, checks, dict.fromkeys(times, 0), {"flop_floor": 1.09})


def test_a_report_follows_from_its_cells(tmp_path: Path) -> None:
    sections = bench_report.Sections(Counter(passed=5), [], [], None, _cells(), ENVIRONMENT, [])
    bench_report.write(sections, tmp_path, "cpu")
    text = (tmp_path / "cpu.md").read_text()
    assert "f32, full w2: below 553 tokens use runtime, above it streamed" in text
    assert "`planned` over the faster of `streamed` and `runtime-lokr` in 3 cells" in text
    assert "| bf16   | 1.0%" in text
    assert "0.750 (±0.50)" in text
    assert "830.86 MB" in text
    assert (tmp_path / "cpu.png").stat().st_size > 10_000
    table = pd.read_csv(tmp_path / "cpu.csv")
    assert set(table[table.way == "full-diff"].extra) == {4 * 2**20}


def test_a_report_without_single_layers_says_so(tmp_path: Path) -> None:
    cells = [cell for cell in _cells() if cell.labels["workload"] != "layer"]
    sections = bench_report.Sections(Counter(passed=5), [], [], None, cells, ENVIRONMENT, [])
    bench_report.write(sections, tmp_path, "cpu")
    assert "No single layer was measured" in (tmp_path / "cpu.md").read_text()
    assert (tmp_path / "cpu.png").exists()


def test_a_report_of_bytes_alone_shows_no_times(tmp_path: Path) -> None:
    (step,) = (cell for cell in _cells() if cell.labels["workload"] == "step")
    sections = bench_report.Sections(Counter(passed=5), [], [], None, [replace(step, seconds={})], ENVIRONMENT, [])
    bench_report.write(sections, tmp_path, "cpu-memory")
    text = (tmp_path / "cpu-memory.md").read_text()
    assert "The bytes alone were measured, no times." in text
    assert "512×512: buffer MiB" in text and "nan" not in text and "s/step" not in text and "Merging" not in text
    assert not (tmp_path / "cpu-memory.png").exists()


def _fake_torch(monkeypatch: pytest.MonkeyPatch, cuda_build: str | None, hip: str | None, device: bool) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda_build)
    monkeypatch.setattr(torch.version, "hip", hip, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)


@pytest.mark.parametrize(
    ("backend", "cuda_build", "hip", "device", "words"),
    [
        (cuda, None, None, False, "is not a CUDA build"),
        (cuda, None, "6.4", True, "is a ROCm build (6.4); install a CUDA build"),
        (rocm, "12.8", None, True, "is a CUDA build (12.8); install a ROCm build"),
        (cuda, "12.8", None, False, "built for CUDA 12.8, but finds no device or driver"),
        (rocm, None, "6.4", False, "built for ROCm 6.4, but finds no device or driver"),
    ],
)
def test_a_gpu_backend_says_which_piece_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    backend: types.ModuleType,
    cuda_build: str | None,
    hip: str | None,
    device: bool,
    words: str,
) -> None:
    _fake_torch(monkeypatch, cuda_build, hip, device)
    assert words in backend.missing()


def test_a_gpu_backend_measures_what_the_allocator_and_the_events_say(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_torch(monkeypatch, "12.8", None, True)
    state = {"live": 100, "peak": 100}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return 12.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name, value in {
        "synchronize": lambda: None,
        "memory_allocated": lambda: state["live"],
        "max_memory_allocated": lambda: state["peak"],
        "memory_reserved": lambda: 4096,
        "reset_peak_memory_stats": lambda: state.update(peak=state["live"]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert cuda.missing() is None
    found = torch_gpu.memory(lambda: state.update(live=130, peak=350))
    assert (found.peak, found.kept, found.reserved) == (250, 30, 4096)
    assert torch_gpu.seconds(lambda: None) == 0.0125


def test_an_absent_backend_ends_with_5(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fulldiff.harness.cli import main as cli

    arguments = ["fulldiff", "bench", "--backend", "rocm" if torch.version.hip is None else "cuda"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 5
    assert "build" in capsys.readouterr().out


def test_launches_of_a_cell_are_pooled_and_a_missing_one_is_seen(tmp_path: Path) -> None:
    first = Cell("c", "cpu", {}, {"w": [1.0, 2.0]}, {"w": 5}, {"w": Judgement("passed", used=0.1)}, {"w": 0})
    second = replace(first, launch=2, seconds={"w": [3.0]}, peak_bytes={"w": 7}, check={"w": Judgement("wrong")})
    store = Store(tmp_path / "cells.jsonl")
    store.add(first)
    assert (store.has("c", 1), store.has("c", 2)) == (True, False)
    store.add(second)
    store.close()
    (cell,) = Store(tmp_path / "cells.jsonl").cells().values()
    assert cell.seconds == {"w": [1.0, 2.0, 3.0]}
    assert cell.peak_bytes == {"w": 7}
    assert cell.check["w"].outcome == "wrong"


def test_a_launch_that_failed_leaves_no_half_of_a_cell() -> None:
    good = Cell("c", "cpu", {}, {"w": [1.0]}, {"w": 5}, {}, {"w": 0})
    crashed = Cell("c", "cpu", {}, {}, {}, {"all": Judgement("crashed")}, launch=2)
    assert not good.pooled(crashed).seconds
    assert not crashed.pooled(good).seconds
    assert good.pooled(crashed).check["all"].outcome == "crashed"


def test_a_short_budget_s_layers_may_occur_at_no_size(tmp_path: Path) -> None:
    cells = [replace(cell, labels=cell.labels | {"count_at": {}}) for cell in _cells() if "count_at" in cell.labels]
    assert bench_numbers.steps_of_layers(bench_numbers.frame(cells)).empty
    bench_report.write(bench_report.Sections(Counter(), [], [], None, cells, ENVIRONMENT, []), tmp_path, "cpu-tokens")
    text = (tmp_path / "cpu-tokens.md").read_text()
    assert "below 553 tokens use runtime" in text and "as often as each occurs" not in text and "UNet" not in text
