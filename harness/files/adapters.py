"""From one module of a file and its layer to adapters: kinds, shapes, dtype and alpha, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Literal

from fulldiff.cases.model import Adapter, Alpha, FactorDType, FileRef, Shape
from fulldiff.harness.files.base import Place
from fulldiff.harness.files.container import Header
from fulldiff.harness.files.fit import complaint
from fulldiff.harness.files.metadata import PEFT_FAMILIES, Declared
from fulldiff.harness.files.modules import Module
from fulldiff.harness.files.names import KIND_FACTORS
from fulldiff.harness.files.positions import CLASSES

AlphaSource = Literal["tensor", "metadata", "assumed"]
DTYPES: dict[str, FactorDType] = {
    "F8_E4M3": "f8_e4m3",
    "F8_E5M2": "f8_e5m2",
    "BF16": "bf16",
    "F16": "f16",
    "F32": "f32",
    "F64": "f64",
}
# From the narrowest; a mixture is as wide as its widest, and f16 with bf16 needs f32 to hold both.
WIDTHS = {"f8_e4m3": 8, "f8_e5m2": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
ALPHA_SHAPES = ((), (1,), (1, 1))
# Numbers that stand beside the factors, and what may stand beside those of any kind.
NUMBERS = ("alpha", "scale")
EXTRAS = (*NUMBERS, "dora_scale", "diff_b")
RANKS = ("lora_down.weight", "lokr_w2_b", "lokr_w1_b", "hada_w1_b")


class Refusal(ValueError):
    """Why a module is not applied."""


def adapters(module: Module, place: Place, header: Header, declared: Declared) -> Iterator[tuple[Adapter, AlphaSource]]:
    """The adapters of one module on its layer, and where each has its alpha from.

    A product and a whole difference under one name are two adapters; a bias's difference goes with the first.

    Raises:
        Refusal: one of them does not fit; then none is to be used.
    """
    check_magnitude(module, declared)
    products = [kind for kind in module.kinds if kind != "diff"]
    shared = [factor for factor in EXTRAS if factor in module.tensors]
    if len(products) > 1 and shared:
        raise Refusal(f"{' and '.join(products)} factors share one name: which of them {shared[0]} means is unknown")
    alone = ["diff"] if "diff" in module.tensors or not products else []
    for kind in (*products, *alone):
        extras = EXTRAS if kind == (*products, *alone)[0] else ()
        own = [factor for factor in KIND_FACTORS[kind] if factor != "diff_b"]
        names = {factor: name for factor, name in module.tensors.items() if factor in (*own, *extras)}
        yield adapter(kind, names, module, place, header, declared)


def adapter(
    kind: str, names: Mapping[str, str], module: Module, place: Place, header: Header, declared: Declared
) -> tuple[Adapter, AlphaSource]:
    """One adapter from its tensors' names by canonical factor."""
    factors = {factor: header.tensors[name].shape for factor, name in names.items() if factor not in NUMBERS}
    magnitude = factors.get("dora_scale", ())
    if module.family in PEFT_FAMILIES and len(magnitude) > 2 and magnitude[0] == 1:
        # On a layer with as many inputs as outputs it would pass for a magnitude per input.
        raise Refusal(
            f"{names['dora_scale']} is {magnitude}: PEFT's magnitude of a convolution, transposed, is not read"
        )
    if reason := complaint(kind, factors, adapted_shape(place)):
        raise Refusal(f"{reason} ({place.name})")
    alpha, source = alpha_of(kind, names, factors, module, header, declared)
    made = Adapter(
        kind,
        factors,
        alpha,
        dtype=dtype_of([names[factor] for factor in factors], header),
        spelling=module.family,
        source=FileRef(str(header.path.resolve()), dict(names)),
        rows=place.span,
    )
    return made, source


def adapted_shape(place: Place) -> Shape:
    """The weight that the factors' product must have: the layer's, or that of its span of rows."""
    whole = place.layer.weight_shape
    return whole if place.span is None else (place.span[1] - place.span[0], *whole[1:])


def check_magnitude(module: Module, declared: Declared) -> None:
    """DoRA is a product and a magnitude: neither alone is used. ``scale`` means something for LoRA only."""
    if "scale" in module.tensors and "lora" not in module.kinds:
        raise Refusal(f"{module.tensors['scale']}: only a LoRA's scale has a known meaning; write alpha instead")
    if set(module.kinds) <= {"diff"}:
        if "dora_scale" in module.tensors:
            raise Refusal("a DoRA magnitude without the low-rank product that it scales")
    elif "dora_scale" not in module.tensors and declared.dora_for(module.family, module.name):
        raise Refusal("the metadata says DoRA, and its magnitude is absent: not run as a plain adapter")


def alpha_of(
    kind: str,
    names: Mapping[str, str],
    factors: Mapping[str, Shape],
    module: Module,
    header: Header,
    declared: Declared,
) -> tuple[Alpha, AlphaSource]:
    """The alpha to use beside the file's tensors, absent where one of them is it."""
    stored = [names[factor] for factor in NUMBERS if factor in names]
    for name in stored:
        info = header.tensors[name]
        if info.shape not in ALPHA_SHAPES or info.dtype == "BOOL":
            raise Refusal(f"{name} is {info.dtype} {info.shape}: it should be one number")
    if stored:
        return Alpha(), "tensor"
    rank = next((factors[factor][0] for factor in RANKS if factor in factors), None)
    if kind == "lokr" and rank is None and module.family in PEFT_FAMILIES:
        check_whole(module, declared)
    said = None if kind == "diff" else declared.alpha_for(module.family, module.name, rank)
    return (Alpha(), "assumed") if said is None else (Alpha("0d", said, "f64"), "metadata")


def check_whole(module: Module, declared: Declared) -> None:
    """PEFT scales two whole factors too, by its config's alpha / r; anywhere else their scale is 1."""
    scale = declared.alpha_for(module.family, module.name, 1)
    if scale not in (None, 1):
        raise Refusal(
            f"{module.everything[0]}: the PEFT config scales its two whole factors by alpha / r = {scale:g}, which no "
            f"tensor says; multiply lokr_w1 by {scale:g} and set alpha to r in the config"
        )


def dtype_of(names: list[str], header: Header) -> FactorDType:
    """The widest dtype among the factors."""
    found: set[FactorDType] = set()
    for name in names:
        dtype = header.tensors[name].dtype
        if dtype not in DTYPES:
            raise Refusal(f"{name} is stored as {dtype}: convert it to one of {', '.join(DTYPES)}")
        found.add(DTYPES[dtype])
    return "f32" if {"f16", "bf16"} <= found <= {"f16", "bf16"} else max(found, key=lambda dtype: WIDTHS[dtype])


def check_positions(module: Module, header: Header) -> None:
    """A positional name counts modules of the classes that the metadata lists: only known ones have an order."""
    part = module.name.partition(":")[0]
    text = header.metadata.get(part)
    try:
        classes = CLASSES[part] if text is None else frozenset(json.loads(text))
    except (ValueError, TypeError):
        classes = frozenset()
    if classes != CLASSES[part]:
        raise Refusal(f"its position counts modules of {text}; only the order of {sorted(CLASSES[part])} is known")
