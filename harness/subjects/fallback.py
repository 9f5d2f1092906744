"""What ``runtime-lokr`` does with the adapters that its contractions do not cover, or only in part.

A diff is whole already, a DoRA's norm needs W + ΔW, and a LoHa may cost less whole than as a LoRA of rank
r²: the delta is made at each call in f32, cast once, applied by the layer's own operator, and freed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fulldiff.harness.subjects import factors, full_diff, loha
from fulldiff.harness.subjects.base import Adapter


class AnyBranch(Protocol):
    """What adds an adapter's part of the output."""

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """y += what the adapter makes of x, with x the layer's input and y its output."""


@dataclass(frozen=True)
class Whole:
    """Makes the delta at each call."""

    module: nn.Module
    adapter: Adapter

    def add_to(self, y: Tensor, x: Tensor) -> None:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        full_diff.add(total, weight, self.adapter)
        y.add_(full_diff.run(self.module, total.to(weight.dtype), None, x))


@dataclass(frozen=True)
class Bias:
    """Adds a bias delta, shaped to go along the channels."""

    delta: Tensor

    def add_to(self, y: Tensor, x: Tensor) -> None:
        y.add_(self.delta)


@dataclass(frozen=True)
class Rows:
    """A branch on some of the output channels, which lie along ``axis``."""

    branch: AnyBranch
    axis: int
    rows: slice

    def add_to(self, y: Tensor, x: Tensor) -> None:
        self.branch.add_to(y.narrow(self.axis, self.rows.start, self.rows.stop - self.rows.start), x)


def is_plain(adapter: Adapter) -> bool:
    """A LoRA or LoKr on all of its layer, and nothing beside its factors."""
    return (
        adapter.kind in ("lora", "lokr") and not adapter.rows and not {"dora_scale", "diff_b"} & adapter.tensors.keys()
    )


def branches(module: nn.Module, adapter: Adapter, make: Callable[[nn.Module, Adapter], AnyBranch]) -> list[AnyBranch]:
    """The adapter's branches; ``make`` makes that of a plain LoRA or LoKr."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if is_plain(adapter):
        return [make(module, adapter)]
    rows = factors.rows(adapter, weight)
    everything = adapter.rows is None or rows == slice(0, weight.shape[0])
    found: list[AnyBranch] = []
    if why_materialised(module, adapter):
        found.append(Whole(module, adapter))
    elif adapter.kind != "diff":
        branch = make(_rows_of(module, rows), _contractible(adapter, weight[rows]))
        found.append(branch if everything else Rows(branch, _axis(module), rows))
    if "diff_b" in adapter.tensors:
        bias = _bias(module, adapter)
        found.append(bias if everything else Rows(bias, _axis(module), rows))
    return found


def why_materialised(module: nn.Module, adapter: Adapter) -> str:
    """Why the adapter's delta is made whole; empty where it is not."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if "dora_scale" in adapter.tensors:
        return f"DoRA of a {adapter.kind}"
    if adapter.kind == "diff":
        return "diff" if "diff" in adapter.tensors else ""
    if adapter.rows and getattr(module, "groups", 1) > 1:
        return "a part of a grouped convolution"
    if adapter.kind == "loha" and not loha.is_cheaper(adapter, weight[factors.rows(adapter, weight)].shape):
        return "LoHa, cheaper whole than as a LoRA of its rank squared"
    return ""


def _contractible(adapter: Adapter, weight: Tensor) -> Adapter:
    if adapter.kind != "loha":
        return adapter
    return loha.as_lora(adapter, weight.shape, torch.promote_types(weight.dtype, torch.float32))


def _rows_of(module: nn.Module, rows: slice) -> nn.Module:
    """The module with those output channels only; it shares the weight."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    part = copy.copy(module)
    part._parameters = {"weight": nn.Parameter(weight[rows], requires_grad=False), "bias": None}
    return part


def _bias(module: nn.Module, adapter: Adapter) -> Bias:
    weight = module.weight
    assert isinstance(weight, Tensor)
    delta = adapter.tensors["diff_b"].to(torch.promote_types(weight.dtype, torch.float32)) * adapter.strength
    return Bias(delta.to(weight.dtype).reshape(-1, *[1] * (weight.dim() - 2)))


def _axis(module: nn.Module) -> int:
    """Where the output's channels are."""
    return -1 if isinstance(module, nn.Linear) else 1
