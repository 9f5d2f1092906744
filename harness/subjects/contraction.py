"""Orders in which a LoKr's factors can be applied to an activation, their cost, and the best one.

An activation of one group is a block (n, uq, vq, *spatial). w1's matrices act on axis 1 (uq → up), w2's
on axis 2 (vq → vp); the two lists commute with each other but not among themselves, so the orders are
the interleavings of the lists. A factored list may also be multiplied out beforehand. A LoRA is the case
of an empty axis-1 list. Costs are computed for every order; nothing is inferred from out / in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Refused

# One stored intermediate element costs about as much as this many floating-point operations
# (a core does some 64 in the time that it writes and reads back 4 bytes from cache).
ELEMENT_COST = 64


@dataclass(frozen=True)
class Step:
    """Apply ``matrix`` (e, d) to an axis of size d; a ``kernel`` step's is (e, d, *kernel), on axis 2."""

    axis: int
    matrix: Tensor
    kernel: bool = False


@dataclass(frozen=True)
class Cost:
    """FLOPs, elements of all stored intermediates, and of the most that are alive at once."""

    flops: int
    stored: int
    peak: int

    @property
    def total(self) -> int:
        return self.flops + ELEMENT_COST * self.stored


@dataclass(frozen=True)
class Shape:
    """What the cost depends on: uq, vq, and the positions before and after the kernel step."""

    uq: int
    vq: int
    positions_in: int = 1
    positions_out: int = 1


def orders(t: Mapping[str, Tensor], weight_shape: Sequence[int], pointwise: bool) -> list[tuple[Step, ...]]:
    """Every order for the factors ``t`` (f32 or wider) that never builds ΔW."""
    vp, vq = factors.w2_sizes(t, weight_shape)
    trivial = factors.w1_sizes(t) == (1, 1)
    first, second = _axis1(t), _axis2(t, (vp, vq, *weight_shape[2:]), pointwise)
    # With a 1×1 w1, w2 multiplied out would be ΔW itself.
    seconds = second[:1] if trivial else second
    return [order for one in first for two in seconds for order in _interleavings(one, two)]


def cost(order: Sequence[Step], shape: Shape) -> Cost:
    """The cost of one order for one item (a token, or an image of so many positions)."""
    sizes = {1: shape.uq, 2: shape.vq}
    positions, flops, stored, peak, before = shape.positions_in, 0, 0, 0, 0
    for index, step in enumerate(order):
        sizes[step.axis] = step.matrix.shape[0]
        positions = shape.positions_out if step.kernel else positions
        other = sizes[3 - step.axis]
        flops += 2 * step.matrix.numel() * other * positions
        # The last step adds into the output in place, unless it is a convolution.
        in_place = index == len(order) - 1 and not step.kernel
        after = 0 if in_place else sizes[1] * sizes[2] * positions
        stored, peak, before = stored + after, max(peak, before + after), after
    return Cost(flops, stored, peak)


def best(candidates: Sequence[tuple[Step, ...]], shape: Shape) -> tuple[Step, ...]:
    """The order of least cost: FLOPs, and what storing the intermediates costs."""
    return min(candidates, key=lambda order: cost(order, shape).total)


def balance(order: Sequence[Step], scale: float) -> tuple[tuple[Step, ...], float]:
    """Powers of two moved between the factors so that no intermediate outgrows input and output.

    Exact except where an element underflows. In fp16, w1 = 1e-4 (8×8) with w2 = 600 (160×160) overflows
    on the way to an answer of 76.8; balanced it does not.
    """
    norms = [float(s.matrix.flatten(1).abs().sum(1).max()) if s.matrix.numel() else 0.0 for s in order]
    if not all(0 < norm < math.inf for norm in norms):
        return tuple(order), scale
    target = sum(map(math.log2, norms)) / len(norms)
    shifts = [round(target - math.log2(norm)) for norm in norms]
    steps = (Step(s.axis, s.matrix * 2.0**shift, s.kernel) for s, shift in zip(order, shifts, strict=True))
    return tuple(steps), scale * 2.0 ** -sum(shifts)


def _axis1(t: Mapping[str, Tensor]) -> list[list[Step]]:
    if "lokr_w1" in t:
        return [[Step(1, t["lokr_w1"])]]
    if "lokr_w1_a" in t:
        a, b = t["lokr_w1_a"], t["lokr_w1_b"]
        return [[Step(1, b), Step(1, a)], [Step(1, a @ b)]]
    return [[]]


def _axis2(t: Mapping[str, Tensor], shape: Sequence[int], pointwise: bool) -> list[list[Step]]:
    if "lora_up.weight" in t:
        up = t["lora_up.weight"].flatten(1)
        if "lora_mid.weight" in t:
            return [_tucker(t["lora_mid.weight"], up.T, t["lora_down.weight"].flatten(1), shape, pointwise)]
        return [[_kernel(t["lora_down.weight"], shape, pointwise), Step(2, up)]]
    if "lokr_w2" in t:
        return [[_kernel(t["lokr_w2"], shape, pointwise)]]
    a, b = t["lokr_w2_a"], t["lokr_w2_b"]
    if "lokr_t2" in t:
        whole = torch.einsum("mn...,mp,nq->pq...", t["lokr_t2"], a, b)
        return [_tucker(t["lokr_t2"], a, b, shape, pointwise), [_kernel(whole, shape, pointwise)]]
    return [[_kernel(b, shape, pointwise), Step(2, a)], [_kernel(a @ b, shape, pointwise)]]


def _tucker(core: Tensor, a: Tensor, b: Tensor, shape: Sequence[int], pointwise: bool) -> list[Step]:
    """b (r, vq), the core with the kernel, a (r, vp) transposed."""
    return [Step(2, b), _kernel(core, (core.shape[0], core.shape[1], *shape[2:]), pointwise), Step(2, a.T)]


def _kernel(matrix: Tensor, shape: Sequence[int], pointwise: bool) -> Step:
    """The step that holds the layer's kernel, (rows, vq, *kernel); a plain matrix where that is 1×1."""
    full = (matrix.shape[0], shape[1], *shape[2:])
    if matrix.numel() != torch.Size(full).numel():
        raise Refused(f"a factor of shape {tuple(matrix.shape)} cannot act as {full}")
    return Step(2, matrix.reshape(full[:2])) if pointwise else Step(2, matrix.reshape(full), kernel=True)


def _interleavings(one: Sequence[Step], two: Sequence[Step]) -> Iterator[tuple[Step, ...]]:
    length = len(one) + len(two)
    for places in combinations(range(length), len(one)):
        firsts, seconds = iter(one), iter(two)
        yield tuple(next(firsts) if place in places else next(seconds) for place in range(length))
