"""Backend ``cpu``: the allocator's true peak and a monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

from fulldiff.harness.backends.base import Memory

name = "cpu"
device = "cpu"


def missing() -> str | None:
    """What keeps this backend from running; None when nothing does."""
    return None


def describe() -> str:
    """The device's name, type and driver as one line."""
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def memory(call: Callable[[], Any]) -> Memory:
    """The bytes that ``call`` allocates, operators' own buffers included: the most at once, and what stays.

    Read from the allocator's record of every allocation and release, so exact and repeatable.
    """
    with profile(profile_memory=True, use_kineto=True) as record:
        call()
    events = record.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return Memory(peak, live)


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that ``call`` has allocated and not yet freed at once."""
    return memory(call).peak


def seconds(call: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
