"""Runtime LoKr, LoRA and LoHa on a ggml graph: factors applied to the activation, never building ΔW.

The orders of contraction and their costs are those of `contraction`; what is done on the host once, at loading,
is multiplying the scale into one factor and, where an order asks for it, two factors into each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulldiff.harness.backends.ggml import F16
from fulldiff.harness.subjects import contraction, factors, fallback, loha
from fulldiff.harness.subjects.base import Adapter
from fulldiff.harness.subjects.contraction import Step
from fulldiff.harness.subjects.ggml.blocks import Block, bring, contract
from fulldiff.harness.subjects.ggml.convolution import convolve
from fulldiff.harness.subjects.ggml.layer import Layer


@dataclass(frozen=True)
class Plan:
    """The steps for one adapter on some rows of a layer, the scale multiplied in; w1's and w2's sizes."""

    steps: tuple[Step, ...]
    w1: tuple[int, int]
    w2: tuple[int, int]
    rows: slice


def plan(layer: Layer, adapter: Adapter) -> Plan:
    """The cheapest order for the layer's input; refuses factors that do not fit."""
    weight = layer.module.weight
    rows = factors.rows(adapter, weight)
    part = weight[rows]
    plain = loha.as_lora(adapter, part.shape, torch.float32) if adapter.kind == "loha" else adapter
    t = {name: f.detach().float() for name, f in plain.tensors.items() if name not in ("alpha", "diff_b", "scale")}
    pointwise = isinstance(layer.module, nn.Linear) or _is_pointwise(layer)
    w1, w2 = factors.w1_sizes(t), factors.w2_sizes(t, part.shape)
    inside = 1 if layer.shape is None else math.prod(layer.shape.inp)
    outside = 1 if layer.shape is None else layer.shape.positions
    sizes = contraction.Shape(w1[1], w2[1], inside, outside)
    steps = contraction.best(contraction.orders(t, part.shape, pointwise), sizes)
    return Plan(_scaled(steps, factors.scale(plain)), w1, w2, rows)


def contributions(layer: Layer, adapter: Adapter, place: int = 0) -> Iterator[tuple[int, Block]]:
    """(first output channel, block with axes v, u to add there) for each of the layer's groups."""
    made = plan(layer, adapter)
    if layer.groups == 1:
        yield made.rows.start, apply(layer, made.steps, layer.block(made.w1[1]), place)
        return
    width = layer.out // layer.groups
    for group in range(layer.groups):
        yield from _group(layer, made, group, width, place)


def apply(layer: Layer, steps: Sequence[Step], block: Block, place: int) -> Block:
    """The steps on a block of input channels v·u: output channels v·u, in some order of axes."""
    fronts = [_front(step) for step in steps[1:]] + [layer.order[:1]]
    for step, then in zip(steps, fronts, strict=True):
        if step.kernel:
            assert layer.shape is not None
            flat = step.matrix.flatten(1)
            kernel = layer.g.tensor(flat.half() if layer.code == F16 else flat, place=place)
            block = convolve(layer.g, block, kernel, layer.code, layer.shape)
        else:
            matrix = layer.g.tensor(step.matrix, place=place)
            block = contract(layer.g, block, "v" if step.axis == 2 else "u", matrix, then)
    return block


def why_whole(layer: Layer, adapter: Adapter) -> str:
    """Why the adapter's delta is made whole all the same; empty where it is not."""
    return fallback.why_materialised(layer.module, adapter)


def _front(step: Step) -> tuple[str, ...]:
    if step.kernel:
        return ("s", "v")
    return ("v",) if step.axis == 2 else ("u",)


def _group(layer: Layer, made: Plan, group: int, width: int, place: int) -> Iterator[tuple[int, Block]]:
    """One group's channels: the w1 rows that it touches, and of them its part."""
    start, (up, uq), vp = group * width, made.w1, made.w2[0]
    block = layer.block(uq, group)
    if up == 1:
        yield start, apply(layer, _cut(made.steps, 2, start, start + width), block, place)
        return
    low, high = start // vp, math.ceil((start + width) / vp)
    whole = apply(layer, _cut(made.steps, 1, low, high), block, place)
    if (high - low) * vp == width:
        yield start, whole
        return
    yield start, _slice(layer, whole, start - low * vp, width)


def _slice(layer: Layer, block: Block, start: int, width: int) -> Block:
    """Some of a block's output channels v·u, as so many v."""
    g, whole, s = layer.g, bring(layer.g, block, layer.order), block.sizes["s"]
    channels = block.sizes["v"] * block.sizes["u"]
    view = g.view(whole.node, (s * width, layer.items), (s * channels,), start * s)
    return Block(g.cont(view), layer.order, {**block.sizes, "v": width, "u": 1})


def _cut(steps: Sequence[Step], axis: int, start: int, stop: int) -> list[Step]:
    """The steps with the last matrix of ``axis`` cut to its rows start … stop."""
    at = max(index for index, step in enumerate(steps) if step.axis == axis)
    cut = Step(axis, steps[at].matrix[start:stop], steps[at].kernel)
    return [*steps[:at], cut, *steps[at + 1 :]]


def _scaled(steps: Sequence[Step], scale: float) -> tuple[Step, ...]:
    """The scale multiplied into the smallest matrix."""
    at = min(range(len(steps)), key=lambda index: steps[index].matrix.numel())
    return tuple(
        Step(step.axis, step.matrix * scale if index == at else step.matrix, step.kernel)
        for index, step in enumerate(steps)
    )


def _is_pointwise(layer: Layer) -> bool:
    shape = layer.shape
    return shape is not None and shape.window == 1 and shape.stride == (1, 1, 1) and shape.padding == (0, 0, 0)


def merged_bias(layer: Layer, adapters: Sequence[Adapter]) -> Tensor | None:
    """The bias in f32 with the adapters' bias deltas, as torch's full diff has it."""
    from fulldiff.harness.subjects import full_diff

    return full_diff.merged_bias(layer.module, adapters)
