"""Adapter specs from their sizes: every LoRA, LoCon, LoKr, LoHa and diff form, as LyCORIS files store them.

Letters as in the LoKr papers and files: w1 (up, uq), w2 (vp, vq, *kernel), out = up·vp,
in / groups = uq·vq, r the rank. Use `dataclasses`-free `msgspec.structs.replace` to vary the rest.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from fulldiff.cases.model import Adapter, Layer, Shape, numel


def lora(
    out: int, inp: int, rank: int, kernel: Shape = (), *, mid: bool = False, flat: bool = False, **rest: Any
) -> Adapter:
    """LoRA (no kernel) or LoCon: down (r, in, *kernel), up (out, r, 1…); ``mid`` holds the kernel.

    ``inp`` is the layer's in / groups; ``flat`` stores a 1×1 convolution's factors as 2-D.
    """
    ones = () if flat else (1,) * len(kernel)
    down: Shape = (rank, inp, *(ones if mid or flat else kernel))
    factors: dict[str, Shape] = {"lora_up.weight": (out, rank, *ones), "lora_down.weight": down}
    if mid:
        factors["lora_mid.weight"] = (rank, rank, *kernel)
    return Adapter("lora", factors, **rest)


def lokr(
    w1: tuple[int, int],
    w2: tuple[int, int],
    kernel: Shape = (),
    *,
    w1_rank: int = 0,
    w2_rank: int = 0,
    tucker: bool = False,
    flat: bool = False,
    **rest: Any,
) -> Adapter:
    """LoKr with w1 (up, uq) and w2 (vp, vq, *kernel); a rank of 0 stores that factor whole.

    ``tucker`` gives w2 a core; ``flat`` stores a whole w2 of a 1×1 convolution as 2-D (kohya files).
    """
    (up, uq), (vp, vq) = w1, w2
    factors: dict[str, Shape]
    factors = {"lokr_w1_a": (up, w1_rank), "lokr_w1_b": (w1_rank, uq)} if w1_rank else {"lokr_w1": w1}
    if tucker:
        core = (w2_rank, w2_rank, *kernel)
        factors |= {"lokr_t2": core, "lokr_w2_a": (w2_rank, vp), "lokr_w2_b": (w2_rank, vq)}
    elif w2_rank:
        factors |= {"lokr_w2_a": (vp, w2_rank), "lokr_w2_b": (w2_rank, vq * numel(kernel))}
    else:
        factors["lokr_w2"] = w2 if flat else (*w2, *kernel)
    return Adapter("lokr", factors, **rest)


def loha(out: int, inp: int, rank: int, kernel: Shape = (), *, tucker: bool = False, **rest: Any) -> Adapter:
    """LoHa: two products of a (out, r) and b (r, inp·∏kernel), multiplied element by element.

    ``inp`` is the layer's in / groups; ``tucker`` gives each product a core (r, r, *kernel).
    """
    factors: dict[str, Shape] = {}
    for number in (1, 2):
        if tucker:
            factors[f"hada_t{number}"] = (rank, rank, *kernel)
        factors[f"hada_w{number}_a"] = (rank, out) if tucker else (out, rank)
        factors[f"hada_w{number}_b"] = (rank, inp if tucker else inp * numel(kernel))
    return Adapter("loha", factors, **rest)


def diff(shape: Shape, **rest: Any) -> Adapter:
    """The delta stored whole, in the weight's shape (2-D for a 1×1 convolution in some files)."""
    return Adapter("diff", {"diff": shape}, **rest)


def with_bias(adapter: Adapter, out: int) -> Adapter:
    """The adapter with a bias delta for its ``out`` rows."""
    return replace(adapter, factors={**adapter.factors, "diff_b": (out,)})


def dora(adapter: Adapter, magnitude: Shape) -> Adapter:
    """The adapter as a DoRA, with a magnitude of this shape: (out,), (out, 1, …) or (1, in, 1, …)."""
    return replace(adapter, factors={**adapter.factors, "dora_scale": magnitude})


def rank(adapter: Adapter) -> int | None:
    """The rank that alpha is divided by (w2's before w1's); None where alpha does not count."""
    if "scale" in adapter.factors:
        return None
    for name in ("lora_down.weight", "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if name in adapter.factors:
            return adapter.factors[name][0]
    return None


def transposed(adapter: Adapter) -> set[str]:
    """The factors stored (r, out): those beside a Tucker core, of a LoKr or LoHa."""
    beside = {"lokr_t2": "lokr_w2_a", "hada_t1": "hada_w1_a", "hada_t2": "hada_w2_a"}
    return {a for core, a in beside.items() if core in adapter.factors}


def dense(adapter: Adapter) -> set[str]:
    """The factors of a LoHa whose exact values are not sparse: a product of two sparse ones is all zero."""
    return {"hada_w1_b", "hada_t1"} | transposed(adapter) if adapter.kind == "loha" else set()


def factorization(size: int, factor: int) -> tuple[int, int]:
    """LyCORIS's split of a dimension: (small, large), the best divisor up to ``factor``."""
    best = max(d for d in range(1, factor + 1) if size % d == 0)
    return (min(best, size // best), max(best, size // best))


def lokr_for(layer: Layer, factor: int, w2_rank: int = 0, **rest: Any) -> Adapter:
    """The LoKr that a trainer makes for ``layer``: w1 full, w2 full or of rank ``w2_rank``."""
    up, vp = factorization(layer.out, factor)
    uq, vq = factorization(layer.inp // layer.groups, factor)
    return lokr((up, uq), (vp, vq), layer.kernel, w2_rank=w2_rank, **rest)
