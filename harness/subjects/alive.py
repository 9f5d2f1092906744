"""Subject ``full-diff-alive``: every layer's W' is made before the first layer runs, and lives to the end of the step.

What a depth-first graph builder does (stable-diffusion.cpp's master before "Optimise LoKr at runtime"): the
memory of all ΔW at once, at every step anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fulldiff.harness.subjects import full_diff
from fulldiff.harness.subjects.base import Adapter, Detach, Forward
from fulldiff.harness.subjects.stacked import Stacked


class FullDiffAlive(Stacked):
    """On a single layer the same as ``full-diff``; on a model W' of all layers are alive together."""

    def __init__(self) -> None:
        self.step: dict[nn.Module, Tensor] = {}

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        full_diff.check(adapters)
        weight = module.weight
        assert isinstance(weight, Tensor)

        def forward(x: Tensor) -> Tensor:
            changed = self.step.get(module)
            if changed is None:
                changed = full_diff.merged(weight, adapters)
            return full_diff.run(module, changed, full_diff.merged_bias(module, adapters), x)

        return forward

    def attach_model(self, model: nn.Module, adapters: Mapping[str, Sequence[Adapter]]) -> Detach:
        modules = {name: model.get_submodule(name) for name in adapters}
        detach = super().attach_model(model, adapters)

        def build(*_: object) -> None:
            with torch.no_grad():
                for name, module in modules.items():
                    weight = module.weight
                    assert isinstance(weight, Tensor)
                    self.step[module] = full_diff.merged(weight, adapters[name])

        hooks = [
            model.register_forward_pre_hook(build),
            model.register_forward_hook(lambda *_: self.step.clear(), always_call=True),
        ]

        def remove() -> None:
            for hook in hooks:
                hook.remove()
            detach()

        return remove
