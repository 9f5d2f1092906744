"""Subject ``streamed``: the full diff through ONE scratch buffer that all layers share.

W' = W + scale · ΔW is written into the scratch in a single pass over the weight — addcmul on the Kronecker
view of a LoKr, addmm for a LoRA — and the layer runs from there. No ΔW is ever stored, whatever the number
of layers; the buffer has the size of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fulldiff.harness.subjects import factors, full_diff
from fulldiff.harness.subjects.base import Adapter, Forward, Refused
from fulldiff.harness.subjects.stacked import Stacked

# A diff of these kinds, with nothing beside its factors, needs no ΔW of its own.
FUSED = ("lora", "lokr")


class Streamed(Stacked):
    """Every kind that ``full-diff`` does; what cannot be fused goes through a ΔW of one layer."""

    def __init__(self) -> None:
        self.scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        full_diff.check(adapters)
        weight = module.weight
        assert isinstance(weight, Tensor)
        active = [adapter for adapter in adapters if adapter.strength]
        if not active:
            return base
        parts = [Fused(adapter, weight) if is_fusible(adapter) else None for adapter in active]

        def forward(x: Tensor) -> Tensor:
            with torch.no_grad():
                changed = self.room(weight)
                start = weight
                for adapter, part in zip(active, parts, strict=True):
                    if part is None:
                        _add_whole(changed, start, weight, adapter)
                    else:
                        part.write(changed, start)
                    start = changed
            return full_diff.run(module, changed, full_diff.merged_bias(module, active), x)

        return forward

    def room(self, weight: Tensor) -> Tensor:
        """The scratch in the weight's shape; it grows to the largest layer seen and is not given back."""
        key = (weight.device, weight.dtype)
        if key not in self.scratch or self.scratch[key].numel() < weight.numel():
            self.scratch[key] = torch.empty(weight.numel(), dtype=weight.dtype, device=weight.device)
        return self.scratch[key][: weight.numel()].view(weight.shape)


def is_fusible(adapter: Adapter) -> bool:
    """A LoRA or LoKr without a Tucker core on all of its layer, with no magnitude."""
    cores = {"lora_mid.weight", "lokr_t2", "dora_scale"}
    return adapter.kind in FUSED and not adapter.rows and not cores & adapter.tensors.keys()


class Fused:
    """One adapter's factors in the layer's dtype, ready to be multiplied into the scratch."""

    def __init__(self, adapter: Adapter, weight: Tensor) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        t = {name: tensor.detach().to(wide) for name, tensor in adapter.tensors.items() if name != "alpha"}
        self.scale = factors.scale(adapter)
        if adapter.kind == "lora":
            self.up, self.down = (t[n].flatten(1).to(weight.dtype) for n in ("lora_up.weight", "lora_down.weight"))
            self.view: tuple[int, ...] = ()
        else:
            self.up, self.down, self.view = self._kronecker(t, weight)

    def _kronecker(self, t: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """w1 (up, 1, uq, 1, 1) and w2 (1, vp, 1, vq, ∏kernel), and the weight's view between them."""
        vp, vq = factors.w2_sizes(t, weight.shape)
        w1 = t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]
        w2 = t["lokr_w2"] if "lokr_w2" in t else t["lokr_w2_a"] @ t["lokr_w2_b"]
        up, uq = w1.shape
        kernel = weight[0, 0].numel()
        if w2.numel() != vp * vq * kernel:
            raise Refused(f"w2 gives {tuple(w2.shape)}, the weight {tuple(weight.shape)} needs ({vp}, {vq}, …)")
        one, two = w1.reshape(up, 1, uq, 1, 1), w2.reshape(1, vp, 1, vq, kernel)
        return one.to(weight.dtype), two.to(weight.dtype), (up, vp, uq, vq, kernel)

    def write(self, changed: Tensor, start: Tensor) -> None:
        """changed = start + scale · ΔW; the two may be one tensor."""
        if self.view:
            torch.addcmul(start.view(self.view), self.up, self.down, value=self.scale, out=changed.view(self.view))
        else:
            out = changed.view(changed.shape[0], -1)
            torch.addmm(start.reshape(out.shape), self.up, self.down, alpha=self.scale, out=out)


def _add_whole(changed: Tensor, start: Tensor, weight: Tensor, adapter: Adapter) -> None:
    """changed = start + the adapter's delta, made whole."""
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    full_diff.add(total, weight, adapter)
    torch.add(start, total.to(weight.dtype), out=changed)
