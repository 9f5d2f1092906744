"""The worker's side of a bench: one layer, its ways interleaved, bytes and seconds, and a check."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fulldiff.cases.model import BenchCase, Case, RuntimeCase
from fulldiff.harness.backends import cpu
from fulldiff.harness.judge import compare, conclude, loaded
from fulldiff.harness.part import part_of
from fulldiff.harness.realise import Material, module_for, realise
from fulldiff.harness.subjects.names import NO_ADAPTER
from fulldiff.harness.subjects.registry import subject

CHECKED_CHANNELS = 4
MIN_BLOCKS, MAX_BLOCKS = 4, 40
MIN_SAMPLE = 0.002

Call = Callable[[], Any]


def run(case: Case, seconds: float) -> dict[str, Any]:
    """Samples (seconds of one call), peak bytes and the check of each way.

    A block is the ways in order and then in reverse (A B … B A), so that drift falls on all alike.
    """
    body = case.body
    assert isinstance(body, BenchCase)
    (_, runtime), *_ = body.steps
    inner = Case(runtime, case.seed)
    material = realise(inner, runtime)
    modules = {way: _attached(runtime, material, way) for way in body.ways}
    with torch.no_grad():
        checks = _checks(runtime, material, modules)
        calls: dict[str, Call] = {way: _call(module, material.x) for way, module in modules.items()}
        peaks = {way: cpu.peak_bytes(call) for way, call in calls.items()}
        samples = interleave(calls, seconds)
    return {"seconds": samples, "peak_bytes": peaks, "check": checks}


def interleave(calls: dict[str, Call], budget: float) -> dict[str, list[float]]:
    """At least MIN_BLOCKS and otherwise as many A B … B A blocks as fit the budget (seconds).

    A way's sample is the mean of its two places in the block.
    """
    once = {way: min(cpu.seconds(call) for _ in range(2)) for way, call in calls.items()}
    repeats = {way: max(1, round(MIN_SAMPLE / max(1e-7, t))) for way, t in once.items()}
    samples: dict[str, list[float]] = {way: [] for way in calls}
    end = time.perf_counter() + budget
    blocks = 0
    while blocks < MIN_BLOCKS or (blocks < MAX_BLOCKS and time.perf_counter() < end):
        blocks += 1
        block = dict.fromkeys(calls, 0.0)
        for way in (*calls, *reversed(calls)):
            block[way] += cpu.seconds(lambda way=way: [calls[way]() for _ in range(repeats[way])])  # type: ignore[misc]
        for way, total in block.items():
            samples[way].append(total / (2 * repeats[way]))
    return samples


def _attached(body: RuntimeCase, material: Material, way: str) -> nn.Module:
    module = module_for(body.layer, material.weight, material.bias)
    if way != NO_ADAPTER:
        subject(way).attach(module, loaded(body, material))
    return module


def _call(module: nn.Module, x: Tensor) -> Call:
    return lambda: module(x)


def _checks(runtime: RuntimeCase, material: Material, modules: dict[str, nn.Module]) -> dict[str, Any]:
    """The outputs of the timed calls against the oracle, on a part of the output channels."""
    part = part_of(runtime, material, CHECKED_CHANNELS)
    return {
        way: conclude(compare("output", part.body, part.material, subject(way), part.of(module(material.x))), "")
        for way, module in modules.items()
        if way != NO_ADAPTER
    }
