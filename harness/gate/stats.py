"""The gate's arithmetic: from the launches of base and head to one verdict per cell.

A block is four launches, base head head base (A B B A); each launch gives the median time of its samples. A
block's number is the mean log of the heads less that of the bases, so slow drift falls on both alike. Over
the blocks: a 95 % interval by Student's t. The A/A half-width is what the interval would be if both sides
were the same code, from the differences of the two bases, and of the two heads, within each block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Verdict = Literal["REGRESSED", "IMPROVED", "EQUIVALENT", "INCONCLUSIVE", "UNFIT"]
# One block's medians in seconds: base, head, head, base.
Block = tuple[float, float, float, float]

LEVEL = 0.95
DELTA = 0.03
# Twice the noise of the same code against itself is no regression either.
NOISE_FACTOR = 2.0
UNFIT_HALF_WIDTH = 0.015
BLOCKS = 10


@dataclass(frozen=True)
class Estimate:
    """One cell: log-ratio of head over base with its interval, the noise, the margin, and p (one-sided)."""

    middle: float
    low: float
    high: float
    half_aa: float
    delta: float
    p: float

    @property
    def slower(self) -> bool:
        """Whether the whole interval is beyond the margin, which the noise has widened."""
        return self.low > math.log1p(self.delta)

    @property
    def verdict(self) -> Verdict:
        """What this cell alone says; `verdicts` corrects for several cells."""
        margin = math.log1p(self.delta)
        if self.half_aa > UNFIT_HALF_WIDTH:
            return "UNFIT"
        if self.slower:
            return "REGRESSED"
        if self.high < -margin:
            return "IMPROVED"
        return "EQUIVALENT" if -margin < self.low and self.high < margin else "INCONCLUSIVE"


def estimate(blocks: Sequence[Block]) -> Estimate:
    """The estimate from at least two blocks."""
    logs = np.log(np.asarray(blocks))
    ratios = (logs[:, 1] + logs[:, 2] - logs[:, 0] - logs[:, 3]) / 2
    n = len(ratios)
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, n - 1))
    error = float(ratios.std(ddof=1)) / math.sqrt(n)
    half_aa = quantile * _launch_noise(logs) / math.sqrt(n)
    delta = max(DELTA, NOISE_FACTOR * half_aa)
    middle = float(ratios.mean())
    p = _p(middle - math.log1p(delta), error, n)
    return Estimate(middle, middle - quantile * error, middle + quantile * error, half_aa, delta, p)


def _launch_noise(logs: np.ndarray) -> float:
    """The deviation of one launch, from the two of the same code in each block; drift's own mean taken off."""
    pairs = np.stack([logs[:, 3] - logs[:, 0], logs[:, 2] - logs[:, 1]])
    return float(np.sqrt(pairs.var(axis=1, ddof=1).mean() / 2))


def _p(excess: float, error: float, n: int) -> float:
    """One-sided: how likely so large an excess is if there is none."""
    if error == 0:
        return 0.0 if excess > 0 else 1.0
    return float(stats.t.sf(excess / error, n - 1))


def verdicts(estimates: Mapping[str, Estimate]) -> dict[str, Verdict]:
    """Each cell's verdict; REGRESSED only where Holm's correction over all cells leaves it significant."""
    found: dict[str, Verdict] = {name: each.verdict for name, each in estimates.items()}
    allowed = (1 - LEVEL) / 2
    ordered = sorted(estimates, key=lambda name: estimates[name].p)
    rejected = True
    for at, name in enumerate(ordered):
        rejected = rejected and estimates[name].p <= allowed / (len(ordered) - at)
        if found[name] == "REGRESSED" and not rejected:
            found[name] = "INCONCLUSIVE"
    return found
