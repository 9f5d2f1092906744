"""What the planner knows of a machine: how long the products and passes that the ways are made of take there.

Calibrated once per machine, device and dtype in about a second, and kept in a file (`kept`: delete it to
calibrate anew): each kind of operation is timed at a few sizes, and a size between two is interpolated on
logarithmic axes. A prediction is an overhead per operation plus FLOPs (or elements) over the rate.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from fulldiff.harness.subjects.contraction import Shape, Step

SIZES = (8, 32, 80, 160, 640, 1280)
CONV_SIZES = (8, 40, 160)
AXIS1_SIZES = (2, 8, 32)
WEIGHT_SIZES = (160, 640, 1280, 3584)
RANKS = (4, 16, 64)
TOKENS = 1024
# Each timing: the best of so many, at least so long in all (seconds).
ROUNDS, SECONDS = 3, 0.004


@dataclass(frozen=True)
class Curve:
    """A rate (FLOPs or elements per second) at some sizes."""

    sizes: tuple[float, ...]
    rates: tuple[float, ...]

    def at(self, size: float) -> float:
        """The rate at ``size``, interpolated; beyond the ends that of the end."""
        return float(np.exp(np.interp(math.log(max(size, 1)), np.log(self.sizes), np.log(self.rates))))


@dataclass(frozen=True)
class Costs:
    """One device and dtype: ``overhead`` of an operation (seconds), and the rates."""

    overhead: float
    axis1: Curve
    axis2: Curve
    convolution: Curve
    addcmul: Curve
    addmm: Curve

    def runtime(self, steps: Sequence[Step], shape: Shape, items: int) -> float:
        """Seconds of a runtime branch for ``items`` tokens or images."""
        sizes, positions, total = {1: shape.uq, 2: shape.vq}, shape.positions_in, 0.0
        for step in steps:
            rows, columns = step.matrix.shape[:2]
            sizes[step.axis] = rows
            positions = shape.positions_out if step.kernel else positions
            flops = 2 * step.matrix.numel() * sizes[3 - step.axis] * positions * items
            curve = self.convolution if step.kernel else self.axis1 if step.axis == 1 else self.axis2
            total += self.overhead + flops / curve.at(min(rows, columns))
        return total

    def streamed(self, weight: Tensor, rank: int | None) -> float:
        """Seconds of writing W' into the scratch: a LoRA's addmm has a ``rank``, a LoKr's addcmul none."""
        if rank is None:
            return self.overhead + weight.numel() / self.addcmul.at(math.sqrt(weight.numel()))
        return self.overhead + weight.numel() / self.addmm.at(rank)


_known: dict[str, Costs] = {}


def costs(device: torch.device, dtype: torch.dtype) -> Costs:
    """The costs there: known, kept by an earlier process, or calibrated now."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.node()
    key = f"{device.type} {name}, {dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if key not in _known:
        _known.update(_read())
    if key not in _known:
        with torch.no_grad():
            _known[key] = calibrate(device, dtype)
        _write()
    return _known[key]


def kept() -> Path:
    """The file of calibrated costs: in FULLDIFF_CACHE, else in the user's cache folder."""
    cache = (
        os.environ.get("FULLDIFF_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fulldiff"
    )
    return Path(cache) / "costs.json"


def _read() -> dict[str, Costs]:
    try:
        return msgspec.json.decode(kept().read_bytes(), type=dict[str, Costs])
    except (OSError, msgspec.DecodeError):
        return {}


def _write() -> None:
    """Replaced whole, so that no other process reads half of it; a folder that cannot be written keeps nothing."""
    whole = kept().with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        kept().parent.mkdir(parents=True, exist_ok=True)
        whole.write_bytes(msgspec.json.encode(_known))
        whole.replace(kept())


def calibrate(device: torch.device, dtype: torch.dtype) -> Costs:
    """Time every kind of operation."""

    def made(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device).uniform_(-1, 1)

    tiny = made(8, 8)
    overhead = seconds(lambda: torch.mm(tiny, tiny))
    timed = _Timing(made, overhead)
    return Costs(
        overhead,
        Curve(AXIS1_SIZES, tuple(timed.axis1(size) for size in AXIS1_SIZES)),
        Curve(SIZES, tuple(timed.axis2(size) for size in SIZES)),
        Curve(CONV_SIZES, tuple(timed.convolution(size) for size in CONV_SIZES)),
        Curve(WEIGHT_SIZES, tuple(timed.addcmul(size) for size in WEIGHT_SIZES)),
        Curve(RANKS, tuple(timed.addmm(rank) for rank in RANKS)),
    )


@dataclass(frozen=True)
class _Timing:
    made: Callable[..., Tensor]
    overhead: float

    def axis1(self, size: int) -> float:
        """w1 (size, size) on a block (tokens, size, 160), added to the output."""
        w1, block, y = self.made(size, size), self.made(TOKENS, size, 160), self.made(TOKENS, size, 160)
        return self._rate(2 * TOKENS * size * size * 160, lambda: y.baddbmm_(w1.expand(TOKENS, -1, -1), block))

    def axis2(self, size: int) -> float:
        """w2 (size, size) on rows of as many elements as 1024 tokens of width 160 have."""
        rows = max(TOKENS * 160 // size, 64)
        w2, x = self.made(size, size), self.made(rows, size)
        return self._rate(2 * rows * size * size, lambda: torch.mm(x, w2.T))

    def convolution(self, size: int) -> float:
        """A 3×3 convolution of 8 images (size, 24, 24)."""
        weight, x = self.made(size, size, 3, 3), self.made(8, size, 24, 24)
        return self._rate(2 * 8 * 576 * weight.numel(), lambda: nn.functional.conv2d(x, weight, padding=1))

    def addcmul(self, size: int) -> float:
        """The Kronecker pass over a weight (size, size), factor 8."""
        side = size // 8
        weight, out = self.made(8, side, 8, side, 1), self.made(8, side, 8, side, 1)
        one, two = self.made(8, 1, 8, 1, 1), self.made(1, side, 1, side, 1)
        return self._rate(size * size, lambda: torch.addcmul(weight, one, two, value=0.5, out=out))

    def addmm(self, rank: int) -> float:
        """W + up · down of a weight (1280, 1280)."""
        weight, out = self.made(1280, 1280), self.made(1280, 1280)
        up, down = self.made(1280, rank), self.made(rank, 1280)
        return self._rate(1280 * 1280, lambda: torch.addmm(weight, up, down, alpha=0.5, out=out))

    def _rate(self, amount: float, call: Callable[[], object]) -> float:
        return amount / max(seconds(call) - self.overhead, 1e-9)


def seconds(call: Callable[[], object]) -> float:
    """The best mean of `ROUNDS` rounds, of one call."""
    call()
    best = math.inf
    for _ in range(ROUNDS):
        start, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - start < SECONDS:
            call()
            calls += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / calls)
    return best
