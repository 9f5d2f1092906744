"""Subject ``planned``: per layer and number of tokens the cheaper of ``streamed`` and ``runtime-lokr``.

Runtime costs arithmetic for every token, streamed a pass over the weight whatever their number: few tokens,
low ranks and memory favour runtime, many tokens the scratch. The costs are predicted (see `costs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from fulldiff.harness.subjects import contraction, fallback
from fulldiff.harness.subjects.base import Adapter, Forward
from fulldiff.harness.subjects.costs import costs
from fulldiff.harness.subjects.runtime_lokr import Branch, RuntimeLokr, plain_branches
from fulldiff.harness.subjects.stacked import Stacked
from fulldiff.harness.subjects.streamed import Streamed, is_fusible

# Streamed needs a scratch of the largest layer's size; above this many bytes the layer runs at runtime.
WORKSPACE_BUDGET = 256 << 20


class Planned(Stacked):
    """What neither way does without a ΔW is streamed, through one layer's."""

    def __init__(self) -> None:
        self.runtime, self.streamed = RuntimeLokr(), Streamed()

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        through = self.streamed.forward(module, adapters, base)
        if not all(is_fusible(adapter) or fallback.is_plain(adapter) for adapter in adapters if adapter.strength):
            return through
        direct = self.runtime.forward(module, adapters, base)
        branches = plain_branches(module, adapters)
        chosen: dict[tuple[int, ...], Forward] = {}

        def forward(x: Tensor) -> Tensor:
            key = tuple(x.shape)
            if key not in chosen:
                chosen[key] = direct if is_runtime_cheaper(module, branches, adapters, x) else through
            return chosen[key](x)

        return forward


def is_runtime_cheaper(module: nn.Module, branches: Sequence[Branch], adapters: Sequence[Adapter], x: Tensor) -> bool:
    """Whether the branches are predicted to take less time than writing W', or W' needs too much memory."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.nbytes > WORKSPACE_BUDGET:
        return True
    known = costs(weight.device, weight.dtype)
    ranks = [_rank(adapter) for adapter in adapters if adapter.strength]
    streamed = sum(known.streamed(weight, rank) for rank in ranks)
    return sum(_runtime(branch, x) for branch in branches) < streamed


def _rank(adapter: Adapter) -> int | None:
    down = adapter.tensors.get("lora_down.weight")
    return None if down is None else down.shape[0]


def _runtime(branch: Branch, x: Tensor) -> float:
    """The predicted seconds of one branch on x."""
    module = branch.module
    known = costs(module.weight.device, module.weight.dtype)
    if isinstance(module, nn.Linear):
        shape = contraction.Shape(branch.w1[1], branch.w2[1])
        return known.runtime(branch.plan().steps, shape, x.numel() // max(1, x.shape[-1]))
    sizes = math.prod(x.shape[2:]), math.prod(_output_sizes(module, x))
    shape = contraction.Shape(branch.w1[1], branch.w2[1], *sizes)
    return module.groups * known.runtime(branch.plan(*sizes).steps, shape, x.shape[0])


def _output_sizes(module: nn.Module, x: Tensor) -> list[int]:
    """The spatial sizes of a convolution's output."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if isinstance(module.padding, str):
        return list(x.shape[2:])
    axes = zip(x.shape[2:], module.kernel_size, module.stride, module.padding, module.dilation, strict=True)
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in axes]
