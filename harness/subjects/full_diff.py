"""Subject ``full-diff``: materialise ΔW in f32 at each call, add it to W, cast once, run the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter, Forward, Refused
from fulldiff.harness.subjects.stacked import Stacked


class FullDiff(Stacked):
    """W' lives for one layer's call only; nothing is cached."""

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        check(adapters)
        weight = module.weight
        assert isinstance(weight, Tensor)

        def forward(x: Tensor) -> Tensor:
            return run(module, merged(weight, adapters), merged_bias(module, adapters), x)

        return forward


def check(adapters: Sequence[Adapter]) -> None:
    """Refuse now what a call would stumble over."""
    for adapter in adapters:
        factors.check(adapter)
        factors.scale(adapter)


def run(module: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """The module's own computation with another weight and bias."""
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    return module._conv_forward(x, weight, bias)  # type: ignore[operator, no-any-return]


def merged(weight: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """W + Σ scale · ΔW, summed in f32 (f64 for an f64 weight) and cast once to the weight's dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    active = [adapter for adapter in adapters if adapter.strength]
    if not active:
        return weight
    total = weight.detach().to(wide, copy=True)
    for adapter in active:
        add(total, weight, adapter)
    return total.to(weight.dtype)


def add(total: Tensor, weight: Tensor, adapter: Adapter) -> None:
    """Add the adapter's delta to its rows of ``total``; a DoRA's is taken from the base ``weight``."""
    rows = factors.rows(adapter, weight)
    part, base = total[rows], weight[rows]
    if "dora_scale" in adapter.tensors:
        part.add_(decomposed(adapter, base, total.dtype) - base, alpha=adapter.strength)
    elif adapter.tensors.keys() & factors.KNOWN[adapter.kind] - {"alpha", "diff_b"}:
        part.add_(delta(adapter, base.shape, total.dtype), alpha=factors.scale(adapter))


def decomposed(adapter: Adapter, base: Tensor, dtype: torch.dtype) -> Tensor:
    """W' = m · V / ‖V‖ with V = W + scale · ΔW, 0 where ‖V‖ is."""
    moved = base.to(dtype, copy=True).add_(delta(adapter, base.shape, dtype), alpha=factors.own_scale(adapter))
    m = factors.magnitude(adapter, base.shape).to(dtype)
    over = [dim for dim, size in enumerate(m.shape) if size == 1]
    norm = torch.linalg.vector_norm(moved, dim=over, keepdim=True)
    return moved.mul_((m / norm).masked_fill_(norm == 0, 0.0))


def merged_bias(module: nn.Module, adapters: Sequence[Adapter]) -> Tensor | None:
    """The bias plus Σ strength · diff_b, cast once; a layer without one has one then."""
    bias, weight = module.bias, module.weight
    assert isinstance(weight, Tensor) and not isinstance(bias, nn.Module)
    active = [adapter for adapter in adapters if adapter.strength and "diff_b" in adapter.tensors]
    if not active:
        return bias
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = weight.new_zeros(weight.shape[0], dtype=wide) if bias is None else bias.detach().to(wide, copy=True)
    for adapter in active:
        total[factors.rows(adapter, weight)].add_(adapter.tensors["diff_b"].to(wide), alpha=adapter.strength)
    return total.to(weight.dtype)


def delta(adapter: Adapter, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """ΔW without scale, in ``shape`` (out, in / groups, *kernel) and ``dtype``."""
    t = {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()}
    product = {"lora": _lora, "lokr": _lokr, "loha": _loha, "diff": _diff}[adapter.kind](t, shape)
    if product.shape[0] != shape[0] or product.numel() != torch.Size(shape).numel():
        raise Refused(f"the factors give {tuple(product.shape)}, the weight is {tuple(shape)}")
    return product.reshape(tuple(shape))


def _diff(t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    return t["diff"]


def _loha(t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    return _hada(t, "1").mul_(_hada(t, "2"))


def _hada(t: Mapping[str, Tensor], number: str) -> Tensor:
    """One of a LoHa's two products."""
    a, b = t[f"hada_w{number}_a"], t[f"hada_w{number}_b"]
    if f"hada_t{number}" in t:
        return torch.einsum("mn...,mp,nq->pq...", t[f"hada_t{number}"], a, b)
    return a @ b


def _lora(t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
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
    blocks = w1.reshape(w1.shape[0], 1, w1.shape[1], 1, *[1] * (len(shape) - 2)) * w2
    return blocks.flatten(0, 1).flatten(1, 2)
