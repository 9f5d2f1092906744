"""Subject ``full-diff``: materialise ΔW in f32 at each call, add it to W, cast once, run the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter, Detach, Refused, Subject, replace_forward


class FullDiff(Subject):
    """W' lives for one layer's call only; nothing is cached."""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        for adapter in adapters:
            factors.check(adapter)
            factors.scale(adapter)
        weight = module.weight
        assert isinstance(weight, Tensor)
        return replace_forward(module, lambda x: run(module, merged(weight, adapters), x))


def run(module: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """The module's own computation with another weight."""
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, weight, module.bias)
    return module._conv_forward(x, weight, module.bias)  # type: ignore[operator, no-any-return]


def merged(weight: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """W + Σ scale · ΔW, summed in f32 (f64 for an f64 weight) and cast once to the weight's dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    active = [adapter for adapter in adapters if adapter.strength]
    if not active:
        return weight
    total = weight.detach().to(wide, copy=True)
    for adapter in active:
        total.add_(delta(adapter, weight.shape, wide), alpha=factors.scale(adapter))
    return total.to(weight.dtype)


def delta(adapter: Adapter, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """ΔW without scale, in ``shape`` (out, in / groups, *kernel) and ``dtype``."""
    t = {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()}
    product = _lora(t) if adapter.kind == "lora" else _lokr(t, shape)
    product = product.flatten(0, 1).flatten(1, 2) if adapter.kind == "lokr" else product
    if product.shape[0] != shape[0] or product.numel() != torch.Size(shape).numel():
        raise Refused(f"the factors give {tuple(product.shape)}, the weight is {tuple(shape)}")
    return product.reshape(tuple(shape))


def _lora(t: Mapping[str, Tensor]) -> Tensor:
    up, down = t["lora_up.weight"].flatten(1), t["lora_down.weight"]
    if "lora_mid.weight" in t:
        return torch.einsum("pm,mn...,nq->pq...", up, t["lora_mid.weight"], down.flatten(1))
    return up @ down.flatten(1)


def _lokr(t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    w1 = t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]
    if "lokr_w2" in t:
        w2 = t["lokr_w2"]
    elif "lokr_t2" in t:
        w2 = torch.einsum("mn...,mp,nq->pq...", t["lokr_t2"], t["lokr_w2_a"], t["lokr_w2_b"])
    else:
        w2 = t["lokr_w2_a"] @ t["lokr_w2_b"]
    vp, vq = factors.w2_sizes(t, shape)
    if w2.numel() != vp * vq * torch.Size(shape[2:]).numel():
        raise Refused(f"w2 gives {tuple(w2.shape)}, the weight {tuple(shape)} needs ({vp}, {vq}, …)")
    w2 = w2.reshape(1, vp, 1, vq, *shape[2:])
    return w1.reshape(w1.shape[0], 1, w1.shape[1], 1, *[1] * (len(shape) - 2)) * w2
