"""Named cases: known bugs, crash shapes and corners, and every form in every dtype.

D1 … D13 are faults seen at stable-diffusion.cpp's head, the ``nb10`` and ``vulkan`` cases the crashes of
ggml's backends. D11, a delta scaled by an fp8 base's own scale, has no case: a base here is a plain tensor
of the case's dtype. A case needs no stored answer: the reference computes it. Each name's tensors come from
a seed of its own, so that no two cases share values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from importlib.resources import files
from itertools import product
from typing import Any, Literal

from msgspec.structs import replace

from fulldiff.cases.factors import diff, dora, loha, lokr, lora, with_bias
from fulldiff.cases.model import (
    DTYPES,
    SPATIAL_DIMS,
    Adapter,
    Alpha,
    Body,
    Case,
    DType,
    Input,
    Kind,
    Layer,
    PaddingMode,
    RuntimeCase,
    Shape,
    Values,
    decode,
)

Named = Iterator[tuple[str, Body]]

CONVOLUTIONS: tuple[Kind, ...] = ("conv1d", "conv2d", "conv3d")
PADDING_MODES: tuple[PaddingMode, ...] = ("reflect", "replicate", "circular")
FORM_VALUES: tuple[Values, ...] = ("exact", "normal")
ALPHA_FORMS: tuple[Literal["0d", "1", "1x1"], ...] = ("0d", "1", "1x1")
ALPHA_DTYPES: tuple[Literal["f64", "f32", "bf16", "f16", "i64"], ...] = ("f64", "f32", "bf16", "f16", "i64")


def pinned() -> dict[str, Case]:
    """The catalogue and the saved cases of ``cases/pinned``, by name."""
    folder = files("fulldiff.cases") / "pinned"
    found = sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else []
    saved = {f.name.removesuffix(".json"): decode(f.read_bytes()) for f in found if f.name.endswith(".json")}
    if both := saved.keys() & CATALOGUE.keys():
        raise ValueError(f"cases/pinned/{min(both)}.json has the name of a catalogue case: rename it")
    return CATALOGUE | saved


def _linear(adapter: Adapter, out: int, inp: int, tokens: Shape = (3,), **rest: Any) -> RuntimeCase:
    layout = rest.pop("layout", "contiguous")
    return RuntimeCase(Layer("linear", out, inp), (adapter,), Input((*tokens, inp), layout), **rest)


def _conv_layer(kind: Kind, out: int, inp: int, kernel: int = 3, stride: int = 1, **rest: Any) -> Layer:
    """A convolution with equal kernel sizes, padded to keep the size at stride 1."""
    dims = SPATIAL_DIMS[kind]
    rest.setdefault("dilation", (1,) * dims)
    return Layer(kind, out, inp, (kernel,) * dims, (stride,) * dims, (kernel // 2,) * dims, **rest)


def _conv(adapter: Adapter, layer: Layer, batch: int = 1, size: int = 5, **rest: Any) -> RuntimeCase:
    shape = (batch, layer.inp, *(size,) * len(layer.kernel))
    return RuntimeCase(layer, (adapter,), Input(shape, rest.pop("layout", "contiguous")), **rest)


def _known_bugs() -> Named:
    half = Alpha("0d", 2.0)
    square = lokr((2, 3), (4, 4), w2_rank=4, alpha=half)
    yield "d1-low-rank-square", _linear(square, 8, 12, values="exact")
    yield "d1-low-rank", _linear(lokr((2, 3), (5, 7), w2_rank=4, alpha=half), 10, 21, values="exact")
    yield "d2-factored-w1", _linear(lokr((3, 5), (4, 2), w1_rank=2, alpha=half), 12, 10, values="exact")
    # The rank of w1 is both its sizes: a wrong order of its factors fits.
    yield "d2-factored-w1-square", _linear(lokr((4, 4), (2, 3), w1_rank=4, alpha=half), 8, 12, values="exact")
    conv, kernel = _conv_layer("conv2d", 8, 12), (3, 3)
    yield "d3-conv-batch", _conv(lokr((2, 3), (4, 4), kernel), conv, batch=2, values="exact")
    whole = lokr((2, 3), (4, 4))
    yield "d4-leading-dimensions", _linear(whole, 8, 12, (2, 5), values="exact")
    yield "d4-three-leading-dimensions", _linear(whole, 8, 12, (2, 3, 5), values="exact")
    one, flat = _conv_layer("conv2d", 8, 12, kernel=1), lokr((2, 3), (4, 4), (1, 1), flat=True)
    yield "d5-conv1x1-flat-w2", _conv(flat, one, values="exact")
    yield "d6-conv-full-w2", _conv(lokr((2, 3), (4, 4), kernel), conv, values="exact")
    yield "d7-rank-1", _linear(lokr((2, 3), (4, 4), w2_rank=1, alpha=half), 8, 12, values="exact")
    yield "d7-rank-1-lora", _linear(lora(8, 12, 1, alpha=half), 8, 12, values="exact")
    mid = lora(8, 12, 4, kernel, mid=True, alpha=half)
    yield "d8-locon-mid-stride-2", _conv(mid, _conv_layer("conv2d", 8, 12, stride=2), size=8, values="exact")
    for parts in ("q", "k", "qv", "kv"):
        yield f"d9-qkv-{parts}", _fused(parts, (8, 8, 8))
        yield f"d9-qkv-unequal-{parts}", _fused(parts, (8, 4, 2))
    yield "d9-qkv-growing-k", _fused("k", (4, 8, 8))
    both = (diff((8, 12), strength=0.5), lora(8, 12, 4, alpha=half))
    yield "d10-diff-and-lora", RuntimeCase(Layer("linear", 8, 12), both, Input((3, 12)), values="exact")
    yield "d10-lora-and-diff", RuntimeCase(Layer("linear", 8, 12), both[::-1], Input((3, 12)), values="exact")
    biases = (with_bias(diff((8, 12)), 8), with_bias(lora(8, 12, 4), 8))
    layer = Layer("linear", 8, 12, bias=False)
    yield "d10-diff-and-lora-with-biases", RuntimeCase(layer, biases, Input((3, 12)), values="exact")
    for axis, magnitude in (("out", (8, 1)), ("out-1d", (8,)), ("in", (1, 8))):
        yield f"d12-dora-{axis}", _linear(dora(lora(8, 8, 2, alpha=half), magnitude), 8, 8)
        square = lokr((2, 4), (4, 2), alpha=half, strength=-0.5)
        yield f"d12-dora-lokr-{axis}", _linear(dora(square, magnitude), 8, 8)
    for w1_rank in (0, 4):
        tucker = lokr((2, 3), (4, 4), kernel, w1_rank=w1_rank, w2_rank=4, tucker=True, alpha=Alpha("0d", 4.0))
        yield f"d13-tucker-{'w1factored' if w1_rank else 'w1full'}", _conv(tucker, conv, values="exact")


def _fused(adapted: str, sizes: tuple[int, int, int]) -> RuntimeCase:
    """A fused qkv whose ``adapted`` parts have a LoRA each; the rows of the others stay as they are."""
    starts = dict(zip("qkv", (0, sizes[0], sizes[0] + sizes[1]), strict=True))
    rows = {name: (starts[name], starts[name] + size) for name, size in zip("qkv", sizes, strict=True)}
    loras = (lora(rows[name][1] - rows[name][0], 8, 4, alpha=Alpha("0d", 8.0), rows=rows[name]) for name in adapted)
    return RuntimeCase(Layer("linear", sum(sizes), 8), tuple(loras), Input((2, 5, 8)), values="exact")


def _crashes() -> Named:
    yield "nb10-transposed-input", _linear(lokr((2, 3), (4, 5)), 8, 15, (7,), layout="transposed")
    # One column more than 65535 workgroups of 32; both contractions have as many columns as tokens.
    yield "vulkan-columns-2097120", _linear(lokr((2, 1), (1, 2)), 2, 2, (2097120,))
    yield "vulkan-columns-2097121", _linear(lokr((2, 1), (1, 2)), 2, 2, (2097121,))
    # The same for a convolution: 16 channels of w2 at 363 × 364 positions.
    wide = Layer("conv2d", 32, 32, (1, 2), (1, 1), (0, 0), (1, 1))
    yield "vulkan-conv-columns", RuntimeCase(wide, (lokr((2, 2), (16, 16), (1, 2)),), Input((1, 32, 363, 365)))
    # An f32 input of more than 2^27 bytes: the largest storage buffer of some drivers.
    yield "vulkan-largest-buffer", _linear(lokr((2, 16), (4, 80)), 8, 1280, (26215,))
    yield "vulkan-width-3072", _linear(lokr((4, 4), (768, 768)), 3072, 3072, (4096,))
    # The shapes only: the values that overflow (w1 = 1e-4, w2 = 600, x = 1) do not come from a seed.
    small = lokr((8, 8), (160, 160), dtype="f16")
    yield "fp16-intermediate-overflow", _linear(small, 1280, 1280, (1,), dtype="f16", values="special")
    yield "prime-token-count-4099", _linear(lokr((4, 4), (8, 8)), 32, 32, (4099,))


def _corners() -> Named:
    low = lokr((2, 3), (4, 5), w2_rank=2)
    yield "empty-batch", _linear(low, 8, 15, (0,))
    yield "empty-batch-inside", _linear(low, 8, 15, (2, 0))
    conv, kernel = _conv_layer("conv2d", 8, 15), (3, 3)
    yield "empty-batch-conv2d", _conv(lokr((2, 3), (4, 5), kernel, w2_rank=2), conv, batch=0)
    yield "single-vector", _linear(low, 8, 15, ())
    yield "single-vector-dora", _linear(dora(lora(8, 15, 2), (8, 1)), 8, 15, ())
    for strength in (0.0, -1.0, -0.25):
        adapter = lokr((2, 3), (4, 5), w2_rank=2, strength=strength)
        yield f"strength-{strength:g}", _linear(adapter, 8, 15, values="exact")
    for strength in (0.0, 0.5):
        moved = dora(lora(8, 15, 2, alpha=Alpha("0d", 2.0), strength=strength), (8, 1))
        yield f"strength-{strength:g}-dora", _linear(moved, 8, 15)
    behind = (lora(8, 15, 4), dora(lora(8, 15, 2), (8, 1)))
    yield "dora-behind-lokr", RuntimeCase(Layer("linear", 8, 15), (lokr((2, 3), (4, 5)), behind[1]), Input((3, 15)))
    yield "dora-behind-lora", RuntimeCase(Layer("linear", 8, 15), behind, Input((3, 15)))
    yield "strength-0.7-loha-f64", _linear(loha(8, 15, 2, strength=0.7, dtype="f64"), 8, 15, dtype="f64")
    unequal = lokr((2, 16), (640, 80))
    yield "unequal-splits", _linear(unequal, 1280, 1280, (3,))
    yield "ranks-differ", _linear(lokr((4, 3), (4, 5), w1_rank=2, w2_rank=3, alpha=Alpha("0d", 3.0)), 16, 15)
    yield (
        "lora-conv1x1-flat",
        _conv(lora(8, 15, 2, (1, 1), flat=True), _conv_layer("conv2d", 8, 15, kernel=1)),
    )
    yield "bias-delta-alone", _linear(Adapter("diff", {"diff_b": (8,)}, strength=-1.0), 8, 15, values="exact")
    flat = diff((8, 15), alpha=Alpha("0d", 8.0))
    yield "diff-conv1x1-flat", _conv(flat, _conv_layer("conv2d", 8, 15, kernel=1), values="exact")
    # A rank whose square exceeds out · in / (out + in): cheaper made whole than run as a LoRA of rank r².
    yield "loha-of-high-rank", _linear(loha(8, 15, 5), 8, 15)
    mixed = (low, loha(8, 15, 2, strength=-1.0), dora(lora(8, 15, 2), (8, 1)), diff((8, 15), strength=0.5))
    yield "four-kinds", RuntimeCase(Layer("linear", 8, 15), mixed, Input((3, 15)))
    part = dora(lokr((2, 3), (2, 5), w2_rank=2, rows=(8, 12)), (4, 1))
    yield "dora-of-a-part", RuntimeCase(Layer("linear", 16, 15), (part,), Input((3, 15)))
    three = (low, lora(8, 15, 4, strength=-1.0), lokr((4, 5), (2, 3), strength=0.5))
    yield "three-adapters", RuntimeCase(Layer("linear", 8, 15), three, Input((3, 15)), values="exact")


def _groups_and_geometry() -> Named:
    kernel = (3, 3)
    grouped = _conv_layer("conv2d", 12, 24, groups=4)
    yield "groups-not-dividing-up", _conv(lokr((3, 2), (4, 3), kernel), grouped, batch=2, values="exact")
    yield "groups-dividing-up", _conv(lokr((4, 2), (3, 3), kernel), grouped, batch=2, values="exact")
    yield "groups-lora", _conv(lora(12, 6, 4, kernel), grouped, batch=2, values="exact")
    depthwise = _conv_layer("conv2d", 8, 8, groups=8)
    yield "depthwise-lokr", _conv(lokr((2, 1), (4, 1), kernel), depthwise, batch=2, values="exact")
    yield "depthwise-lora", _conv(lora(8, 1, 2, kernel), depthwise, batch=2, values="exact")
    low = lokr((2, 3), (4, 5), kernel, w2_rank=2)
    for mode in PADDING_MODES:
        layer = _conv_layer("conv2d", 8, 15, padding_mode=mode)
        yield f"padding-{mode}", _conv(low, layer, values="exact")
        yield f"padding-{mode}-diff", _conv(diff((8, 15, *kernel)), layer, values="exact")
        yield f"padding-{mode}-lora", _conv(lora(8, 15, 2, kernel), layer, values="exact")
    dilated = _conv_layer("conv2d", 8, 15, stride=2, dilation=(2, 1))
    yield "stride-and-dilation", _conv(low, dilated, size=8, values="exact")
    yield "channels-last", _conv(low, _conv_layer("conv2d", 8, 15), batch=2, layout="channels_last")


def _squares() -> Named:
    """Sizes at which a wrong axis or order still gives a delta of the right shape, and an alpha that divides oddly."""
    yield "square-w1", _linear(lokr((3, 3), (2, 4)), 6, 12, values="exact")
    yield "square-loha", _linear(loha(8, 8, 2), 8, 8, values="exact")
    tucker = loha(8, 8, 2, (3, 3), tucker=True)
    yield "square-loha-tucker", _conv(tucker, _conv_layer("conv2d", 8, 8), values="exact")
    yield "diff-with-alpha", _linear(diff((8, 15), alpha=Alpha("0d", 2.0)), 8, 15, values="exact")


def _low_rank_kernels() -> Named:
    """Low-rank w2 of a convolution whose kernel is not square, and of rank 1: its factors' sizes mislead."""
    oblong = Layer("conv2d", 8, 12, (3, 2), (1, 1), (1, 0), (1, 1))
    yield "lokr-oblong-kernel", _conv(lokr((2, 3), (4, 4), (3, 2), w2_rank=2), oblong, values="exact")
    low = lokr((2, 3), (4, 4), (3, 3), w2_rank=1)
    yield "lokr-kernel-of-rank-1", _conv(low, _conv_layer("conv2d", 8, 12), values="exact")


def _as_trained() -> Named:
    """A LoKr in the sizes and forms that LyCORIS and PEFT themselves choose: 30 = 5·6, 25 = 5·5, rank below half."""
    layer = Layer("conv2d", 30, 25, (3, 2), (1, 1), (1, 0), (1, 1))
    for w1_rank, tucker in product((0, 2), (False, True)):
        form = f"{'both-low' if w1_rank else 'low'}{'-tucker' if tucker else ''}"
        sizes: dict[str, Any] = {"w1_rank": w1_rank, "w2_rank": 2, "alpha": Alpha("0d", 1.0)}
        yield f"as-trained-{form}-conv2d", _conv(lokr((5, 5), (6, 5), (3, 2), tucker=tucker, **sizes), layer)
        if not tucker:
            yield f"as-trained-{form}-linear", _linear(lokr((5, 5), (6, 5), **sizes), 30, 25)


def _alphas() -> Named:
    ignored = lokr((2, 3), (4, 5), alpha=Alpha("0d", 9999999999.0, "f16"), dtype="f16")
    yield "both-full-alpha-infinite", _linear(ignored, 8, 15, dtype="f16", values="exact")
    yield "alpha-absent", _linear(lokr((2, 3), (4, 5), w2_rank=2), 8, 15, values="exact")
    for form in ALPHA_FORMS:
        for dtype in ALPHA_DTYPES:
            adapter = lokr((2, 3), (4, 5), w2_rank=2, alpha=Alpha(form, 4.0, dtype))
            yield f"alpha-{form}-{dtype}", _linear(adapter, 8, 15, values="exact")


def _forms() -> Named:
    """Every form that a kind of layer can have, in every dtype, exact (but for DoRA) and random."""
    for kind in ("linear", *CONVOLUTIONS):
        kernel = (3, 2, 2)[: SPATIAL_DIMS[kind]]
        for form, adapter in _forms_for(kernel).items():
            for dtype, values in product(DTYPES, FORM_VALUES):
                if values != "exact" or "dora_scale" not in adapter.factors:
                    name = f"form-{form}-{kind}-{dtype}-{values}"
                    yield name, _form_case(kind, kernel, replace(adapter, dtype=dtype), dtype, values)


def _forms_for(kernel: Shape) -> dict[str, Adapter]:
    """The forms of an adapter for a layer (10, 12, *kernel), by name."""
    shape, alpha = (10, 12), Alpha("0d", 1.5)
    plain = lora(*shape, 3, kernel, alpha=alpha)
    forms = {"locon" if kernel else "lora": plain}
    if kernel:
        forms["lora-mid"] = lora(*shape, 3, kernel, mid=True, alpha=alpha)
        forms["loha-tucker"] = loha(*shape, 2, kernel, tucker=True, alpha=Alpha("0d", 1.0))
    for w1_rank in (0, 3):
        for w2 in ("full", "lowrank", "tucker") if kernel else ("full", "lowrank"):
            made = lokr(
                (2, 3), (5, 4), kernel, w1_rank=w1_rank, w2_rank=0 if w2 == "full" else 3, tucker=w2 == "tucker",
                alpha=alpha,
            )  # fmt: skip
            forms[f"w1{'factored' if w1_rank else 'full'}-{w2}"] = made
    forms["loha"] = loha(*shape, 2, kernel, alpha=Alpha("0d", 1.0))
    forms["diff"], forms["diff-bias"] = diff((*shape, *kernel)), with_bias(diff((*shape, *kernel)), 10)
    forms["lora-bias"] = with_bias(plain, 10)
    forms["lora-scale"] = replace(plain, factors={**plain.factors, "scale": ()})
    ones = (1,) * len(kernel)
    for axis, magnitude in (("out", (10, 1, *ones)), ("out-1d", (10,)), ("in", (1, 12, *ones))):
        forms[f"dora-{axis}"] = dora(plain, magnitude)
    forms["dora-lokr"] = dora(forms["w1full-full"], (10, 1, *ones))
    forms["dora-loha"] = dora(forms["loha"], (10, 1, *ones))
    return forms


def _form_case(kind: Kind, kernel: Shape, adapter: Adapter, dtype: DType, values: Values) -> RuntimeCase:
    if kind == "linear":
        return _linear(adapter, 10, 12, (2, 3), dtype=dtype, values=values)
    ones = (1,) * len(kernel)
    layer = Layer(kind, 10, 12, kernel, ones, ones, ones)
    return _conv(adapter, layer, batch=2, size=4, dtype=dtype, values=values)


def _catalogue() -> dict[str, Case]:
    found: dict[str, Case] = {}
    groups = (_known_bugs, _crashes, _corners, _groups_and_geometry, _squares, _low_rank_kernels, _as_trained, _alphas)
    for group in (*groups, _forms):
        for name, body in group():
            if name in found:
                raise ValueError(f"two catalogue cases are called {name}")
            found[name] = Case(body, zlib.crc32(name.encode()))
    return found


CATALOGUE: dict[str, Case] = _catalogue()

# Too large for the quick profile.
HEAVY: frozenset[str] = frozenset(name for name in CATALOGUE if name.startswith("vulkan-"))
