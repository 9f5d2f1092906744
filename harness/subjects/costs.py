"""What the planner knows of a machine: how long the products and passes that the ways are made of take there.

Calibrated once per machine, device and dtype in a few seconds, and kept in a file (`kept`: delete it to
calibrate anew): each kind of operation is timed at a few sizes, and a size between two is interpolated on
logarithmic axes. All operations are timed in turn, several times over, and the best of each counts: what else a
machine does for a moment spoils none. A prediction is an overhead per operation plus FLOPs (or elements) over the rate.
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

SIZES = {
    "product": (8,),
    "axis1": (2, 8, 32),
    "axis2": (8, 32, 80, 160, 640, 1280),
    "convolution": (8, 40, 160),
    "addcmul": (160, 640, 1280, 3584),
    "addmm": (4, 16, 64),
}
OPERATIONS = tuple((kind, size) for kind, sizes in SIZES.items() for size in sizes)
TOKENS = 1024
# Each timing: the best of so many rounds, each at least so long (seconds).
ROUNDS, SECONDS = 5, 0.004
# Rounds of a comparison take no more than this, but for the first two (seconds).
ENOUGH = 0.2


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

    amounts, best = {}, dict.fromkeys(OPERATIONS, math.inf)
    for _ in range(ROUNDS):
        for key in OPERATIONS:
            amounts[key], call = operation(made, *key)
            best[key] = min(best[key], seconds(call))
    overhead = best["product", 8]

    def curve(kind: str) -> Curve:
        rates = (amounts[kind, size] / max(best[kind, size] - overhead, 1e-9) for size in SIZES[kind])
        return Curve(SIZES[kind], tuple(rates))

    return Costs(overhead, *map(curve, ("axis1", "axis2", "convolution", "addcmul", "addmm")))


def operation(made: Callable[..., Tensor], kind: str, size: int) -> tuple[int, Callable[[], object]]:
    """One of `OPERATIONS` with new tensors: its FLOPs (of a pass over a weight: its elements), and the call.

    product: (8, 8) twice. axis1: w1 (size, size) on a block (tokens, size, 160), added to the output. axis2: w2
    (size, size) on rows of as many elements as 1024 tokens of width 160 have. convolution: 3×3, 8 images (size, 24,
    24). addcmul: the Kronecker pass over a weight (size, size), factor 8. addmm: W + up · down of a weight (1280,
    1280), rank ``size``.
    """
    if kind == "product":
        tiny = made(size, size)
        return 2 * size**3, lambda: torch.mm(tiny, tiny)
    if kind == "axis1":
        w1, block, y = made(size, size), made(TOKENS, size, 160), made(TOKENS, size, 160)
        return 2 * TOKENS * size * size * 160, lambda: y.baddbmm_(w1.expand(TOKENS, -1, -1), block)
    if kind == "axis2":
        rows = max(TOKENS * 160 // size, 64)
        w2, x = made(size, size), made(rows, size)
        return 2 * rows * size * size, lambda: torch.mm(x, w2.T)
    if kind == "convolution":
        kernel, images = made(size, size, 3, 3), made(8, size, 24, 24)
        return 2 * 8 * 576 * kernel.numel(), lambda: nn.functional.conv2d(images, kernel, padding=1)
    if kind == "addcmul":
        side = size // 8
        weight, out = made(8, side, 8, side, 1), made(8, side, 8, side, 1)
        one, two = made(8, 1, 8, 1, 1), made(1, side, 1, side, 1)
        return size * size, lambda: torch.addcmul(weight, one, two, value=0.5, out=out)
    assert kind == "addmm", kind
    base, sums, up, down = made(1280, 1280), made(1280, 1280), made(1280, size), made(size, 1280)
    return base.numel(), lambda: torch.addmm(base, up, down, alpha=0.5, out=sums)


def is_faster(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether the best of ``one``'s rounds is below the best of ``other``'s; they take turns."""
    best, start = {one: math.inf, other: math.inf}, time.perf_counter()
    for done in range(ROUNDS):
        if done >= 2 and time.perf_counter() - start > ENOUGH:
            break
        for call in best:
            best[call] = min(best[call], seconds(call))
    return best[one] < best[other]


def seconds(call: Callable[[], object]) -> float:
    """The mean of one call, warm, over a round."""
    call()
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < SECONDS:
        call()
        calls += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls
