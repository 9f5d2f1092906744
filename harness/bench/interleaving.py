"""A B … B A: the order in which ways are timed, so that slow drift falls on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


def interleave(
    ways: Sequence[str], sample: Callable[[str], float], least: int, most: int, budget: float, halves: bool = False
) -> dict[str, list[float]]:
    """At least ``least`` blocks, and up to ``most`` while the budget (seconds) lasts.

    A block takes a sample of each way in order, then in reverse; a way's number is the mean of its two. ``halves``:
    each direction is a block of its own, for samples so long that few can be had.
    """
    samples: dict[str, list[float]] = {way: [] for way in ways}
    directions = [ways, tuple(reversed(ways))]
    end = time.perf_counter() + budget
    blocks = 0
    while blocks < least or (blocks < most and time.perf_counter() < end):
        orders = [directions[blocks % 2]] if halves else directions
        blocks += 1
        block = dict.fromkeys(ways, 0.0)
        for way in (way for order in orders for way in order):
            block[way] += sample(way)
        for way, total in block.items():
            samples[way].append(total / len(orders))
    return samples
