"""Alphas and strengths of drawn adapters: any, or such that every sum is exact even in bf16."""

from __future__ import annotations

from itertools import product
from typing import Literal

from hypothesis.strategies import DrawFn, composite, sampled_from
from msgspec.structs import replace

from fulldiff.cases import factors
from fulldiff.cases.model import Adapter, Alpha, numel
from fulldiff.cases.tensors import BASE_NONZEROS, FACTOR_NONZEROS

# Exact values: |strength · scale| of each adapter, and what a strength may be. Every sum must be below
# EXACT_LIMIT times its unit, or bf16 would round it.
EXACT_GAINS = (1.0, 0.5, 2.0, 0.25)
EXACT_BIAS_STRENGTHS = (1.0, 2.0)
EXACT_SCALES = (1.0, 0.5, 2.0, 4.0, 0.25, 0.125, 8.0)
EXACT_LIMIT = 256
SIGNS = (1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0)
NORMAL_STRENGTHS = (1.0, 0.7, -1.0, -0.3, 0.0, 1.5)

ALPHA_FORMS: tuple[Literal["absent", "0d", "1", "1x1"], ...] = ("absent", "0d", "1", "1x1")
ALPHA_DTYPES: tuple[Literal["f64", "f32", "bf16", "f16", "i64"], ...] = ("f32", "bf16", "f16", "i64", "f64")
# Of a LoKr with both factors whole, a diff, or a LoRA with a scale tensor: no effect, whatever it is
# (10^10 is infinite in f16).
IGNORED_ALPHAS = (1.0, 9999999999.0, 0.0)


@composite
def normal(draw: DrawFn, bare: list[Adapter]) -> list[Adapter]:
    """The adapters with any alpha and strength."""
    alphas = [draw(_alphas(factors.rank(adapter))) for adapter in bare]
    strengths = [draw(sampled_from(NORMAL_STRENGTHS)) for _ in bare]
    return [replace(a, alpha=b, strength=s) for a, b, s in zip(bare, alphas, strengths, strict=True)]


@composite
def _alphas(draw: DrawFn, rank: int | None) -> Alpha:
    form, dtype = draw(sampled_from(ALPHA_FORMS)), draw(sampled_from(ALPHA_DTYPES))
    if form == "absent":
        return Alpha()
    if rank is None:
        return Alpha(form, draw(sampled_from(IGNORED_ALPHAS)), dtype)
    whole = (float(rank), 1.0, 2.0 * rank, 7.0)
    return Alpha(form, draw(sampled_from(whole if dtype == "i64" else (*whole, rank / 2, 0.7))), dtype)


@composite
def exact(draw: DrawFn, bare: list[Adapter]) -> list[Adapter]:
    """The adapters with alphas and strengths that keep every sum exact in bf16."""
    gains = draw(sampled_from(_exact_gains(bare)))
    return [draw(_exact_adapter(adapter, gain)) for adapter, gain in zip(bare, gains, strict=True)]


@composite
def _exact_adapter(draw: DrawFn, adapter: Adapter, gain: float) -> Adapter:
    """``adapter`` with |strength · alpha / rank| = gain, or strength 0."""
    rank, alpha, scale = factors.rank(adapter), Alpha(), 1.0
    # A bias delta is multiplied by the strength alone, which must be no finer than 1.
    strengths = EXACT_GAINS if "diff_b" not in adapter.factors else EXACT_BIAS_STRENGTHS
    if rank is None:
        alpha = draw(_alphas(None))
    elif (form := draw(sampled_from(ALPHA_FORMS))) != "absent":
        scales = [s for s in EXACT_SCALES if gain / s in strengths]
        whole = [s for s in scales if s >= 1]
        dtype = draw(sampled_from([dtype for dtype in ALPHA_DTYPES if whole or dtype != "i64"]))
        scale = draw(sampled_from(whole if dtype == "i64" else scales))
        alpha = Alpha(form, rank * scale, dtype)
    return replace(adapter, alpha=alpha, strength=draw(sampled_from(SIGNS)) * gain / scale)


def _exact_gains(bare: list[Adapter]) -> list[tuple[float, ...]]:
    """Which gains the adapters may have together: always 1 for all, and what the limit leaves."""
    limits = [largest_row(adapter) for adapter in bare]
    biases = sum(max(EXACT_BIAS_STRENGTHS) for adapter in bare if "diff_b" in adapter.factors)
    return [gains for gains in product(EXACT_GAINS, repeat=len(bare)) if _fits(gains, limits, biases)]


def _fits(gains: tuple[float, ...], limits: list[int], biases: float) -> bool:
    total = BASE_NONZEROS + 1 + biases + sum(gain * limit for gain, limit in zip(gains, limits, strict=True))
    return total < EXACT_LIMIT * min(1.0, *gains)


def largest_row(adapter: Adapter) -> int:
    """The most that the magnitudes in one row of an exact adapter's delta can sum to."""
    total = 1 if adapter.factors.keys() - {"diff_b"} else 0
    for name, shape in adapter.factors.items():
        # Of a LoHa's first product the elements count: b's are at most 1, the core's are summed over one rank.
        if name == "hada_t1" or name in factors.transposed(adapter):
            total *= shape[0]
        elif name not in ("diff_b", "scale", "hada_w1_b"):
            total *= min(FACTOR_NONZEROS, numel(shape[1:]))
    return total
