"""One layer on a ggml graph: its input and weight, the base's output, and views of it to add into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulldiff.harness.backends.ggml import F16, F32
from fulldiff.harness.subjects.base import Unsupported
from fulldiff.harness.subjects.ggml.blocks import Block, bring, contract, ordered
from fulldiff.harness.subjects.ggml.convolution import Convolution, Geometry, convolve, geometry
from fulldiff.harness.subjects.ggml.graph import Graph, Node

LINEAR, CONVOLUTION = ("v", "u", "n"), ("s", "v", "u", "n")


@dataclass(frozen=True)
class Layer:
    """A torch layer on a graph: ``x`` is its input, ``code`` the type that convolution kernels are held in."""

    g: Graph
    module: nn.Linear | Convolution
    shape: Geometry | None
    x: Node
    inp: int
    items: int
    code: int

    @property
    def order(self) -> tuple[str, ...]:
        """The axes of input and output in memory: channels v·u fastest of a token, positions of an image."""
        return LINEAR if self.shape is None else CONVOLUTION

    @property
    def groups(self) -> int:
        return 1 if isinstance(self.module, nn.Linear) else self.module.groups

    @property
    def out(self) -> int:
        return int(self.module.weight.shape[0])

    def block(self, u: int, group: int = 0) -> Block:
        """The input channels of a group as v·u."""
        channels = self.inp // self.groups
        sizes = {"v": channels // u, "u": u, "n": self.items}
        if self.shape is None:
            return Block(self.x, LINEAR, sizes)
        w, h, d = self.shape.inp
        node, positions = self.x, w * h * d
        if self.groups > 1:
            whole, part = positions * self.inp, positions * channels
            node = self.g.cont(self.g.view(self.x, (part, self.items), (whole,), group * part))
        return Block(node, CONVOLUTION, {"s": positions, **sizes})

    def kernel(self, weight: Tensor, place: int = 0) -> Node:
        """A weight (out, in / groups, *kernel) as [window·in / groups, out], in the type that it is held in."""
        flat = weight.float().flatten(1)
        return self.g.tensor(flat.half() if self.shape is not None and self.code == F16 else flat, place=place)

    def held(self, kernel: Node) -> Node:
        """A kernel computed in f32, in the type that it is held in."""
        return self.g.cast(kernel, F16) if self.shape is not None and self.code == F16 else kernel

    def output_sizes(self) -> dict[str, int]:
        """The sizes of the output's axes, all channels as v."""
        sizes = {"v": self.out, "u": 1, "n": self.items}
        return sizes if self.shape is None else {"s": self.shape.positions, **sizes}

    def output(self, kernel: Node, bias: Tensor | None) -> Node:
        """The layer with another weight [window·in / groups, out] on the graph, contiguous in the order of `order`."""
        if self.shape is None:
            y = contract(self.g, self.block(1), "v", kernel, ("v",)).node
        elif self.groups == 1:
            y = bring(self.g, convolve(self.g, self.block(1), kernel, self.code, self.shape), ("s", "v")).node
        else:
            y = self._grouped(kernel)
        if bias is not None:
            y = self.g.add(self._flat(y), self._bias(bias))
        return y

    def part(self, y: Node, start: int, v: int, u: int) -> Node:
        """A view of v·u output channels from ``start`` on, with the axes of `order`."""
        if self.shape is None:
            return self.g.view(y, (v, u, self.items), (v, self.out), start)
        s = self.shape.positions
        return self.g.view(y, (s, v, u, self.items), (s, s * v, s * self.out), start * s)

    def add_into(self, y: Node, block: Block, start: int = 0) -> Node:
        """Add a block of output channels v·u into those from ``start`` on; the view of them, after the addition.

        What comes next must read that view where it covers all: ggml frees y when its views have been read.
        """
        target = self.part(y, start, block.sizes["v"], block.sizes["u"])
        return self.g.add_into(target, ordered(self.g, block, self.order))

    def _grouped(self, kernel: Node) -> Node:
        """Each group by itself, written into its channels."""
        assert self.shape is not None
        g, rows, s = self.g, self.out // self.groups, self.shape.positions
        y = g.room(s, self.out, self.items)
        inner = g.sizes(kernel)[0]
        for group in range(self.groups):
            part = g.view(kernel, (inner, rows), (inner,), group * rows * inner)
            made = convolve(g, self.block(1, group), g.cont(part), self.code, self.shape)
            target = g.view(y, (s, rows, 1, self.items), (s, s * rows, s * self.out), group * rows * s)
            g.copy(ordered(g, made, CONVOLUTION), target)
        return y

    def _flat(self, y: Node) -> Node:
        s = 0 if self.shape is None else self.shape.positions
        return self.g.reshape(y, *((s, self.out, self.items) if s else (self.out, self.items)))

    def _bias(self, bias: Tensor) -> Node:
        return self.g.tensor(bias.float(), *((1, self.out) if self.shape is not None else (self.out,)))


def layer(g: Graph, module: nn.Module, x: Tensor, half_kernels: bool = False) -> Layer:
    """The layer with its input on the graph; raises Unsupported."""
    if x.dtype == torch.float64:
        raise Unsupported("f64: ggml computes in f32")
    code = F16 if half_kernels else F32
    if isinstance(module, nn.Linear):
        tokens = x.numel() // module.in_features
        return Layer(g, module, None, _rows(g, x, module.in_features), module.in_features, tokens, code)
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        raise Unsupported(f"layer {type(module).__name__}: only Linear and Conv1d to Conv3d")
    shape = geometry(module, x)
    node = g.tensor(x.float().contiguous(), x[0].numel(), x.shape[0])
    return Layer(g, module, shape, node, module.in_channels, x.shape[0], code)


def transposed(x: Tensor) -> bool:
    """Whether x lies in memory with its last two dimensions swapped."""
    return x.dim() == 2 and not x.is_contiguous() and x.T.is_contiguous()


def _rows(g: Graph, x: Tensor, width: int) -> Node:
    """The tokens [in, tokens], contiguous: of an input that lies transposed, a copy made by ggml."""
    if transposed(x):
        return g.cont(g.transpose(g.tensor(x.T.float())))
    return g.tensor(x.float().contiguous(), width, x.numel() // width)


def empty(module: nn.Module, x: Tensor) -> Tensor:
    """The output of an empty input: ggml has no empty tensors, torch says what shape comes out."""
    y = type(module).forward(module, x)
    assert isinstance(y, Tensor)
    return y


def finish(module: nn.Module, x: Tensor, y: Tensor, shape: Geometry | None) -> Tensor:
    """ggml's output in torch's shape and the layer's dtype."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    sizes: Sequence[int] = (*x.shape[:-1], weight.shape[0])
    if shape is not None:
        spatial = tuple(reversed(shape.out[: x.dim() - 2]))
        sizes = (x.shape[0], weight.shape[0], *spatial)
    return y.reshape(tuple(sizes)).to(weight.dtype)
