"""Whether an adapter's factors have a product that fits a layer, from their shapes alone.

The rules are those of `fulldiff.reference.truth`, but stricter where a fit by chance would hide a file of
another layer: nothing is reshaped except a flat kernel and the sizes of 1 around a 1×1 convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fulldiff.cases.model import Shape, numel
from fulldiff.harness.files.names import KIND_FACTORS

Factors = Mapping[str, Shape]


def complaint(kind: str, factors: Factors, weight: Shape) -> str:
    """Why the factors do not fit a weight (out, in / groups, *kernel); empty where they do."""
    checks = (CHECKS[kind], magnitude, bias)
    return incomplete(kind, factors) or next((text for check in checks if (text := check(factors, weight))), "")


def incomplete(kind: str, factors: Factors) -> str:
    """What a module lacks or has twice."""
    present = [name for name in KIND_FACTORS[kind] if name in factors]
    if kind in ("lora", "loha"):
        needed = KIND_FACTORS[kind][: 2 if kind == "lora" else 4]
        if absent := [name for name in needed if name not in factors]:
            return f"orphan {' and '.join(present)}: its {' and '.join(absent)} is absent"
        cores = [name for name in present if name.startswith("hada_t")]
        return f"{cores[0]} without the other core" if len(cores) == 1 else ""
    return _lokr_incomplete(factors) if kind == "lokr" else ""


def _lokr_incomplete(factors: Factors) -> str:
    for whole in ("lokr_w1", "lokr_w2"):
        halves = [f"{whole}_{half}" for half in "ab"]
        absent = [half for half in halves if half not in factors]
        if whole in factors and len(absent) < 2:
            return f"{whole} is given both whole and factored"
        if whole not in factors and absent:
            return f"neither {whole} nor all of {' and '.join(halves)} is there"
    return "lokr_t2 with a whole lokr_w2" if {"lokr_t2", "lokr_w2"} <= factors.keys() else ""


def lora(factors: Factors, weight: Shape) -> str:
    """up (out, r[, 1…]) · [mid (r, r, *kernel)] · down (r, in[, *kernel])."""
    up, down, mid = (factors.get(name) for name in KIND_FACTORS["lora"])
    assert up is not None and down is not None
    if len(up) < 2 or len(down) < 2:
        return f"lora_up is {up} and lora_down {down}: each needs two axes"
    if mid is not None:
        sides = (up[1], up[0], *_unless_ones(up[2:])), (*down[:2], *_unless_ones(down[2:]))
        return _tucker("lora_mid", mid, *sides, weight)
    if up[1] != down[0] or up[1] == 0:
        return f"rank mismatch: lora_up is {up}, lora_down {down}"
    if numel(up[2:]) == 1 and up[0] == weight[0] and _places(down[1:], weight[1:]):
        return ""
    product = _transposed((up[0], *down[1:]), weight)
    return product or f"lora_up {up} · lora_down {down} does not give the layer's {weight}"


def lokr(factors: Factors, weight: Shape) -> str:
    """w1 (up, uq) ⊗ w2 (vp, vq, *kernel) with out = up·vp and in = uq·vq."""
    w1 = factors.get("lokr_w1") or _matrix("lokr_w1", factors)
    if isinstance(w1, str):
        return w1
    if len(w1) != 2 or 0 in w1 or weight[0] % w1[0] or weight[1] % w1[1]:
        return f"lokr_w1 is {w1}, which does not divide the layer's {weight}"
    sizes = (weight[0] // w1[0], weight[1] // w1[1], *weight[2:])
    if "lokr_t2" in factors:
        return _tucker("lokr_t2", factors["lokr_t2"], factors["lokr_w2_a"], factors["lokr_w2_b"], sizes)
    w2 = factors.get("lokr_w2") or _matrix("lokr_w2", factors)
    if isinstance(w2, str):
        return w2
    if len(w2) >= 2 and w2[0] == sizes[0] and _places(w2[1:], sizes[1:]):
        return ""
    product = (w1[0] * w2[0], w1[1] * numel(w2[1:2]), *w2[2:])
    return _transposed(product, weight) or f"lokr_w1 {w1} ⊗ lokr_w2 {w2} is {product}, the layer is {weight}"


def loha(factors: Factors, weight: Shape) -> str:
    """(w1_a · w1_b) ∘ (w2_a · w2_b), each in the weight's shape; with cores t1, t2 the kernel is there."""
    for half in ("1", "2"):
        a, b = factors[f"hada_w{half}_a"], factors[f"hada_w{half}_b"]
        if core := factors.get(f"hada_t{half}"):
            if text := _tucker(f"hada_t{half}", core, a, b, weight):
                return text
            continue
        product = _matrix(f"hada_w{half}", factors)
        if isinstance(product, str):
            return product
        if product[0] != weight[0] or not _places(product[1:], weight[1:]):
            return _transposed(product, weight) or f"hada_w{half} gives {product}, the layer is {weight}"
    return ""


def diff(factors: Factors, weight: Shape) -> str:
    """A whole ΔW in the weight's shape."""
    whole = factors.get("diff")
    if whole is None or (len(whole) > 1 and whole[0] == weight[0] and _places(whole[1:], weight[1:])):
        return ""
    return _transposed(whole, weight) or f"diff is {whole}, the layer is {weight}"


def bias(factors: Factors, weight: Shape) -> str:
    """A bias's difference (out,)."""
    found = factors.get("diff_b", weight[:1])
    return "" if found == weight[:1] else f"diff_b is {found}, the layer has {weight[0]} outputs"


def magnitude(factors: Factors, weight: Shape) -> str:
    """dora_scale (out, 1…), (1, in, 1…), or (out,) — (in,) only where the layer is not square."""
    shape = factors.get("dora_scale")
    if shape is None:
        return ""
    outer, inner = weight[0], weight[1]
    fits = (shape[:1] in ((outer,), (inner,))) if len(shape) == 1 else shape[:2] in ((outer, 1), (1, inner))
    return "" if fits and numel(shape[2:]) == 1 else f"dora_scale is {shape}, the layer is {weight}"


def _matrix(whole: str, factors: Factors) -> Shape | str:
    """The shape of ``whole``_a · ``whole``_b, or why there is none."""
    a, b = factors[f"{whole}_a"], factors[f"{whole}_b"]
    if len(a) != 2 or len(b) != 2 or a[1] != b[0]:
        return f"rank mismatch: {whole}_a is {a}, {whole}_b {b}"
    return (a[0], b[1])


def _tucker(name: str, core: Shape, a: Shape, b: Shape, weight: Shape) -> str:
    """a (r, out) · core (r, r, *kernel) · b (r, in)."""
    fits = (
        len(core) >= 2
        and core[:2] == (a[0], b[0])
        and a[1:2] == weight[:1]
        and b[1:2] == weight[1:2]
        and len(a) == len(b) == 2
        and _stripped(core[2:]) == _stripped(weight[2:])
    )
    return "" if fits else f"{name} {core} between {a} and {b} does not give the layer's {weight}"


def _places(found: Shape, wanted: Shape) -> bool:
    """Whether (in, *kernel) is there: equal, flat, or different only in sizes of 1 behind ``in``."""
    flat = len(found) == 1 and numel(found) == numel(wanted)
    return found == wanted or flat or (found[:1] == wanted[:1] and _stripped(found[1:]) == _stripped(wanted[1:]))


def _stripped(kernel: Shape) -> Shape:
    """A kernel of 1s is none; any other stands as it is, but for PEFT's trailing 1 behind one axis."""
    if numel(kernel) == 1:
        return ()
    return kernel[:1] if len(kernel) == 2 and kernel[1] == 1 else kernel


def _unless_ones(sizes: Shape) -> Shape:
    """Nothing where all sizes are 1."""
    return () if numel(sizes) == 1 else sizes


def _transposed(product: Shape, weight: Shape) -> str:
    """The complaint about a product that fits only when its two axes are swapped."""
    if weight[0] != weight[1] and product[:2] == (weight[1], weight[0]) and numel(product[2:]) == 1:
        return f"the product is {product[:2]}, (in, out) for the layer's {weight}: transposed, never reshaped"
    return ""


CHECKS: dict[str, Callable[[Factors, Shape], str]] = {"lora": lora, "lokr": lokr, "loha": loha, "diff": diff}
