"""Subject ``planned``: per layer and number of tokens the cheaper of ``streamed`` and ``runtime-lokr``.

Runtime costs arithmetic for every token, streamed a pass over the weight whatever their number: few tokens,
low ranks and memory favour runtime, many tokens the scratch. The costs are predicted (see `costs`); where the
two predictions are close, both are tried once, on the first input of that shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fulldiff.harness.subjects import contraction, fallback
from fulldiff.harness.subjects.base import Adapter, Forward
from fulldiff.harness.subjects.costs import costs, is_faster
from fulldiff.harness.subjects.runtime_lokr import Branch, RuntimeLokr, plain_branches
from fulldiff.harness.subjects.stacked import Stacked
from fulldiff.harness.subjects.streamed import Streamed, is_fusible

# Streamed needs a scratch of the largest layer's size; above this many bytes the layer runs at runtime.
WORKSPACE_BUDGET = 256 << 20
# Predictions closer than this factor are tried. (At a factor of 2, of 124 of SDXL's layers on two vCPUs the prediction
# was wrong by over 3 % in 6 beyond it.)
CLOSE = 4.0

Key = tuple[str | int, ...]


class Planned(Stacked):
    """What neither way does without a ΔW is streamed, through one layer's."""

    def __init__(self) -> None:
        self.runtime, self.streamed = RuntimeLokr(), Streamed()
        # Whether runtime is the cheaper, by everything that the costs depend on: equal layers share it.
        self.chosen: dict[Key, bool] = {}

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        through = self.streamed.forward(module, adapters, base)
        if not all(is_fusible(adapter) or fallback.is_plain(adapter) for adapter in adapters if adapter.strength):
            return through
        direct = self.runtime.forward(module, adapters, base)
        branches = plain_branches(module, adapters)
        common = layer_key(module, adapters)

        def choose(x: Tensor) -> bool:
            predicted = time_over_streamed(module, branches, adapters, x)
            if not 1 / CLOSE < predicted < CLOSE:
                return predicted < 1
            # A scratch of its own, so that a try which streamed loses keeps no memory.
            tried = Streamed().forward(module, adapters, base)
            return is_faster(lambda: direct(x), lambda: tried(x))

        def forward(x: Tensor) -> Tensor:
            key = (*common, *x.shape)
            if key not in self.chosen:
                with torch.no_grad():
                    self.chosen[key] = choose(x)
            return direct(x) if self.chosen[key] else through(x)

        return forward


def layer_key(module: nn.Module, adapters: Sequence[Adapter]) -> Key:
    """Everything but the input that the costs depend on: the layer, and the factors' shapes."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    settings = [str(getattr(module, name, "")) for name in ("stride", "padding", "dilation", "groups")]
    factors = [f"{name} {tuple(t.shape)}" for a in adapters if a.strength for name, t in sorted(a.tensors.items())]
    return (str(weight.device), str(weight.dtype), str(tuple(weight.shape)), *settings, *factors)


def time_over_streamed(module: nn.Module, branches: Sequence[Branch], adapters: Sequence[Adapter], x: Tensor) -> float:
    """The predicted time of the branches over that of writing W'; 0 where W' needs too much memory."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.nbytes > WORKSPACE_BUDGET:
        return 0.0
    known = costs(weight.device, weight.dtype)
    ranks = [_rank(adapter) for adapter in adapters if adapter.strength]
    streamed = sum(known.streamed(weight, rank) for rank in ranks)
    return sum(_runtime(branch, x) for branch in branches) / max(streamed, 1e-12)


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
