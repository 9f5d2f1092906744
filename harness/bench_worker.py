"""The worker's side of a bench: one layer, its ways interleaved, bytes and seconds, and a check."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from fulldiff.cases.model import BenchCase, Case, RuntimeCase
from fulldiff.harness.backends import cpu
from fulldiff.harness.judge import compare, conclude, loaded
from fulldiff.harness.protocol import Request
from fulldiff.harness.realise import Material, module_for, realise
from fulldiff.harness.subjects.names import NO_ADAPTER
from fulldiff.harness.subjects.registry import subject

CHECKED_CHANNELS = 16
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
        checks = _checks(runtime, material, modules)
        calls: dict[str, Call] = {way: _call(module, material.x) for way, module in modules.items()}
        peaks = {way: cpu.peak_bytes(call) for way, call in calls.items()}
        samples = interleave(calls, request.bench)
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


def _checks(body: RuntimeCase, material: Material, modules: dict[str, nn.Module]) -> dict[str, Any]:
    """The outputs of the timed calls against the oracle, on one block of output channels.

    Output channels j of w1's row 0 depend on that row and on w2's row j alone, so the first few are a
    smaller LoKr of their own: a full-size oracle would take longer than the bench.
    """
    small, part = _first_channels(body, material)
    channels = small.layer.out
    checks = {}
    for way, module in modules.items():
        if way == NO_ADAPTER:
            continue
        y = module(material.x)
        got = y[:, :channels] if body.layer.kernel else y[..., :channels]
        checks[way] = conclude(compare("output", small, part, subject(way), got), "")
    return checks


def _first_channels(body: RuntimeCase, material: Material) -> tuple[RuntimeCase, Material]:
    (tensors,) = material.adapters
    rows = "lokr_w2" if "lokr_w2" in tensors else "lokr_w2_a"
    channels = min(CHECKED_CHANNELS, tensors[rows].shape[0])
    cut = dict(tensors) | {"lokr_w1": tensors["lokr_w1"][:1], rows: tensors[rows][:channels]}
    bias = None if material.bias is None else material.bias[:channels]
    part = Material(material.weight[:channels], bias, (cut,), material.x)
    return replace(body, layer=replace(body.layer, out=channels)), part
