"""The worker's side of a bench: one workload, its ways interleaved, bytes and seconds, and a check."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fulldiff.cases.model import BenchCase, Case, MergeCase, RuntimeCase, StepCase
from fulldiff.harness.backends.base import Backend, Memory
from fulldiff.harness.bench.interleaving import interleave
from fulldiff.harness.judge import compare, conclude, loaded, on
from fulldiff.harness.part import part_of
from fulldiff.harness.protocol import Judgement
from fulldiff.harness.realise import Material, module_for, realise
from fulldiff.harness.subjects.base import Subject
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER
from fulldiff.harness.subjects.registry import subject
from fulldiff.harness.subjects.runtime_lokr import plain_branches

CHECKED_CHANNELS = 4
# Blocks of one launch; where a call takes more than `LONG` seconds `LONG_BLOCKS` halves of blocks.
MIN_BLOCKS, MAX_BLOCKS = 3, 40
LONG, LONG_BLOCKS = 1.0, 4
# A sample is at least this long, so that the clock's own error does not count.
MIN_SAMPLE = 0.002
# Before anything is kept, each way runs at least this long, beside the calls that measured its memory.
WARM_UP = 0.02

Call = Callable[[], Any]


class Calls(NamedTuple):
    """A way's first call, its bytes with those of attaching and its seconds, and the bytes of the next one."""

    first: Memory
    seconds: float
    steady: Memory


def run(case: Case, seconds: float | None, backend: Backend) -> dict[str, Any]:
    """Samples (seconds of one call), bytes and the check of each way of one workload."""
    with torch.no_grad():
        if isinstance(case.body, StepCase):
            return _step(case, seconds, backend)
        if isinstance(case.body, MergeCase):
            from fulldiff.harness.bench import merging

            return merging.run(case)
        assert isinstance(case.body, BenchCase)
        return _layer(case.body, case.seed, seconds, backend)


def _step(case: Case, seconds: float | None, backend: Backend) -> dict[str, Any]:
    try:
        from fulldiff.harness.bench import unet
    except ModuleNotFoundError as missing:
        words = f"a whole UNet needs {missing.name}: pip install 'fulldiff[unet]'"
        return {"check": {"step": Judgement("unsupported", message=words)}}
    return unet.run(case, seconds, backend)


def _layer(body: BenchCase, seed: int, seconds: float | None, backend: Backend) -> dict[str, Any]:
    runtime = body.runtime
    material = on(backend.device, realise(Case(runtime, seed), runtime))
    modules = {way: module_for(runtime.layer, material.weight, material.bias) for way in body.ways}
    subjects = {way: subject(way) for way in body.ways if way not in (NO_ADAPTER, AGAIN)}
    begun = {way: _begun(runtime, material, subjects.get(way), module, backend) for way, module in modules.items()}
    calls: dict[str, Call] = {way: _call(module, material.x) for way, module in modules.items()}
    checks = _checks(runtime, material, modules, subjects)
    facts = {"flop_floor": flop_floor(runtime, material, modules[NO_ADAPTER])}
    return measured(calls, begun, seconds, backend) | {"check": checks, "facts": facts}


def measured(
    calls: Mapping[str, Call],
    begun: Mapping[str, Calls],
    seconds: float | None,
    backend: Backend,
    prepare: Callable[[str], None] = lambda way: None,
) -> dict[str, Any]:
    """Each way's first call, the bytes of a steady one and what stays beyond the bare layer, and samples of its time.

    ``prepare`` is told which way comes next; what it does is not measured. ``seconds`` None: the bytes alone.
    """
    steady = {way: each.steady for way, each in begun.items()}
    found = {
        "peak_bytes": {way: each.peak for way, each in steady.items()},
        "held_bytes": {way: each.first.kept for way, each in begun.items()},
        "reserved_bytes": {way: each.reserved for way, each in steady.items() if each.reserved is not None},
    }
    if seconds is None:
        return found
    first = {way: each.seconds for way, each in begun.items()}
    return found | {
        "first_seconds": {way: [once] for way, once in first.items()},
        "seconds": sampled(calls, seconds, backend, prepare, first),
    }


def sampled(
    calls: Mapping[str, Call],
    budget: float,
    backend: Backend,
    prepare: Callable[[str], None] = lambda way: None,
    first: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Seconds of one call of each way, in as many blocks as fit the budget (seconds); see `interleave`.

    What took longer than `LONG` when ``first`` called (seconds) is warm.
    """
    once = dict(first or {})
    for way, call in calls.items():
        if once.get(way, 0.0) < LONG:
            prepare(way)
            once[way] = _warm(call, backend)
    repeats = {way: max(1, round(MIN_SAMPLE / max(1e-7, t))) for way, t in once.items()}

    def sample(way: str) -> float:
        prepare(way)
        return backend.seconds(_repeated(calls[way], repeats[way])) / repeats[way]

    long = max(once.values()) >= LONG
    return interleave(tuple(calls), sample, LONG_BLOCKS if long else MIN_BLOCKS, MAX_BLOCKS, budget, halves=long)


def _warm(call: Call, backend: Backend) -> float:
    """The fastest of the calls that warm up, for at least `WARM_UP`."""
    times = [backend.seconds(call)]
    while sum(times) < WARM_UP:
        times.append(backend.seconds(call))
    return min(times)


def _repeated(call: Call, times: int) -> Call:
    def repeat() -> None:
        for _ in range(times):
            call()

    return repeat


def _begun(body: RuntimeCase, material: Material, own: Subject | None, module: nn.Module, backend: Backend) -> Calls:
    def attach() -> None:
        if own is not None:
            own.attach(module, loaded(body, material))

    return begin(attach, _call(module, material.x), backend)


def begin(attach: Call, call: Call, backend: Backend) -> Calls:
    """Attach, and call twice: the bytes that stay after the first are what the way holds."""
    # What an earlier way left in cycles would be freed in the middle of this one.
    gc.collect()
    times: list[float] = []

    def attach_and_call() -> None:
        attach()
        times.append(backend.seconds(call))

    return Calls(backend.memory(attach_and_call), times[0], backend.memory(call))


def flop_floor(body: RuntimeCase, material: Material, module: Any) -> float:
    """FLOPs of the layer with its runtime branches, in their best order, over those of the bare layer."""
    x, y = material.x, module(material.x)
    sizes = (math.prod(x.shape[2:]), math.prod(y.shape[2:])) if body.layer.kernel else (1, 1)
    items = x.shape[0] if body.layer.kernel else x.numel() // x.shape[-1]
    bare = 2 * module.weight.numel() * y.numel() // body.layer.out
    extra = sum(branch.flops(*sizes) * items for branch in plain_branches(module, loaded(body, material)))
    return float(1 + extra / bare)


def _call(module: nn.Module, x: torch.Tensor) -> Call:
    return lambda: module(x)


def _checks(
    runtime: RuntimeCase, material: Material, modules: Mapping[str, nn.Module], subjects: Mapping[str, Subject]
) -> dict[str, Any]:
    """The outputs of the timed calls against the oracle, on a part of the output channels."""
    part = part_of(runtime, on("cpu", material), CHECKED_CHANNELS)
    return {
        way: conclude(compare("output", part.body, part.material, own, part.of(modules[way](material.x).cpu())), "")
        for way, own in subjects.items()
    }
