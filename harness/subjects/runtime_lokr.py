"""Subject ``runtime-lokr``: apply LoKr, LoRA and LoCon factors to the activation, never building ΔW.

After stable-diffusion.cpp's "Optimise LoKr at runtime". The order of contraction is the cheapest of all
(see `contraction`), each branch is added into the base's output in place, and the intermediates are
bounded: the items (tokens, or images of a batch) are split into even parts of at most
max(`WORKSPACE`, one item) bytes, whatever their number.

Groups that divide the rows of w1 run as so many independent blocks; others compute the w1 rows that a
group touches and keep its part, in a buffer of at most (out / groups + 2·vp) channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulldiff.harness.subjects import contraction, factors, fallback
from fulldiff.harness.subjects.base import Adapter, Forward, Unsupported
from fulldiff.harness.subjects.contraction import Step
from fulldiff.harness.subjects.convolution import convolve
from fulldiff.harness.subjects.stacked import Stacked

# Small enough that an intermediate is still in the cache when the next step reads it.
WORKSPACE = 4 << 20


class RuntimeLokr(Stacked):
    """LoKr in every form, LoRA, LoCon and LoHa on Linear and Conv layers; DoRA and diffs by `fallback`."""

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            raise Unsupported(f"layer {type(module).__name__}: only Linear and Conv1d to Conv3d")
        branches = branches_of(module, adapters)

        def forward(x: Tensor) -> Tensor:
            y = base(x)
            for branch in branches:
                branch.add_to(y, x)
            return y

        return forward

    def remark(self, module: nn.Module, adapters: Sequence[Adapter]) -> str:
        whole = {fallback.why_materialised(module, adapter) for adapter in adapters if adapter.strength} - {""}
        return f"materialised: {', '.join(sorted(whole))}" if whole else ""

    def promised_bytes(self, module: nn.Module, adapters: Sequence[Adapter], x: Tensor) -> int | None:
        if not isinstance(module, nn.Linear) or not all(map(fallback.is_plain, adapters)):
            return None
        copy = 0 if _rows_of(x).data_ptr() == x.data_ptr() else x.numel()
        works = [branch.workspace(x) for branch in branches_of(module, adapters) if isinstance(branch, Branch)]
        return x.element_size() * max((copy + work for work in works), default=0)


def branches_of(module: nn.Module, adapters: Sequence[Adapter]) -> list[fallback.AnyBranch]:
    """The branches of the adapters whose strength is not 0: a `Branch` for each plain LoRA or LoKr."""
    for adapter in adapters:
        factors.check(adapter)
    active = [adapter for adapter in adapters if adapter.strength]
    return [branch for adapter in active for branch in fallback.branches(module, adapter, Branch.make)]


def plain_branches(module: nn.Module, adapters: Sequence[Adapter]) -> list[Branch]:
    """The branches that never make a ΔW."""
    return [branch for branch in branches_of(module, adapters) if isinstance(branch, Branch)]


@dataclass(frozen=True)
class Plan:
    """The steps to run, in the layer's dtype; the scale; the elements alive at the worst moment, per item."""

    steps: tuple[Step, ...]
    scale: float
    peak: int


@dataclass(frozen=True)
class Branch:
    """One adapter on one layer: its factors as they were given, the scale, and the plans made so far."""

    module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    factors: Mapping[str, Tensor]
    scale: float
    w1: tuple[int, int]
    w2: tuple[int, int]
    ready: dict[tuple[int, int], Plan]

    @staticmethod
    def make(module: nn.Module, adapter: Adapter) -> Branch:
        assert isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        t = {name: factor.detach() for name, factor in adapter.tensors.items() if name != "alpha"}
        w1, w2 = factors.w1_sizes(t), factors.w2_sizes(t, module.weight.shape)
        made = Branch(module, t, factors.scale(adapter), w1, w2, {})
        made.orders()
        return made

    def orders(self) -> list[tuple[Step, ...]]:
        """The candidates, in f32 or wider; not kept. Raises Refused: the factors do not fit the layer."""
        weight = self.module.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        t = {name: factor.to(wide) for name, factor in self.factors.items()}
        return contraction.orders(t, weight.shape, pointwise=_is_pointwise(self.module))

    def plan(self, positions_in: int = 1, positions_out: int = 1) -> Plan:
        """The best order for these numbers of positions of one item (a token has one)."""
        key = (positions_in, positions_out)
        if key not in self.ready:
            shape = contraction.Shape(self.w1[1], self.w2[1], positions_in, positions_out)
            order, scale = contraction.best(self.orders(), shape), self.scale
            peak, dtype = contraction.cost(order, shape).peak, self.module.weight.dtype
            if dtype == torch.float16:
                order, scale = contraction.balance(order, scale)
            steps = (Step(s.axis, s.matrix.to(dtype).contiguous(), s.kernel) for s in order)
            self.ready[key] = Plan(tuple(steps), scale, peak)
        return self.ready[key]

    def flops(self, positions_in: int = 1, positions_out: int = 1) -> int:
        """FLOPs of one item in the chosen order."""
        shape = contraction.Shape(self.w1[1], self.w2[1], positions_in, positions_out)
        groups = 1 if isinstance(self.module, nn.Linear) else self.module.groups
        return groups * contraction.cost(self.plan(positions_in, positions_out).steps, shape).flops

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """y += scale · ΔW x, with x the layer's input and y its output."""
        if not y.numel():
            return
        if not isinstance(self.module, nn.Linear):
            self._add_convolution(y, x)
        elif y.is_contiguous():
            self._add_tokens(y.view(-1, y.shape[-1]), _rows_of(x))
        else:
            delta = torch.zeros(y.shape, dtype=y.dtype, device=y.device)
            self._add_tokens(delta.view(-1, y.shape[-1]), _rows_of(x))
            y.add_(delta)

    def workspace(self, x: Tensor) -> int:
        """Elements alive at the worst moment of a Linear's branch, output and input apart."""
        peak = self.plan().peak
        tokens = x.numel() // max(1, x.shape[-1])
        return peak * max(_even_parts(tokens, peak * x.element_size()), default=0)

    def _add_tokens(self, y: Tensor, x: Tensor) -> None:
        plan = self.plan()
        parts = _even_parts(x.shape[0], plan.peak * x.element_size())
        for x_part, y_part in zip(x.split(parts), y.split(parts), strict=True):
            block = x_part.view(-1, self.w1[1], self.w2[1])
            _run_linear(plan.steps, block, y_part.view(-1, self.w1[0], self.w2[0]), plan.scale)

    def _add_convolution(self, y: Tensor, x: Tensor) -> None:
        target = y if y.is_contiguous() else torch.zeros(y.shape, dtype=y.dtype, device=y.device)
        plan = self.plan(math.prod(x.shape[2:]), math.prod(y.shape[2:]))
        parts = _even_parts(x.shape[0], plan.peak * x.element_size())
        for x_part, y_part in zip(x.split(parts), target.split(parts), strict=True):
            self._add_images(plan.steps, plan.scale, y_part, x_part)
        if target is not y:
            y.add_(target)

    def _add_images(self, order: Sequence[Step], scale: float, y: Tensor, x: Tensor) -> None:
        groups = self.module.groups if not isinstance(self.module, nn.Linear) else 1
        outputs, inputs = y.chunk(groups, 1), x.chunk(groups, 1)
        for group, (y_group, x_group) in enumerate(zip(outputs, inputs, strict=True)):
            block = x_group.reshape(x.shape[0], self.w1[1], self.w2[1], *x.shape[2:])
            self._add_group(order, scale, y_group, block, group * y_group.shape[1])

    def _add_group(self, order: Sequence[Step], scale: float, y: Tensor, block: Tensor, start: int) -> None:
        """One group's channels start … start + y.shape[1] of the output."""
        vp, width = self.w2[0], y.shape[1]
        if self.w1[0] == 1:
            _run_convolution(self.module, _rows(order, 2, start, start + width), block, y, scale, width)
            return
        low, high = start // vp, math.ceil((start + width) / vp)
        steps = _rows(order, 1, low, high)
        if (high - low) * vp == width:
            _run_convolution(self.module, steps, block, y, scale, vp)
            return
        whole = y.new_zeros(y.shape[0], (high - low) * vp, *y.shape[2:])
        _run_convolution(self.module, steps, block, whole, scale, vp)
        y.add_(whole[:, start - low * vp : start - low * vp + width])


def _run_linear(order: Sequence[Step], block: Tensor, y: Tensor, scale: float) -> None:
    """y (n, up, vp) += scale · the steps applied to block (n, uq, vq)."""
    for index, step in enumerate(order):
        last, n = index == len(order) - 1, block.shape[0]
        if step.axis == 2:
            # No name for the flattened block: it would keep the block alive through the next step.
            if last:
                y.view(-1, y.shape[2]).addmm_(block.view(-1, block.shape[2]), step.matrix.T, alpha=scale)
            else:
                block = torch.mm(block.view(-1, block.shape[2]), step.matrix.T).view(n, -1, step.matrix.shape[0])
        elif last:
            y.baddbmm_(step.matrix.expand(n, -1, -1), block, alpha=scale)
        else:
            block = torch.bmm(step.matrix.expand(n, -1, -1), block)


def _run_convolution(module: nn.Module, order: Sequence[Step], block: Tensor, y: Tensor, scale: float, vp: int) -> None:
    """y (n, up·vp, *out) += scale · the steps applied to block (n, uq, vq, *spatial)."""
    n = block.shape[0]
    for index, step in enumerate(order):
        last = index == len(order) - 1
        if step.kernel:
            block = convolve(module, block.flatten(0, 1), step.matrix).unflatten(0, (n, -1))
            if last:
                y.add_(block.reshape(y.shape), alpha=scale)
            continue
        images = block.flatten(2) if step.axis == 1 else block.flatten(0, 1).flatten(2)
        matrix = step.matrix.expand(images.shape[0], -1, -1)
        if last:
            channels = -1 if step.axis == 1 else vp
            shape = (n, step.matrix.shape[0], -1) if step.axis == 1 else (-1, channels, images.shape[2])
            _accumulate(y, shape, matrix, images, scale)
        elif step.axis == 1:
            block = torch.bmm(matrix, images).view(n, -1, *block.shape[2:])
        else:
            block = torch.bmm(matrix, images).view(n, -1, step.matrix.shape[0], *block.shape[3:])


def _accumulate(y: Tensor, shape: tuple[int, ...], matrix: Tensor, images: Tensor, scale: float) -> None:
    """y += scale · matrix · images: in place, but for a group's slice of several images, which has gaps."""
    if y.is_contiguous():
        y.view(shape).baddbmm_(matrix, images, alpha=scale)
    else:
        y.add_(torch.bmm(matrix, images).view(y.shape), alpha=scale)


def _rows(order: Sequence[Step], axis: int, start: int, stop: int) -> list[Step]:
    """The order with the last matrix of ``axis`` cut to its rows start … stop."""
    at = max(index for index, step in enumerate(order) if step.axis == axis)
    cut = Step(axis, order[at].matrix[start:stop], order[at].kernel)
    return [*order[:at], cut, *order[at + 1 :]]


def _even_parts(items: int, bytes_per_item: int) -> list[int]:
    """Sizes that differ by at most one, each within WORKSPACE (or one item, if that is larger)."""
    if not items:
        return []
    parts = min(items, max(1, math.ceil(items * bytes_per_item / WORKSPACE)))
    return [items // parts + (index < items % parts) for index in range(parts)]


def _is_pointwise(module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> bool:
    """A linear layer, or a convolution that maps each position by itself."""
    if isinstance(module, nn.Linear):
        return True
    plain = (*module.kernel_size, *module.stride) == (1,) * 2 * len(module.kernel_size)
    return plain and not isinstance(module.padding, str) and not any(module.padding)


def _rows_of(x: Tensor) -> Tensor:
    """x as contiguous rows (tokens, in): a view where its layout allows, else a copy."""
    return x.reshape(-1, x.shape[-1]).contiguous()
