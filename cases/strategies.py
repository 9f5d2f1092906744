"""Hypothesis strategies of cases: factors are drawn and dimensions derived, nothing is filtered.

Shrinking leads to one adapter with whole factors on a small linear layer in f32: in every choice
the simplest alternative comes first, and an alternative that stands twice is likelier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite, integers, sampled_from
from msgspec.structs import replace

from fulldiff.cases import factors, scales
from fulldiff.cases.model import (
    DTYPES,
    SPATIAL_DIMS,
    Adapter,
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

# What may be added to an adapter: see `runtime_cases`.
Extra = Literal["dora", "diff_b", "scale", "rows"]
EXTRAS: tuple[Extra, ...] = ("dora", "diff_b", "scale", "rows")

# up, uq, vp, vq: the split of a layer's dimensions into those of w1 and w2.
Split = tuple[int, int, int, int]

MAX_FACTOR = 7
MAX_RANK = 5
MAX_TUCKER_LOHA_RANK = 2
MAX_GROUPS = 4
MAX_EXTRA = 4

KINDS: tuple[Kind, ...] = ("linear", "conv2d", "linear", "conv1d", "linear", "conv2d", "linear", "conv3d")
PADDING_MODES: tuple[PaddingMode, ...] = ("zeros", "zeros", "zeros", "reflect", "replicate", "circular")
LAYOUTS: tuple[Layout, ...] = ("contiguous", "contiguous", "transposed", "strided")
BATCHES = (1, 2, 3, 1, 2, 3, 0)
LEADING = (1, 2, 3, 4, 1, 2, 3, 4, 0)
ADAPTER_COUNTS = (1, 1, 1, 2, 2, 3)
FUSED_COUNTS = (1, 2, 2, 3)


def runtime_cases(
    kinds: Sequence[str] = ("lora", "lokr", "lokr", "lora", "loha", "diff"),
    values: Sequence[Values] = ("exact", "normal", "special"),
    dtypes: Sequence[DType] = DTYPES,
    extras: Sequence[Extra] = EXTRAS,
) -> SearchStrategy[Case]:
    """Runtime cases with one to three adapters of the given kinds, values and dtypes.

    ``extras`` says what may be added: a DoRA's magnitude, a bias delta, a LoRA's scale tensor, and layers
    that are fused, an adapter to a part.
    """
    ordered = sorted(dtypes, key=lambda dtype: dtype != "f32")
    return _cases(tuple(kinds), tuple(values), tuple(ordered), tuple(extras))


@composite
def _cases(
    draw: DrawFn,
    kinds: tuple[str, ...],
    values: tuple[Values, ...],
    dtypes: tuple[DType, ...],
    extras: tuple[Extra, ...],
) -> Case:
    up, uq, vp, vq = draw(st.tuples(*[integers(1, MAX_FACTOR)] * 4))
    # A square w2 hides swapped axes and factors; a square layer a DoRA's magnitude along the wrong one.
    square = draw(sampled_from(("neither", "neither", "neither", "w2", "w2", "both")))
    vq, uq = vp if square != "neither" else vq, up if square == "both" else uq
    kind = draw(sampled_from(KINDS))
    parts = draw(_parts(up * vp)) if "rows" in extras and draw(_rarely) else []
    out = max((end for _, end in parts), default=up * vp)
    groups = 1 if kind == "linear" or parts else draw(_groups(out))
    if groups > 1 and draw(st.booleans()):
        uq = vq = 1  # depthwise
    layer = draw(_layers(kind, out, uq * vq, groups))
    chosen, dtype = draw(sampled_from(values)), draw(sampled_from(dtypes))
    more = tuple(extra for extra in extras if extra != "dora" or chosen != "exact")
    first = draw(_bare_adapter(draw(sampled_from(kinds)), layer, (up, uq, vp, vq), more))
    bare = [replace(first, rows=parts[0] if parts else None)]
    for _ in range(draw(sampled_from(FUSED_COUNTS if parts else ADAPTER_COUNTS)) - 1):
        rows = draw(sampled_from((*parts[1:], *parts[1:], parts[0], None))) if parts else None
        split = draw(_splits(rows[1] - rows[0] if rows else out, uq * vq))
        bare.append(replace(draw(_bare_adapter(draw(sampled_from(kinds)), layer, split, more)), rows=rows))
    adapters = draw(scales.exact(bare) if chosen == "exact" else scales.normal(bare))
    typed = tuple(replace(adapter, dtype=draw(_factor_dtype(dtype))) for adapter in adapters)
    body = RuntimeCase(layer, typed, draw(_inputs(layer)), dtype, chosen)
    return Case(body, draw(integers(0, 2**32 - 1)))


@composite
def _parts(draw: DrawFn, size: int) -> list[tuple[int, int]]:
    """The rows of a fused layer's two or three parts, often of unequal sizes; first that of ``size``."""
    others = draw(sampled_from((1, 2, 2)))
    sizes = [draw(st.just(size) | integers(1, MAX_FACTOR)) for _ in range(others)]
    at = draw(integers(0, len(sizes)))
    sizes.insert(at, size)
    ends = list(accumulate(sizes))
    parts = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [parts[at], *parts[:at], *parts[at + 1 :]]


# Layers and inputs


@composite
def _layers(draw: DrawFn, kind: Kind, out: int, inp: int, groups: int) -> Layer:
    """A layer of ``out`` and ``inp`` (per group) features."""
    bias = draw(sampled_from((True, False)))
    if kind == "linear":
        return Layer(kind, out, inp, bias=bias)
    largest = 1 if draw(_rarely) else 3
    dims = [draw(_dims(largest)) for _ in range(SPATIAL_DIMS[kind])]
    kernel, stride, padding, dilation = zip(*dims, strict=True)
    mode = draw(sampled_from(PADDING_MODES))
    return Layer(kind, out, inp * groups, kernel, stride, padding, dilation, mode, groups, bias)


@composite
def _groups(draw: DrawFn, out: int) -> int:
    return draw(sampled_from(divisors(out, MAX_GROUPS))) if draw(_sometimes) else 1


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
    up, uq = draw(sampled_from(divisors(out, out))), draw(sampled_from(divisors(inp, inp)))
    return (up, uq, out // up, inp // uq)


@composite
def _bare_adapter(draw: DrawFn, kind: str, layer: Layer, split: Split, extras: tuple[Extra, ...]) -> Adapter:
    """An adapter without alpha, in any form that fits the rows and columns of ``split``."""
    up, uq, vp, vq = split
    flat = bool(layer.kernel) and numel(layer.kernel) == 1 and draw(st.booleans())
    adapter = draw(_forms(kind, layer.kernel, split, flat))
    if kind == "lora" and "scale" in extras and draw(_rarely):
        adapter = replace(adapter, factors={**adapter.factors, "scale": ()})
    if kind != "diff" and "dora" in extras and draw(_sometimes):
        adapter = factors.dora(adapter, draw(_magnitudes(up * vp, uq * vq, layer.kernel)))
    if "diff_b" in extras and draw(_rarely):
        adapter = factors.with_bias(adapter, up * vp)
        if kind == "diff" and draw(st.booleans()):
            adapter = replace(adapter, factors={"diff_b": (up * vp,)})
    return adapter


@composite
def _forms(draw: DrawFn, kind: str, kernel: Shape, split: Split, flat: bool) -> Adapter:
    """The adapter's own factors."""
    up, uq, vp, vq = split
    if kind == "diff":
        return factors.diff((up * vp, uq * vq, *(() if flat else kernel)))
    if kind == "loha":
        tucker = bool(kernel) and draw(st.booleans())
        rank = draw(integers(1, MAX_TUCKER_LOHA_RANK) if tucker else _ranks(vp))
        return factors.loha(up * vp, uq * vq, rank, kernel, tucker=tucker)
    if kind == "lora":
        mid = bool(kernel) and not flat and draw(st.booleans())
        return factors.lora(up * vp, uq * vq, draw(_ranks(vp)), kernel, mid=mid, flat=flat)
    form = draw(sampled_from(("full", "low-rank", "tucker") if kernel else ("full", "low-rank")))
    w2_rank = 0 if form == "full" else draw(_ranks(vp))
    w1_rank = draw(_ranks(up)) if draw(st.booleans()) else 0
    if w1_rank and w2_rank and not draw(_rarely):
        w1_rank = w2_rank
    w1, w2, tucker = (up, uq), (vp, vq), form == "tucker"
    return factors.lokr(w1, w2, kernel, w1_rank=w1_rank, w2_rank=w2_rank, tucker=tucker, flat=flat)


def _magnitudes(out: int, inp: int, kernel: Shape) -> SearchStrategy[Shape]:
    """A DoRA's magnitude per output row (LyCORIS, PEFT) or per input (older LyCORIS)."""
    ones = (1,) * len(kernel)
    shapes = ((out, 1, *ones), (out,), (1, inp, *ones))
    return sampled_from((*shapes, (out,), (out,)) if out == inp else shapes)


def _ranks(size: int) -> SearchStrategy[int]:
    """Any small rank; as often the very size of the factor, which hides swapped axes."""
    return integers(1, MAX_RANK) | st.just(min(size, MAX_RANK))


def _factor_dtype(dtype: DType) -> SearchStrategy[DType]:
    return sampled_from((*[dtype] * 8, *DTYPES))


def divisors(number: int, limit: int) -> list[int]:
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


_sometimes = sampled_from((False, False, True))
_rarely = sampled_from((False, False, False, False, True))
