"""The planner: its costs are kept, its choice follows them, and a try decides where they are close."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fulldiff.harness.subjects import costs, planned
from fulldiff.harness.subjects.base import Adapter
from fulldiff.harness.subjects.costs import Costs, Curve
from fulldiff.harness.subjects.planned import Planned

CPU = torch.device("cpu")


def made(overhead: float) -> Costs:
    flat = Curve((1.0,), (1e9,))
    return Costs(overhead, flat, flat, flat, flat, flat)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FULLDIFF_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "_known", {})
    return tmp_path / "costs.json"


def test_costs_are_calibrated_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrations = iter([made(1.0), made(2.0), made(3.0)])
    monkeypatch.setattr(costs, "calibrate", lambda device, dtype: next(calibrations))
    assert costs.costs(CPU, torch.float32).overhead == 1.0
    monkeypatch.setattr(costs, "_known", {})  # as in another process
    assert costs.costs(CPU, torch.float32).overhead == 1.0
    assert costs.costs(CPU, torch.bfloat16).overhead == 2.0
    cache.write_text("torn")
    monkeypatch.setattr(costs, "_known", {})
    assert costs.costs(CPU, torch.float32).overhead == 3.0


def test_where_nothing_can_be_kept_it_is_calibrated_in_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLDIFF_CACHE", str(Path(__file__)))
    monkeypatch.setattr(costs, "calibrate", lambda device, dtype: made(1.0))
    assert costs.costs(CPU, torch.float32).overhead == 1.0


def chosen(monkeypatch: pytest.MonkeyPatch, predicted: float, tried: tuple[float, float] = (0.0, 0.0)) -> bool:
    """Whether runtime is chosen, with its time over streamed's predicted and what a try of each takes."""
    times = iter(tried)
    monkeypatch.setattr(planned, "time_over_streamed", lambda *_: predicted)
    monkeypatch.setattr(planned, "is_faster", lambda one, other: next(times) < next(times))
    module = nn.Linear(12, 8).requires_grad_(False)
    factors = {"lokr_w1": torch.ones(2, 3), "lokr_w2": torch.ones(4, 4)}
    subject = Planned()
    subject.attach(module, [Adapter("lokr", factors, 1.0)])
    module(torch.ones(5, 12))
    (choice,) = subject.chosen.values()
    return choice


def test_a_clear_prediction_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, 0.1)
    assert not chosen(monkeypatch, 10.0)


def test_a_close_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, 1.2, (1.0, 1.1))
    assert not chosen(monkeypatch, 0.8, (1.1, 1.0))


def test_equal_layers_share_a_choice_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "time_over_streamed", lambda *_: 0.1)
    subject = Planned()
    for rank in (1, 1, 2):
        module = nn.Linear(12, 8).requires_grad_(False)
        factors = {"lora_up.weight": torch.ones(8, rank), "lora_down.weight": torch.ones(rank, 12)}
        subject.attach(module, [Adapter("lora", factors, 1.0)])
        module(torch.ones(5, 12))
    assert len(subject.chosen) == 2


def test_a_weight_beyond_the_workspace_budget_runs_at_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "WORKSPACE_BUDGET", 8)
    assert planned.time_over_streamed(nn.Linear(12, 8), [], [], torch.ones(1, 12)) == 0.0
