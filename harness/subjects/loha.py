"""A LoHa as a LoRA of rank r², exactly, where that takes fewer operations than its diff.

(a₁·b₁) ∘ (a₂·b₂) = A·B with A[o, (m, n)] = a₁[o, m]·a₂[o, n] and B[(m, n), i] = b₁[m, i]·b₂[n, i] (the
row-wise and column-wise Khatri-Rao products). With Tucker cores the core of rank r² is their product too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter


def is_cheaper(adapter: Adapter, shape: Sequence[int]) -> bool:
    """Whether the LoRA of rank r² costs less per position than a weight of this ``shape``, whatever their number."""
    t = adapter.tensors
    r = t["hada_w1_b"].shape[0] * t["hada_w2_b"].shape[0]
    kernel = torch.Size(shape[2:]).numel()
    core = r * r * kernel + r * shape[1] if "hada_t1" in t else r * shape[1] * kernel
    return core + r * shape[0] < shape[0] * shape[1] * kernel


def as_lora(adapter: Adapter, shape: Sequence[int], dtype: torch.dtype) -> Adapter:
    """The same delta from up (out, r²), down (r², in / groups, *kernel) and, of a Tucker LoHa, a mid."""
    t = {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()}
    a = (t["hada_w1_a"], t["hada_w2_a"])
    ones = (1,) * (len(shape) - 2)
    lora: dict[str, Tensor] = {}
    if "hada_t1" in t:
        a = (a[0].T, a[1].T)
        lora["lora_mid.weight"] = _pairs(t["hada_t1"], t["hada_t2"])
    up = torch.einsum("om,on->omn", *a).flatten(1)
    down = torch.einsum("mi,ni->mni", t["hada_w1_b"], t["hada_w2_b"]).flatten(0, 1)
    lora["lora_up.weight"] = up.reshape(*up.shape, *ones)
    lora["lora_down.weight"] = down.reshape(len(down), shape[1], *(ones if "hada_t1" in t else shape[2:]))
    return Adapter("lora", lora, factors.scale(adapter), adapter.rows)


def _pairs(one: Tensor, two: Tensor) -> Tensor:
    """(r², r², *kernel) with [(m, m'), (n, n')] = one[m, n]·two[m', n'] at each kernel position."""
    return torch.einsum("mn...,pq...->mpnq...", one, two).flatten(2, 3).flatten(0, 1)
