"""Hypothesis strategies of cases: factors are drawn and dimensions derived, nothing is filtered.

Shrinking leads to one adapter with whole factors on a small linear layer in f32: in every choice
the simplest alternative comes first, and an alternative that stands twice is likelier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite, integers, sampled_from
from msgspec.structs import replace

from fulldiff.cases import factors
from fulldiff.cases.model import (
    DTYPES,
    SPATIAL_DIMS,
    Adapter,
    Alpha,
    Case,
    DType,
    Input,
    Kind,
    Layer,
    Layout,
    PaddingMode,
    RuntimeCase,
    Shape,
    Values,
    numel,
)
from fulldiff.cases.tensors import BASE_NONZEROS, FACTOR_NONZEROS

# up, uq, vp, vq: the split of a layer's dimensions into those of w1 and w2.
Split = tuple[int, int, int, int]

MAX_FACTOR = 7
MAX_RANK = 5
MAX_GROUPS = 4
MAX_EXTRA = 4

KINDS: tuple[Kind, ...] = ("linear", "conv2d", "linear", "conv1d", "linear", "conv2d", "linear", "conv3d")
PADDING_MODES: tuple[PaddingMode, ...] = ("zeros", "zeros", "zeros", "reflect", "replicate", "circular")
LAYOUTS: tuple[Layout, ...] = ("contiguous", "contiguous", "transposed", "strided")
BATCHES = (1, 2, 3, 1, 2, 3, 0)
LEADING = (1, 2, 3, 4, 1, 2, 3, 4, 0)
ADAPTER_COUNTS = (1, 1, 1, 2, 2, 3)

# Exact values: |strength · scale| of each adapter, and what a strength may be. Every sum must be below
# EXACT_LIMIT times its unit, or bf16 would round it.
EXACT_GAINS = (1.0, 0.5, 2.0, 0.25)
EXACT_SCALES = (1.0, 0.5, 2.0, 4.0, 0.25, 0.125, 8.0)
EXACT_LIMIT = 256
SIGNS = (1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0)
NORMAL_STRENGTHS = (1.0, 0.7, -1.0, -0.3, 0.0, 1.5)

ALPHA_FORMS: tuple[Literal["absent", "0d", "1", "1x1"], ...] = ("absent", "0d", "1", "1x1")
ALPHA_DTYPES: tuple[Literal["f64", "f32", "bf16", "f16", "i64"], ...] = ("f32", "bf16", "f16", "i64", "f64")
# Of a LoKr with both factors whole: no effect, whatever it is (10^10 is infinite in f16).
IGNORED_ALPHAS = (1.0, 9999999999.0, 0.0)


def runtime_cases(
    kinds: Sequence[str] = ("lora", "lokr"),
    values: Sequence[Values] = ("exact", "normal", "special"),
    dtypes: Sequence[DType] = DTYPES,
) -> SearchStrategy[Case]:
    """Runtime cases with one to three adapters of the given kinds, values and dtypes."""
    ordered = sorted(dtypes, key=lambda dtype: dtype != "f32")
    return _cases(tuple(kinds), tuple(values), tuple(ordered))


@composite
def _cases(draw: DrawFn, kinds: tuple[str, ...], values: tuple[Values, ...], dtypes: tuple[DType, ...]) -> Case:
    up, uq, vp, vq = draw(st.tuples(*[integers(1, MAX_FACTOR)] * 4))
    # A square w2 hides swapped axes and factors.
    vq = vp if draw(integers(0, 3)) == 3 else vq
    kind = draw(sampled_from(KINDS))
    groups = 1 if kind == "linear" else draw(_groups(up * vp))
    if groups > 1 and draw(st.booleans()):
        uq = vq = 1  # depthwise
    layer = draw(_layers(kind, up * vp, uq * vq, groups))
    chosen, dtype = draw(sampled_from(values)), draw(sampled_from(dtypes))
    count = draw(sampled_from(ADAPTER_COUNTS))
    splits = [(up, uq, vp, vq), *(draw(_splits(up * vp, uq * vq)) for _ in range(count - 1))]
    bare = [draw(_bare_adapter(draw(sampled_from(kinds)), layer, each)) for each in splits]
    adapters = draw(_exact(bare) if chosen == "exact" else _normal(bare))
    typed = tuple(replace(adapter, dtype=draw(_factor_dtype(dtype))) for adapter in adapters)
    body = RuntimeCase(layer, typed, draw(_inputs(layer)), dtype, chosen)
    return Case(body, draw(integers(0, 2**32 - 1)))


# Layers and inputs


@composite
def _layers(draw: DrawFn, kind: Kind, out: int, inp: int, groups: int) -> Layer:
    """A layer of ``out`` and ``inp`` (per group) features."""
    bias = draw(st.booleans())
    if kind == "linear":
        return Layer(kind, out, inp, bias=bias)
    largest = 1 if draw(_rarely) else 3
    dims = [draw(_dims(largest)) for _ in range(SPATIAL_DIMS[kind])]
    kernel, stride, padding, dilation = zip(*dims, strict=True)
    mode = draw(sampled_from(PADDING_MODES))
    return Layer(kind, out, inp * groups, kernel, stride, padding, dilation, mode, groups, bias)


@composite
def _groups(draw: DrawFn, out: int) -> int:
    return draw(sampled_from(_divisors(out, MAX_GROUPS))) if draw(_sometimes) else 1


@composite
def _dims(draw: DrawFn, largest: int) -> tuple[int, int, int, int]:
    """Kernel, stride, padding and dilation of one spatial dimension.

    A kernel of 1 is not dilated: it would change nothing, and torch 2.13's oneDNN convolution (CPU) then
    segfaults on an input of width 1 with stride 2, padding 1 and dilation 2.
    """
    kernel, stride, padding = draw(st.tuples(integers(1, largest), integers(1, 2), integers(0, 2)))
    return kernel, stride, padding, draw(integers(1, 2)) if kernel > 1 else 1


@composite
def _inputs(draw: DrawFn, layer: Layer) -> Input:
    if layer.kind == "linear":
        leading = draw(st.lists(sampled_from(LEADING), max_size=3))
        return Input((*leading, layer.inp), draw(sampled_from(LAYOUTS)))
    smallest = smallest_input(layer)
    extra = draw(st.tuples(*[integers(0, MAX_EXTRA)] * len(smallest)))
    spatial = tuple(n + more for n, more in zip(smallest, extra, strict=True))
    two_or_three = layer.kind in ("conv2d", "conv3d")
    layouts: tuple[Layout, ...] = (*LAYOUTS, "channels_last") if two_or_three else LAYOUTS
    return Input((draw(sampled_from(BATCHES)), layer.inp, *spatial), draw(sampled_from(layouts)))


def smallest_input(layer: Layer) -> Shape:
    """The smallest spatial sizes that a convolution accepts with its kernel and padding mode."""
    least = {"reflect": 1, "circular": 0}.get(layer.padding_mode)
    sizes = zip(layer.kernel, layer.padding, layer.dilation, strict=True)
    return tuple(max(1, d * (k - 1) + 1 - 2 * p, 1 if least is None else p + least) for k, p, d in sizes)


# Adapters


@composite
def _splits(draw: DrawFn, out: int, inp: int) -> Split:
    up, uq = draw(sampled_from(_divisors(out, out))), draw(sampled_from(_divisors(inp, inp)))
    return (up, uq, out // up, inp // uq)


@composite
def _bare_adapter(draw: DrawFn, kind: str, layer: Layer, split: Split) -> Adapter:
    """An adapter without alpha, in any form that fits the layer."""
    up, uq, vp, vq = split
    flat = bool(layer.kernel) and numel(layer.kernel) == 1 and draw(st.booleans())
    if kind == "lora":
        mid = bool(layer.kernel) and not flat and draw(st.booleans())
        return factors.lora(up * vp, uq * vq, draw(_ranks(vp)), layer.kernel, mid=mid, flat=flat)
    form = draw(sampled_from(("full", "low-rank", "tucker") if layer.kernel else ("full", "low-rank")))
    w2_rank = 0 if form == "full" else draw(_ranks(vp))
    w1_rank = draw(_ranks(up)) if draw(st.booleans()) else 0
    if w1_rank and w2_rank and not draw(_rarely):
        w1_rank = w2_rank
    w1, w2, tucker = (up, uq), (vp, vq), form == "tucker"
    return factors.lokr(w1, w2, layer.kernel, w1_rank=w1_rank, w2_rank=w2_rank, tucker=tucker, flat=flat)


def _ranks(size: int) -> SearchStrategy[int]:
    """Any small rank; as often the very size of the factor, which hides swapped axes."""
    return integers(1, MAX_RANK) | st.just(min(size, MAX_RANK))


def _factor_dtype(dtype: DType) -> SearchStrategy[DType]:
    return sampled_from((*[dtype] * 8, *DTYPES))


@composite
def _normal(draw: DrawFn, bare: list[Adapter]) -> list[Adapter]:
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
def _exact(draw: DrawFn, bare: list[Adapter]) -> list[Adapter]:
    """The adapters with alphas and strengths that keep every sum exact in bf16."""
    gains = draw(sampled_from(_exact_gains(bare)))
    return [draw(_exact_adapter(adapter, gain)) for adapter, gain in zip(bare, gains, strict=True)]


@composite
def _exact_adapter(draw: DrawFn, adapter: Adapter, gain: float) -> Adapter:
    """``adapter`` with |strength · alpha / rank| = gain, or strength 0."""
    rank, alpha, scale = factors.rank(adapter), Alpha(), 1.0
    if rank is None:
        alpha = draw(_alphas(None))
    elif (form := draw(sampled_from(ALPHA_FORMS))) != "absent":
        dtype = draw(sampled_from(ALPHA_DTYPES))
        scales = [s for s in EXACT_SCALES if gain / s in EXACT_GAINS and (s >= 1 or dtype != "i64")]
        scale = draw(sampled_from(scales))
        alpha = Alpha(form, rank * scale, dtype)
    return replace(adapter, alpha=alpha, strength=draw(sampled_from(SIGNS)) * gain / scale)


def _exact_gains(bare: list[Adapter]) -> list[tuple[float, ...]]:
    """Which gains the adapters may have together: always 1 for all, and what the limit leaves."""
    limits = [largest_row(adapter) for adapter in bare]
    return [gains for gains in product(EXACT_GAINS, repeat=len(bare)) if _fits(gains, limits)]


def _fits(gains: tuple[float, ...], limits: list[int]) -> bool:
    total = BASE_NONZEROS + 1 + sum(gain * limit for gain, limit in zip(gains, limits, strict=True))
    return total < EXACT_LIMIT * min(1.0, *gains)


def largest_row(adapter: Adapter) -> int:
    """The most that the magnitudes in one row of an exact adapter's delta can sum to."""
    total = 1
    for name, shape in adapter.factors.items():
        transposed = name == "lokr_w2_a" and "lokr_t2" in adapter.factors
        total *= shape[0] if transposed else min(FACTOR_NONZEROS, numel(shape[1:]))
    return total


def _divisors(number: int, limit: int) -> list[int]:
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


_sometimes = sampled_from((False, False, True))
_rarely = sampled_from((False, False, False, False, True))
