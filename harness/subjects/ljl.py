"""Subject ``ljl``: several LoRAs on one layer run as a single one of rank Σr, with a diagonal between its factors.

y += up · diag(v) · (mid ·) down · x. The scale of each LoRA is folded into one of its factors when attached; the
diagonal is a vector that may change between calls: nothing else is built anew. See `joined_model` for whole models.

For many tokens it takes fewer FLOPs to write W + up · diag(v) · down into a scratch that all layers share, at each
call, and to run the layer from there. Which is the faster is tried on the first input of each shape. A base
narrower than f32 would round the joined delta away (as any merge into it does): there it is never written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fulldiff.harness.files import stitching
from fulldiff.harness.files.joining import DOWN, MID, UP
from fulldiff.harness.subjects import factors, full_diff
from fulldiff.harness.subjects.base import Adapter, Detach, Forward, Unsupported, replace_forward
from fulldiff.harness.subjects.convolution import CONVOLUTIONS, convolve
from fulldiff.harness.subjects.costs import is_faster
from fulldiff.harness.subjects.planned import WORKSPACE_BUDGET, Key, layer_key
from fulldiff.harness.subjects.stacked import Stacked
from fulldiff.harness.subjects.streamed import Streamed

NOT_JOINED = ("dora_scale", "diff_b")
WIDE = (torch.float32, torch.float64)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Of two ways that both take fewer multiplications none is tried: the one that takes the fewest is taken.
FEW = 1 << 22


@dataclass
class Shared:
    """What a model's branches share: the scratch for W', and where writing it is the faster way."""

    streamed: Streamed = field(default_factory=Streamed)
    faster: dict[Key, bool] = field(default_factory=dict)


class Ljl(Stacked):
    """LoRA and LoCon, with or without a core, on Linear and Conv layers."""

    def __init__(self) -> None:
        self.shared = Shared()

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        for adapter in adapters:
            _check(module, adapter)
        active = [adapter for adapter in adapters if adapter.strength]
        return Branch(module, joined(module, active), self.shared).over(base) if active else base


def _check(module: nn.Module, adapter: Adapter) -> None:
    if not isinstance(module, LAYERS):
        raise Unsupported(f"layer {type(module).__name__}: only Linear and Conv1d to Conv3d")
    factors.check(adapter)
    if adapter.kind != "lora":
        raise Unsupported(f"a {adapter.kind} has no rank to join by: only LoRAs are joined")
    if beside := [name for name in NOT_JOINED if name in adapter.tensors]:
        raise Unsupported(f"a LoRA with {', '.join(beside)} is no plain sum of ranks")


def joined(module: nn.Module, adapters: Sequence[Adapter]) -> dict[str, Tensor]:
    """The adapters' factors as one LoRA's, in the layer's dtype, scales folded in."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    core = all(MID in adapter.tensors for adapter in adapters)
    triples = [_triple(adapter, weight, core) for adapter in adapters]
    stacked = stitching.stack(triples, weight.shape)
    return {name: tensor.to(weight.device, weight.dtype) for name, tensor in stacked.items()}


def _triple(adapter: Adapter, weight: Tensor, core: bool) -> stitching.Triple:
    """One adapter's factors in float64, with rows of zeros where it adapts a part of the layer."""
    rows = factors.rows(adapter, weight)
    t = {name: tensor.detach().double() for name, tensor in adapter.tensors.items()}
    part = stitching.fold(t, factors.scale(adapter), (rows.stop - rows.start, *weight.shape[1:]), core, weight.dtype)
    up = part.up.new_zeros(weight.shape[0], part.up.shape[1])
    up[rows] = part.up
    return stitching.Triple(up, part.mid, part.down)


class Branch:
    """One joined LoRA on one layer, ready to run. ``diagonal`` (Σr,) may be written to at any time."""

    def __init__(
        self, module: nn.Module, t: Mapping[str, Tensor], shared: Shared, diagonal: Tensor | None = None
    ) -> None:
        self.module, self.shared = module, shared
        self.up = t[UP].flatten(1).contiguous()
        self.down, self.mid = t[DOWN].contiguous(), t.get(MID)
        self.diagonal = diagonal

    def attach(self) -> Detach:
        """Make the layer compute with the branch; the undo."""
        return replace_forward(self.module, self.over(self.module.forward))

    def over(self, base: Forward) -> Forward:
        """The forward of the base plus the branch. Another ``base`` than the layer's own is always called."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        own = "forward" not in vars(self.module) and type(self.module).forward in [kind.forward for kind in LAYERS]
        writable = own and self.mid is None and weight.dtype in WIDE and weight.nbytes <= WORKSPACE_BUDGET

        def direct(x: Tensor) -> Tensor:
            y = base(x)
            self.add_to(y, x)
            return y

        def forward(x: Tensor) -> Tensor:
            trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
            if writable and not trains and self._is_written(weight, x, direct):
                return self._from(self.shared.streamed.room(weight), weight, x)
            return direct(x)

        return forward

    def _is_written(self, weight: Tensor, x: Tensor, direct: Forward) -> bool:
        """Whether writing W' is the faster way for such an input; equal layers share the answer."""
        factors_only, with_weight = self._multiplications(x)
        if max(factors_only, with_weight) < FEW:
            return with_weight < factors_only
        key = (*layer_key(self.module, ()), *self.down.shape, *x.shape)
        if key not in self.shared.faster:
            # A scratch of its own, so that a try which is lost keeps no memory.
            room = Streamed().room(weight)
            with torch.no_grad():
                self.shared.faster[key] = is_faster(lambda: self._from(room, weight, x), lambda: direct(x))
        return self.shared.faster[key]

    def _multiplications(self, x: Tensor) -> tuple[int, int]:
        """Of up · down · x for all tokens or output positions, and of up · down alone."""
        module, rank = self.module, self.up.shape[1]
        groups, stride = (getattr(module, name, 1) for name in ("groups", "stride"))
        channels = self.down.shape[1] * groups
        outputs = x.numel() // max(1, channels * math.prod(stride if isinstance(stride, tuple) else ()))
        both = groups * self.down.numel() + self.up.numel()
        return outputs * both, self.up.numel() * self.down.numel() // max(1, rank)

    def _from(self, room: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """Write W + up · diag · down into ``room``, and run the layer from there."""
        up, down = self.up, self.down.flatten(1)
        if self.diagonal is not None and up.numel() < down.numel():
            up = up * self.diagonal
        elif self.diagonal is not None:
            down = down * self.diagonal[:, None]
        bias, out = self.module.bias, room.view(weight.shape[0], -1)
        assert not isinstance(bias, nn.Module)
        with torch.no_grad():
            torch.addmm(weight.reshape(out.shape), up, down, out=out)
        return full_diff.run(self.module, room, bias, x)

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """y += up · diag · down · x, with x the layer's input and y its output."""
        if not y.numel():
            return
        if isinstance(self.module, nn.Linear):
            self._add_tokens(y, x)
        else:
            self._add_images(y, x)

    def _add_tokens(self, y: Tensor, x: Tensor) -> None:
        hidden = torch.mm(x.reshape(-1, x.shape[-1]), self.down.T)
        if self.diagonal is not None:
            hidden.mul_(self.diagonal)
        if y.is_contiguous():
            y.view(-1, y.shape[-1]).addmm_(hidden, self.up.T)
        else:
            y.add_(torch.mm(hidden, self.up.T).view(y.shape))

    def _add_images(self, y: Tensor, x: Tensor) -> None:
        assert isinstance(self.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        groups = self.module.groups
        parts = zip(y.chunk(groups, 1), x.chunk(groups, 1), self.up.chunk(groups), strict=True)
        for y_group, x_group, up in parts:
            hidden = self._hidden(x_group)
            if self.diagonal is not None:
                hidden.mul_(self.diagonal.view(-1, *[1] * (hidden.dim() - 2)))
            _accumulate(y_group, up.expand(y.shape[0], -1, -1), hidden.flatten(2))

    def _hidden(self, x: Tensor) -> Tensor:
        """(n, Σr, *out) of one group's input: down with the layer's kernel, or pointwise before the core."""
        if self.mid is None:
            return convolve(self.module, x, self.down)
        return convolve(self.module, CONVOLUTIONS[type(self.module)](x, self.down), self.mid)


def _accumulate(y: Tensor, up: Tensor, hidden: Tensor) -> None:
    """y (n, out, *spatial) += up (n, out, r) · hidden (n, r, positions); in place where the layout allows."""
    if y.is_contiguous():
        y.view(*y.shape[:2], -1).baddbmm_(up, hidden)
    else:
        y.add_(torch.bmm(up, hidden).view(y.shape))
