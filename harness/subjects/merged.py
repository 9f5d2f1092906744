"""Subject ``merged``: ΔW added to the base weight in place, the base restored from a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulldiff.harness.subjects import full_diff
from fulldiff.harness.subjects.base import Adapter, Forward
from fulldiff.harness.subjects.stacked import Stack, Stacked


class Merged(Stacked):
    """Costs nothing per call, and the bytes of every adapted weight twice. W + Σ ΔW is cast once."""

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        return base

    def change(self, module: nn.Module, stack: Stack) -> None:
        full_diff.check(stack.adapters)
        if not isinstance(stack.kept, Copy):
            stack.kept = Copy.of(module)
        stack.kept.put_back(module)
        if not stack.attached:
            super().change(module, stack)
            return
        weight, moved = (
            full_diff.merged(stack.kept.weight, stack.adapters),
            full_diff.merged_bias(module, stack.adapters),
        )
        assert isinstance(module.weight, Tensor)
        with torch.no_grad():
            module.weight.copy_(weight)
        set_bias(module, moved)


@dataclass(frozen=True)
class Copy:
    """The base's weight and bias. Subtracting ΔW again would not give them back: the sum was rounded."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(module: nn.Module) -> Copy:
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor) and not isinstance(bias, nn.Module)
        return Copy(weight.detach().clone(), None if bias is None else bias.detach().clone())

    def put_back(self, module: nn.Module) -> None:
        """Make the module's weight and bias those of the copy, bit for bit."""
        assert isinstance(module.weight, Tensor)
        with torch.no_grad():
            module.weight.copy_(self.weight)
        set_bias(module, self.bias)


def set_bias(module: nn.Module, values: Tensor | None) -> None:
    """Give the module a bias with a copy of these values, or none."""
    made = None if values is None else nn.Parameter(values.detach().clone(), requires_grad=False)
    module.register_parameter("bias", made)
