"""Hypothesis strategy of join cases: one to four files on a few small layers, their weights and what is set later.

Names are drawn first, then what they can hold; nothing is filtered. Exact values stay exact in bf16: weights,
alpha / rank, the diagonal and the scale are powers of two (or 0, or -1) whose product is 1/2 at least and 4 at
most, so that a row's sums stay below 256 times 1/2. f32 and f64 have digits to spare for a diagonal of 2.5.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite, integers, sampled_from

from fulldiff.cases import factors
from fulldiff.cases.model import DTYPES, Adapter, AdapterFile, Alpha, Case, DType, JoinCase, Layer, Model, Values
from fulldiff.cases.tables import load_table

# Layers whose deltas are small: Linear, Conv 1×1 and k×k, UNet and text encoder.
POOLS: dict[str, tuple[str, ...]] = {
    "sd15": (
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
        "unet.conv_in",
        "text_encoder.text_model.encoder.layers.0.self_attn.v_proj",
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k",
        "unet.down_blocks.0.attentions.0.proj_in",
        "unet.conv_out",
    ),
    "sdxl": (
        "unet.down_blocks.0.resnets.0.time_emb_proj",
        "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
        "unet.conv_in",
        "unet.down_blocks.1.resnets.0.conv_shortcut",
        "unet.conv_out",
    ),
}
STRIDED = "unet.down_blocks.0.downsamplers.0.conv"
# Which layers a family's files can name, and whether they hold alpha and a mid factor.
POSITIONAL = (POOLS["sd15"][0], POOLS["sd15"][2], POOLS["sd15"][3])
SPELLINGS = ("kohya", "lycoris", "diffusers", "peft", "cloneofsimo")
WITH_MID = ("kohya", "lycoris")

MAX_FILES, MAX_LAYERS, MAX_RANK, MAX_TOKENS = 4, 3, 4, 2
MODELS = ("sd15", "sd15", "sd15", "sdxl")
EXACT_WEIGHTS = (1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 0.0)
NORMAL_WEIGHTS = (1.0, 0.7, -1.0, -0.3, 0.0, 1.5)
EXACT_DIAGONAL = (1.0, 0.0, -1.0, 2.0)
NORMAL_DIAGONAL = (1.0, 0.0, 2.5, -0.7, 3.0)
ALPHA_FORMS: tuple[Literal["0d", "1", "1x1"], ...] = ("0d", "1", "1x1")

Rank = int | None


def join_cases(
    values: tuple[Values, ...] = ("exact", "normal"), dtypes: tuple[DType, ...] = DTYPES
) -> SearchStrategy[Case]:
    """Joins of LoRA files in every family of names, with ranks and layers that differ from file to file."""
    ordered = sorted(dtypes, key=lambda dtype: dtype != "f32")
    return _cases(values, tuple(ordered))


@composite
def _cases(draw: DrawFn, values: tuple[Values, ...], dtypes: tuple[DType, ...]) -> Case:
    chosen, model = draw(sampled_from(values)), draw(sampled_from(MODELS))
    exact = chosen == "exact"
    count = draw(integers(1, MAX_FILES))
    # A rank for all modules of a file, or one drawn for each: only the first allows a number per rank.
    even = draw(sampled_from((True, True, False)))
    ranks: list[Rank] = [draw(integers(1, MAX_RANK)) if even else None for _ in range(count)]
    weights = [draw(sampled_from(EXACT_WEIGHTS if exact else NORMAL_WEIGHTS)) for _ in range(count)]
    pairs = zip(ranks, weights, strict=True)
    files = tuple(draw(_files(model, rank, weight if exact else None, dtypes)) for rank, weight in pairs)
    scale = draw(sampled_from((1.0, 1.0, 2.0, -1.0) if exact else (1.0, 0.7, -1.5)))
    known = [rank if file.modules else 0 for rank, file in zip(ranks, files, strict=True)]
    dtype = draw(sampled_from(dtypes))
    diagonal = draw(_diagonals(known, _numbers(chosen, dtype, scale, count)))
    base = Model(model, dtype)
    return Case(JoinCase(base, files, tuple(weights), diagonal, scale, chosen), draw(integers(0, 2**32 - 1)))


def _numbers(values: Values, dtype: DType, scale: float, files: int) -> tuple[float, ...]:
    """What a diagonal may hold: exact values only what the dtype keeps exact."""
    if values != "exact":
        return NORMAL_DIAGONAL
    if dtype in ("f32", "f64"):
        return (*EXACT_DIAGONAL, 2.5)
    return EXACT_DIAGONAL if abs(scale) == 1 and files < MAX_FILES else EXACT_DIAGONAL[:-1]


@composite
def _diagonals(draw: DrawFn, ranks: list[Rank], numbers: tuple[float, ...]) -> tuple[float, ...] | None:
    """None (all 1), a number per file, or one per rank."""
    sizes = [len(ranks), sum(rank or 0 for rank in ranks)] if None not in ranks else [len(ranks)]
    size = draw(sampled_from((*sizes, *sizes, 0)))
    return tuple(draw(sampled_from(numbers)) for _ in range(size)) if size else None


@composite
def _files(draw: DrawFn, model: str, rank: Rank, weight: float | None, dtypes: tuple[DType, ...]) -> AdapterFile:
    """One file; ``weight`` is that of an exact case. One in eight holds nothing but learned tokens."""
    spelling = draw(sampled_from(SPELLINGS[: 4 if model != "sd15" else 5]))
    only_tokens = draw(sampled_from((False,) * 7 + (True,)))
    # PEFT's names do not tell SDXL's two text encoders apart.
    part = draw(sampled_from(("unet.", "text_encoder."))) if model == "sd15" else "unet."
    pool = _named_by(spelling, model, part)
    names = [] if only_tokens else draw(st.lists(sampled_from(pool), min_size=1, max_size=MAX_LAYERS, unique=True))
    dtype = draw(sampled_from(dtypes))
    # Which factor shapes a layer has with a mid factor is up to each file.
    modules = {name: draw(_adapters(layer_of(model, name), spelling, rank, weight, dtype)) for name in names}
    tokens = draw(integers(1, MAX_TOKENS)) if only_tokens else draw(sampled_from((0, 0, 0, 1, 2)))
    return AdapterFile(spelling=spelling, modules=modules, tokens=tokens)


def _named_by(spelling: str, model: str, part: str) -> tuple[str, ...]:
    """The pool's layers that a family names; a PEFT file is of one part of the model."""
    if spelling == "cloneofsimo":
        return POSITIONAL
    return tuple(name for name in POOLS[model] if spelling != "peft" or name.startswith(part))


@composite
def _adapters(draw: DrawFn, layer: Layer, spelling: str, rank: Rank, weight: float | None, dtype: DType) -> Adapter:
    """A LoRA with or without alpha, a convolution's often with a mid factor, a 1×1's sometimes flat."""
    r = rank or draw(integers(1, MAX_RANK))
    mid = bool(layer.kernel) and spelling in WITH_MID and draw(st.booleans())
    flat = bool(layer.kernel) and not mid and set(layer.kernel) == {1} and draw(st.booleans())
    rest: dict[str, Any] = {"alpha": draw(_alphas(r, weight)), "dtype": dtype}
    return factors.lora(layer.out, layer.inp // layer.groups, r, layer.kernel, mid=mid, flat=flat, **rest)


@composite
def _alphas(draw: DrawFn, rank: int, weight: float | None) -> Alpha:
    if draw(sampled_from((True, False, False))):
        return Alpha()
    # With an exact weight of 1/2 the scale is 1 or 2, with 2 it is 1/2 or 1, else any of the three.
    size = abs(weight) if weight is not None else 0.0
    known = {0.5: (1.0, 2.0), 2.0: (0.5, 1.0)}.get(size, (1.0, 0.5, 2.0))
    scales = known if weight is not None else (1.0, 0.5, 2.0, 0.7 / rank, 0.1)
    return Alpha(draw(sampled_from(ALPHA_FORMS)), rank * draw(sampled_from(scales)), draw(sampled_from(("f32", "f16"))))


def layer_of(model: str, name: str) -> Layer:
    """The layer called ``name``, its part included (``unet.conv_in``)."""
    return _layers(model)[name]


@cache
def _layers(model: str) -> dict[str, Layer]:
    return {f"{row.part}.{row.name}": row.layer for row in load_table(model)}


def _named(weights: tuple[float, ...], diagonal: tuple[float, ...] | None, *files: AdapterFile, **rest: Any) -> Case:
    return Case(JoinCase(Model("sd15"), files, weights, diagonal, **rest), 1)


def _on(name: str, rank: int, mid: bool = False, **rest: Any) -> dict[str, Adapter]:
    layer = layer_of("sd15", name)
    return {name: factors.lora(layer.out, layer.inp, rank, layer.kernel, mid=mid, **rest)}


def named_joins() -> dict[str, Case]:
    """Joins that other tools fail on, by name."""
    query, conv, text, key, point, *_ = POOLS["sd15"]
    halves = Alpha("0d", 1.0)
    both = AdapterFile(modules=_on(query, 2, alpha=halves) | _on(conv, 2))
    return {
        "join/unequal-ranks": _named((1.0, 1.0), (1.0, 0.0), both, AdapterFile(modules=_on(query, 4) | _on(conv, 1))),
        "join/missing-module": _named(
            (0.7, -0.3), (0.0, 0.0, 2.5), both, AdapterFile(modules=_on(key, 1) | _on(query, 1))
        ),
        "join/unet-with-text-encoder": _named((1.0, 1.0), (0.5, 1.0), both, AdapterFile(modules=_on(text, 4))),
        "join/conv-diagonal": _named(
            (1.0, 1.0), (1.0, 0.0), AdapterFile(modules=_on(conv, 2) | _on(point, 2)), AdapterFile(modules=_on(conv, 3))
        ),
        "join/conv-mid": _named(
            (1.0, 0.5), (2.0, -1.0), AdapterFile(modules=_on(conv, 2, True)), AdapterFile(modules=_on(conv, 3, True))
        ),
        "join/conv-mid-with-plain": _named(
            (1.0, 0.5), (1.0, 3.0), AdapterFile(modules=_on(conv, 2, True)), AdapterFile(modules=_on(conv, 3))
        ),
        "join/conv-strided": _named(
            (1.0, 1.0), (1.0, 2.5), AdapterFile(modules=_on(STRIDED, 2)), AdapterFile(modules=_on(STRIDED, 1))
        ),
        "join/tokens-only": _named((1.0, 1.0), None, both, AdapterFile(tokens=2)),
        "join/scale-realised": _named((1.0, 1.0), (1.0, 1.0), both, both, scale=0.7),
        "join/negative-weight": _named((1.0, -1.0), (1.0, 1.0), both, both),
    }
