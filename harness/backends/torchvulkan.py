"""Backend ``torchvulkan``: torch's own operators on any Vulkan device, through the package of that name.

What it cannot do there it computes on the CPU with no more than a warning, bf16 for one: here each such warning
is an error, which the worker reports as unsupported. It has no events: times are wall clock.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fulldiff.harness.backends import vulkan
from fulldiff.harness.backends.base import Memory

name = "torchvulkan"
device = "vulkan"
# Begins every message of the package.
MESSAGE = "torchvulkan ["


def missing() -> str | None:
    """What keeps this backend from running; None when nothing does. Registers torch's device ``vulkan``."""
    try:
        found = importlib.import_module("torchvulkan")
    except ModuleNotFoundError:
        return "torchvulkan is not installed: pip install torchvulkan (Python 3.11 or 3.13, torch ≥ 2.10)"
    except (ImportError, RuntimeError) as reason:
        return f"torchvulkan does not load with torch {torch.__version__}: {reason}"
    if not found.is_available():
        return f"torchvulkan finds no Vulkan 1.3 device; Vulkan itself: {vulkan.state()}"
    torch.set_warn_always(True)
    warnings.filterwarnings("error", message=r"torchvulkan \[WARNING\]")
    return None


def describe() -> str:
    """The device's name, type, driver and limits."""
    found = _torch_vulkan().get_device_name()
    known = [each.describe() for each in vulkan.ask() if each.name == found]
    return known[0] if known else str(found)


def memory(call: Callable[[], Any]) -> Memory:
    """The package's allocator: its peak during ``call`` beyond what was allocated before, and what stays."""
    own = _torch_vulkan()
    own.synchronize()
    before = own.memory_allocated()
    own.reset_peak_memory_stats()
    call()
    own.synchronize()
    return Memory(own.max_memory_allocated() - before, own.memory_allocated() - before, own.memory_reserved())


def seconds(call: Callable[[], Any]) -> float:
    """How long one call takes until the device has finished."""
    own = _torch_vulkan()
    own.synchronize()
    start = time.perf_counter()
    call()
    own.synchronize()
    return time.perf_counter() - start


def _torch_vulkan() -> Any:
    return torch.vulkan  # type: ignore[attr-defined]
