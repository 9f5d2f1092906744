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
from fulldiff.harness.protocol import Request
from fulldiff.harness.realise import Material, module_for, realise
from fulldiff.harness.subjects.registry import subject

BARE = "no adapter"
CHECKED_ITEMS = 4
MIN_BLOCKS, MAX_BLOCKS = 4, 40
MIN_SAMPLE = 0.002

Call = Callable[[], Any]


def run(request: Request) -> dict[str, Any]:
    """Samples (seconds of one call), peak bytes and the check of each way.

    A block is the ways in order and then in reverse (A B … B A), so that drift falls on all alike.
    """
    body = request.case.body
    assert isinstance(body, BenchCase) and request.bench is not None
    (_, runtime), *_ = body.steps
    inner = Case(runtime, request.case.seed)
    material = realise(inner, runtime)
    modules = {way: _attached(runtime, material, way) for way in body.ways}
    with torch.no_grad():
        checks = {way: _check(runtime, material, module, way) for way, module in modules.items()}
        calls: dict[str, Call] = {way: _call(module, material.x) for way, module in modules.items()}
        peaks = {way: cpu.peak_bytes(call) for way, call in calls.items()}
        samples = interleave(calls, request.bench)
    return {"seconds": samples, "peak_bytes": peaks, "check": checks, "digest": material.digest()}


def interleave(calls: dict[str, Call], budget: float) -> dict[str, list[float]]:
    """At least MIN_BLOCKS and otherwise as many A B … B A blocks as fit the budget (seconds).

    A way's sample is the mean of its two places in the block.
    """
    once = {way: min(cpu.seconds(call) for _ in range(2)) for way, call in calls.items()}
    repeats = {way: max(1, round(MIN_SAMPLE / max(1e-7, t))) for way, t in once.items()}
    samples: dict[str, list[float]] = {way: [] for way in calls}
    end = time.perf_counter() + budget
    while len(samples[BARE]) < MIN_BLOCKS or (time.perf_counter() < end and len(samples[BARE]) < MAX_BLOCKS):
        block = dict.fromkeys(calls, 0.0)
        for way in (*calls, *reversed(calls)):
            block[way] += cpu.seconds(lambda way=way: [calls[way]() for _ in range(repeats[way])])  # type: ignore[misc]
        for way, total in block.items():
            samples[way].append(total / (2 * repeats[way]))
    return samples


def _attached(body: RuntimeCase, material: Material, way: str) -> nn.Module:
    module = module_for(body.layer, material.weight, material.bias)
    if way != BARE:
        subject(way).attach(module, loaded(body, material))
    return module


def _call(module: nn.Module, x: Tensor) -> Call:
    return lambda: module(x)


def _check(body: RuntimeCase, material: Material, module: nn.Module, way: str) -> Any:
    """The very output of the timed call against the oracle, on some of its tokens (conv: on none).

    A token's output depends on that token alone, so a few stand for all at a fraction of the cost.
    """
    if way == BARE or body.layer.kind != "linear":
        return None
    got = module(material.x)
    at = torch.linspace(0, got.shape[0] - 1, CHECKED_ITEMS).long()
    part = Material(material.weight, material.bias, material.adapters, material.x[at])
    claims = compare("output", body, part, subject(way), got[at])
    return conclude(claims, "")
