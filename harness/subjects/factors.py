"""Reading an adapter's tensors, shared by our subjects: sizes, rank and scale, with named refusals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from fulldiff.harness.subjects.base import Adapter, Refused, Unsupported

# Beside the factors of any low-rank kind.
BESIDE = {"alpha", "dora_scale", "diff_b"}
KNOWN = {
    "lora": {"lora_up.weight", "lora_down.weight", "lora_mid.weight", "scale"} | BESIDE,
    "lokr": {f"lokr_{n}" for n in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")} | BESIDE,
    "loha": {f"hada_{n}" for n in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")} | BESIDE,
    "diff": {"diff", "diff_b", "alpha"},
}


def check(adapter: Adapter) -> None:
    """Refuse what would be silently ignored: unknown kinds and tensors nobody reads (w_norm, t1, …)."""
    if adapter.kind not in KNOWN:
        raise Unsupported(f"adapter kind {adapter.kind!r}: only {', '.join(sorted(KNOWN))} are applied")
    unknown = sorted(set(adapter.tensors) - KNOWN[adapter.kind])
    if unknown:
        raise Unsupported(f"{adapter.kind} with {', '.join(unknown)}: these tensors would be ignored")


def rank(t: Mapping[str, Tensor]) -> int | None:
    """The rank alpha is divided by: down's, w2's, else w1's; None when all factors are full."""
    for name in ("lora_down.weight", "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if name in t:
            return t[name].shape[0]
    return None


def scale(adapter: Adapter) -> float:
    """strength · alpha / rank: see `own_scale`."""
    return adapter.strength * own_scale(adapter)


def own_scale(adapter: Adapter) -> float:
    """alpha / rank, or a scale tensor; alpha counts only where a rank does, and is 1 per rank if missing."""
    alpha, r = adapter.tensors.get("alpha"), rank(adapter.tensors)
    if "scale" in adapter.tensors:
        return float(adapter.tensors["scale"].reshape(()))
    if alpha is None or r is None:
        return 1.0
    if alpha.numel() != 1:
        raise Refused(f"alpha has shape {tuple(alpha.shape)}: it must hold one number")
    value = float(alpha.reshape(()))
    if not math.isfinite(value):
        raise Refused(f"alpha is {value}: the scale alpha / {r} is no number; mend the file's alpha")
    return value / r


def rows(adapter: Adapter, weight: Tensor) -> slice:
    """The output rows that the adapter fills; refuses rows that the weight does not have."""
    start, end = adapter.rows or (0, weight.shape[0])
    if not 0 <= start < end <= weight.shape[0]:
        raise Refused(f"rows {start} to {end}: the weight has {weight.shape[0]}")
    return slice(start, end)


def magnitude(adapter: Adapter, shape: Sequence[int]) -> Tensor:
    """A DoRA's magnitude as (out, 1, …) or (1, in / groups, 1, …); 1-D on a square layer is per output row."""
    m, ones = adapter.tensors["dora_scale"], [1] * (len(shape) - 2)
    flat = m.dim() > 0 and m.shape[0] == m.numel()
    if flat and m.numel() == shape[0]:
        return m.reshape(-1, 1, *ones)
    if m.numel() == shape[1] and (flat or tuple(m.shape[:2]) == (1, shape[1])):
        return m.reshape(1, -1, *ones)
    raise Refused(f"dora_scale is {tuple(m.shape)}: neither rows nor inputs of a weight {tuple(shape)}")


def w1_sizes(t: Mapping[str, Tensor]) -> tuple[int, int]:
    """(up, uq); (1, 1) for a LoRA, which is a LoKr with a trivial w1."""
    if "lokr_w1" in t:
        return (t["lokr_w1"].shape[0], t["lokr_w1"].shape[1])
    if "lokr_w1_a" in t:
        return (t["lokr_w1_a"].shape[0], t["lokr_w1_b"].shape[1])
    return (1, 1)


def w2_sizes(t: Mapping[str, Tensor], weight_shape: Sequence[int]) -> tuple[int, int]:
    """(vp, vq) from the weight's (out, in / groups, …) and w1; refuses sizes that do not divide."""
    up, uq = w1_sizes(t)
    out, inp = weight_shape[0], weight_shape[1]
    if not up or not uq or out % up or inp % uq:
        raise Refused(f"w1 is {up}×{uq}, which does not divide the weight's {out}×{inp}")
    return out // up, inp // uq
