"""Subjects ``ggml…``: full diff and runtime LoKr as ggml graphs, strict and as shipped, whole and split."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter, Detach, Subject, replace_forward
from fulldiff.harness.subjects.ggml import runtime, session
from fulldiff.harness.subjects.ggml.blocks import Block, contract
from fulldiff.harness.subjects.ggml.convolution import convolve
from fulldiff.harness.subjects.ggml.delta import delta
from fulldiff.harness.subjects.ggml.graph import Graph, Node
from fulldiff.harness.subjects.ggml.layer import Layer, empty, finish, layer


class Ggml(Subject):
    """Runtime LoKr on ggml's graphs.

    ``strict``: f32 throughout, on Vulkan too, convolution kernels included. Otherwise as ggml's users run it:
    kernels held in f16, and on Vulkan products in f16. ``split``: the factors lie on the CPU, the base on the
    device, and ggml's scheduler moves what must move.
    """

    def __init__(self, backend: str = "cpu", strict: bool = True, split: bool = False) -> None:
        self.backend, self.strict = backend, strict
        self.session = session.session(backend, strict, split)
        self.place = int(split)
        self.compute_bytes = 0

    def arithmetic(self, kind: str, dtype: str) -> tuple[str, str]:
        """As shipped: kernels of convolutions in f16 (and bf16's own roundings in bf16); on Vulkan all in f16."""
        rounded = kind != "linear" or self.backend == "vulkan"
        if self.strict or not rounded or dtype == "bf16":
            return dtype, ""
        return "f16", "f16" if self.backend == "vulkan" else ""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        for adapter in adapters:
            factors.check(adapter)
        active = [adapter for adapter in adapters if adapter.strength]
        return replace_forward(module, lambda x: self.forward(module, active, x))

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], x: Tensor) -> Tensor:
        """The layer's output; `compute_bytes` is then what the graph needed."""
        if not x.numel():
            return empty(module, x)
        with Graph(self.session) as g:
            made = layer(g, module, x, not self.strict)
            y = g.compute(self.output(made, adapters))
            self.compute_bytes = g.compute_bytes
        return finish(module, x, y, made.shape)

    def output(self, made: Layer, adapters: Sequence[Adapter]) -> Node:
        """The base's output with each adapter's part added into it.

        The first part is computed before the base: then no more than two tensors of the output's size are alive.
        """
        g, parts = made.g, [part for adapter in adapters for part in self._parts(made, adapter)]
        if parts:
            g.expand(parts[0][1].node)
        y = made.output(made.kernel(made.module.weight), runtime.merged_bias(made, adapters))
        g.call.ggml_set_output(g.expand(y))
        for start, block in parts:
            made.add_into(y, block, start)
        return y

    def remark(self, module: nn.Module, adapters: Sequence[Adapter]) -> str:
        return f"compute buffer {self.compute_bytes:,} B"

    def _parts(self, made: Layer, adapter: Adapter) -> list[tuple[int, Block]]:
        if not adapter.tensors.keys() & factors.KNOWN[adapter.kind] - {"alpha", "diff_b", "scale", "dora_scale"}:
            return []
        if runtime.why_whole(made, adapter):
            return [whole(made, adapter, self.place)]
        return list(runtime.contributions(made, adapter, self.place))


class GgmlFullDiff(Ggml):
    """W' = W + Σ ΔW made on the graph, then the layer once."""

    def output(self, made: Layer, adapters: Sequence[Adapter]) -> Node:
        kernel = merged(made, adapters, self.place)
        return made.output(kernel, runtime.merged_bias(made, adapters))


def merged(made: Layer, adapters: Sequence[Adapter], place: int = 0) -> Node:
    """W' on the graph, held as the layer's weights are."""
    g, weight = made.g, made.module.weight
    wide = g.tensor(weight.float().flatten(1))
    for adapter in adapters:
        if adapter.tensors.keys() <= {"alpha", "diff_b"}:
            continue
        rows = factors.rows(adapter, weight)
        change = delta(g, adapter, weight[rows].shape, factors.scale(adapter), place)
        wide = g.add(change, wide) if is_everything(rows, weight) else _added(g, wide, change, rows)
    return made.held(wide)


def is_everything(rows: slice, weight: Tensor) -> bool:
    return (rows.start, rows.stop) == (0, weight.shape[0])


def _added(g: Graph, wide: Node, change: Node, rows: slice) -> Node:
    """A copy of the weight with the change added into its rows."""
    inner, count = g.sizes(wide)[0], rows.stop - rows.start
    copy = g.expand(g.cont(wide))
    g.add_into(g.view(copy, (inner, count), (inner,), rows.start * inner), change)
    return copy


def whole(made: Layer, adapter: Adapter, place: int = 0) -> tuple[int, Block]:
    """(first channel, block) of what the adapter's delta, made whole, adds to the output."""
    g, weight = made.g, made.module.weight
    rows = factors.rows(adapter, weight)
    change = delta(g, adapter, weight[rows].shape, factors.scale(adapter), place)
    if made.groups > 1:
        if not is_everything(rows, weight):
            change = _added(g, g.tensor(torch.zeros(weight.shape).flatten(1)), change, rows)
        y = made.output(made.held(change), None)
        return 0, Block(y, made.order, made.output_sizes())
    block = made.block(1)
    if made.shape is None:
        return rows.start, contract(g, block, "v", change, ("v",))
    return rows.start, convolve(g, block, made.held(change), made.code, made.shape)


GGML_VULKAN = partial(Ggml, "vulkan")
GGML_SHIPPED = partial(Ggml, "cpu", strict=False)
GGML_VULKAN_SHIPPED = partial(Ggml, "vulkan", strict=False)
GGML_SPLIT = partial(Ggml, "vulkan", split=True)
GGML_FULL_DIFF_VULKAN = partial(GgmlFullDiff, "vulkan")
