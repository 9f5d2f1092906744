"""Subject ``ggml-sdcpp-order``: stable-diffusion.cpp's own sequence of operations for a LoKr at run time.

After its pull request 1233 ("Optimise LoKr at runtime") and today's head, faults and all, so that reports show
what it does on the same cases: right, wrong or a crash. `ggml-sdcpp-head` also cuts the tokens on Vulkan as the
head does, by the largest divisor that the work groups allow: a prime number of tokens falls to as many batches.
Nothing is guarded here: the factors are used as stored, sizes are read where that code reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from fulldiff.harness.subjects.base import Adapter, Refused, Unsupported
from fulldiff.harness.subjects.ggml.convolution import Geometry
from fulldiff.harness.subjects.ggml.graph import Graph, Node
from fulldiff.harness.subjects.ggml.layer import Layer, empty, finish, transposed
from fulldiff.harness.subjects.ggml.layer import layer as layer_of
from fulldiff.harness.subjects.ggml.subject import Ggml

LARGEST_BATCH = 65535


class SdcppOrder(Ggml):
    """LoKr alone; ``cut``: with the head's cutting of tokens on Vulkan."""

    def __init__(self, backend: str = "cpu", cut: bool = False) -> None:
        super().__init__(backend, strict=False)
        self.cut = cut and backend == "vulkan"

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], x: Tensor) -> Tensor:
        for adapter in adapters:
            if adapter.kind != "lokr" or adapter.rows or {"dora_scale", "diff_b"} & adapter.tensors.keys():
                raise Unsupported(f"{adapter.kind}: this is stable-diffusion.cpp's path for a plain LoKr")
        if not x.numel():
            return empty(module, x)
        with Graph(self.session) as g:
            made = layer_of(g, module, x, half_kernels=True)
            if made.groups > 1 or (made.shape is not None and x.dim() != 4):
                raise Unsupported("stable-diffusion.cpp has 2-D convolutions without groups only")
            h = _input(g, made, x)
            y = made.output(made.kernel(made.module.weight), made.module.bias)
            for adapter in adapters:
                y = g.add(y, self._branch(made, adapter, h, g.sizes(y)))
            result = g.compute(y)
            self.compute_bytes = g.compute_bytes
        return finish(module, x, result, made.shape)

    def _branch(self, made: Layer, adapter: Adapter, h: Node, sizes: Sequence[int]) -> Node:
        g, names = made.g, ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")
        t = {name: _factor(made, adapter, name) for name in names if f"lokr_{name}" in adapter.tensors}
        run = self._linear if made.shape is None else _convolution
        out = run(made, t, h)
        if g.sizes(out) != list(sizes):
            out = g.reshape(out, *sizes)
        return g.scale(out, _scale(adapter))

    def _linear(self, made: Layer, t: dict[str, Node], h: Node) -> Node:
        g = made.g
        uq, up = _w1_sizes(g, t)
        vq = g.sizes(h)[0] // uq
        vp = g.sizes(t["w2"] if "w2" in t else t["w2_a"])[1]
        batch = g.sizes(h)[1]  # D4: one leading dimension only
        by_uq, by_vp = (_divisor(batch, n) if self.cut else batch for n in (uq, vp))
        hb = _two(g, t, "w2", g.reshape(h, vq, uq * by_uq, batch // by_uq))
        hb = g.cont(g.transpose(g.reshape(hb, vp, uq, batch)))
        hc = _two(g, t, "w1", g.reshape(hb, uq, vp * by_vp, batch // by_vp))
        return g.reshape(g.cont(g.transpose(g.reshape(hc, up, vp, batch))), up * vp, batch)


def _two(g: Graph, t: dict[str, Node], name: str, h: Node) -> Node:
    """A whole factor, or of a low-rank one first a and then b (D1: b comes first)."""
    if name in t:
        return g.mul_mat(t[name], h)
    return g.mul_mat(t[f"{name}_b"], g.mul_mat(t[f"{name}_a"], h))


def _convolution(made: Layer, t: dict[str, Node], h: Node) -> Node:
    g, shape = made.g, made.shape
    assert shape is not None
    uq, up = _w1_sizes(g, t)
    vp = g.sizes(t["w2"])[3] if "w2" in t else g.sizes(t["w2_a"])[1]  # D5: of a 2-D w2, 1
    channels, batch = g.sizes(h)[2:]
    split = g.reshape(h, *g.sizes(h)[:2], channels // uq, uq * batch)
    if "w2" in t:
        hb = _convolve(g, t["w2"], split, shape)
    else:
        hb = _convolve(g, t["w2_a"], _convolve(g, _unpacked(g, t["w2_b"], channels // uq), split, shape), None)
    width, height = g.sizes(hb)[:2]
    merged = g.cont(g.transpose(g.reshape(hb, width * height * vp, uq * batch)))  # D3: images mixed with w1's columns
    hc = g.cont(g.transpose(_two(g, t, "w1", merged)))
    return g.reshape(hc, width, height, up * vp, batch)


def _convolve(g: Graph, kernel: Node, x: Node, shape: Geometry | None) -> Node:
    """The shape's convolution (None: of one position); a 2-D kernel is one of 1×1, unless a channel count fits."""
    settings = (1, 1, 0, 0, 1, 1)
    if shape is not None:
        settings = (*shape.stride[:2], *shape.padding[:2], *shape.dilation[:2])
    inp, out, *rest = g.sizes(kernel)
    if rest == [1, 1] and out > 1 and g.sizes(x)[2] != 1:
        kernel = g.reshape(kernel, 1, 1, inp, out)
    return int(g.call.ggml_conv_2d(g.context, kernel, x, *settings))


def _unpacked(g: Graph, kernel: Node, channels: int) -> Node:
    """A flat w2_b as the square kernel that its columns make: of a Tucker's (t2 is read nowhere), as 1×1."""
    columns, rank = g.sizes(kernel)[:2]
    side = math.isqrt(columns // channels)
    if side * side * channels != columns:
        g.call.ggml_abort(b"ggml_extend.hpp", 0, b"GGML_ASSERT(k * k * h_split->ne[2] == a->ne[0])")
    return g.reshape(kernel, side, side, columns // (side * side), rank)


def _factor(made: Layer, adapter: Adapter, name: str) -> Node:
    """The factor as stored; those of w2 on a convolution in f16."""
    tensor = adapter.tensors[f"lokr_{name}"].float()
    return made.g.tensor(tensor if made.shape is None or name.startswith("w1") else tensor.half())


def _w1_sizes(g: Graph, t: dict[str, Node]) -> tuple[int, int]:
    """(uq, up) as that code reads them (D2: of a low-rank w1, from the rank)."""
    if "w1" in t:
        return g.sizes(t["w1"])[0], g.sizes(t["w1"])[1]
    return g.sizes(t["w1_a"])[0], g.sizes(t["w1_b"])[1]


def _input(g: Graph, made: Layer, x: Tensor) -> Node:
    """The input with its own sizes; a transposed one as ggml sees it, without a copy."""
    if transposed(x):
        return g.transpose(g.tensor(x.T.float()))
    return g.reshape(made.x, *reversed(x.shape))


def _divisor(batch: int, size: int) -> int:
    """The largest divisor of the tokens that keeps tokens · size within the work groups."""
    return next(n for n in range(max(1, LARGEST_BATCH // size), 0, -1) if batch % n == 0)


def _scale(adapter: Adapter) -> float:
    """alpha over the rank, which is the last dimension of w2_b or w1_b that is not 1 (D7)."""
    alpha = adapter.tensors.get("alpha")
    rank = 1
    for name in ("lokr_w1_b", "lokr_w2_b"):
        if name in adapter.tensors:
            sizes = list(reversed(adapter.tensors[name].shape))
            while len(sizes) > 1 and sizes[-1] == 1:
                sizes.pop()
            rank = sizes[-1]
    if alpha is not None and alpha.numel() != 1:
        raise Refused(f"alpha has shape {tuple(alpha.shape)}")
    return adapter.strength * (1.0 if alpha is None or rank == 1 else float(alpha.reshape(())) / rank)


SDCPP_ORDER_VULKAN = partial(SdcppOrder, "vulkan")
SDCPP_HEAD_VULKAN = partial(SdcppOrder, "vulkan", cut=True)
