"""What the backends ``cuda`` and ``rocm`` share: torch.cuda, built for one or the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fulldiff.harness.backends.base import Memory

device = "cuda"


def missing(kind: str, built_for: str | None, other: str | None) -> str | None:
    """Which piece is missing: the build of torch, or a device that its driver shows."""
    version = torch.__version__
    if other is not None:
        name = "ROCm" if kind == "CUDA" else "CUDA"
        return f"torch {version} is a {name} build ({other}); install a {kind} build of torch"
    if built_for is None:
        return f"torch {version} is not a {kind} build; name one with FULLDIFF_TORCH and FULLDIFF_TORCH_INDEX"
    if not torch.cuda.is_available():
        return f"torch {version} is built for {kind} {built_for}, but finds no device or driver"
    return None


def describe(kind: str, version: str | None) -> str:
    """The device's name, memory, and the version that torch is built for."""
    total = torch.cuda.get_device_properties(0).total_memory
    return f"{torch.cuda.get_device_name(0)}, {total / 2**30:.1f} GiB, {kind} {version}"


def memory(call: Callable[[], Any]) -> Memory:
    """Torch's allocator: its peak during ``call`` beyond what was allocated before, and what stays."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return Memory(peak - before, after - before, torch.cuda.memory_reserved())


def seconds(call: Callable[[], Any]) -> float:
    """How long the device takes for one call, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000
