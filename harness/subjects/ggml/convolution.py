"""A layer's geometry in ggml's order, and convolving a block: unfold each window (im2col), then one product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fulldiff.harness.backends.ggml import BYTES
from fulldiff.harness.subjects.base import Unsupported
from fulldiff.harness.subjects.ggml.blocks import Block, bring, even_parts, product
from fulldiff.harness.subjects.ggml.graph import Graph, Node

Triple = tuple[int, int, int]
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Geometry:
    """Width, height and depth of each: 1 (padding: 0) for a dimension that the layer does not have."""

    kernel: Triple
    stride: Triple
    padding: Triple
    dilation: Triple
    inp: Triple
    out: Triple

    @property
    def deep(self) -> bool:
        return self.inp[2] > 1 or self.kernel[2] > 1 or self.out[2] > 1

    @property
    def positions(self) -> int:
        """The positions of the output."""
        return math.prod(self.out)

    @property
    def window(self) -> int:
        """The positions of the kernel."""
        return math.prod(self.kernel)


def geometry(module: Convolution, x: Tensor) -> Geometry:
    """The geometry of the layer on this input (batch, in, *spatial)."""
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise Unsupported(f"padding {module.padding_mode}: ggml's convolutions pad with zeros")
    kernel, stride, dilation = (_triple(v, 1) for v in (module.kernel_size, module.stride, module.dilation))
    padding, inp = _triple(module.padding, 0), _triple(x.shape[2:], 1)
    sizes = zip(inp, kernel, stride, padding, dilation, strict=True)
    width, height, depth = ((i + 2 * p - d * (k - 1) - 1) // s + 1 for i, k, s, p, d in sizes)
    return Geometry(kernel, stride, padding, dilation, inp, (width, height, depth))


def _triple(values: Sequence[int], missing: int) -> Triple:
    """torch's (depth, height, width), or fewer, in ggml's order."""
    width, height, depth = (*reversed([int(v) for v in values]), *[missing] * 3)[:3]
    return width, height, depth


def convolve(g: Graph, block: Block, kernel: Node, code: int, shape: Geometry) -> Block:
    """Every image of ``block`` (s, v, …) with a kernel [window·v, e] held as type ``code``; axes (s, …, v) come out.

    In even parts of the images where the device's work groups or buffers ask for them.
    """
    block = bring(g, block, ("s", "v"))
    rest = block.order[2:]
    images = block.elements // (block.sizes["s"] * block.sizes["v"])
    columns, rows = shape.positions, g.sizes(kernel)[1]
    unfolded = g.sizes(kernel)[0] * columns * BYTES[code]
    limit = max(1, min(g.session.columns // columns, g.session.bytes // unfolded))
    parts = list(even_parts(images, limit))
    made = [_images(g, block, kernel, code, shape, part) for part in parts]
    node = made[0] if len(parts) == 1 else _join(g, made, [count * columns for _, count in parts], rows)
    return Block(node, ("s", *rest, "v"), {**block.sizes, "s": columns, "v": rows})


def _images(g: Graph, block: Block, kernel: Node, code: int, shape: Geometry, part: tuple[int, int]) -> Node:
    """[positions · images, e] of some of the images."""
    (start, count), channels = part, block.sizes["v"]
    size = block.sizes["s"] * channels
    flat = g.reshape(block.node, size, block.elements // size)
    piece = g.view(flat, (size, count), (size,), start * size)
    if g.sizes(flat)[1] != count:
        piece = g.cont(piece)  # An operand that begins anywhere: see `blocks.ALIGNED`.
    columns = unfold(g, piece, kernel, code, shape, channels, count)
    flat_columns = g.reshape(columns, g.sizes(kernel)[0], count * shape.positions)
    return product(g, flat_columns, kernel, last=True)


def unfold(g: Graph, x: Node, kernel: Node, code: int, shape: Geometry, channels: int, images: int) -> Node:
    """The windows of contiguous images [width, height, (depth,) channels, images], each a column."""
    (kw, kh, kd), rows, call = shape.kernel, g.sizes(kernel)[1], g.call
    if shape.deep:
        a = g.reshape(kernel, kw, kh, kd, channels * rows)
        b = g.reshape(x, *shape.inp, channels * images)
        settings = (*shape.stride, *shape.padding, *shape.dilation)
        return int(call.ggml_im2col_3d(g.context, a, b, channels, *settings, code))
    a = g.reshape(kernel, kw, kh, channels, rows)
    b = g.reshape(x, shape.inp[0], shape.inp[1], channels, images)
    flat = (*shape.stride[:2], *shape.padding[:2], *shape.dilation[:2])
    return int(call.ggml_im2col(g.context, a, b, *flat, True, code))


def _join(g: Graph, made: Sequence[Node], counts: Sequence[int], rows: int) -> Node:
    """[Σ counts, rows] from parts [count, rows]."""
    total, start = sum(counts), 0
    out = g.room(total, rows)
    for node, count in zip(made, counts, strict=True):
        g.copy(node, g.view(out, (count, rows), (total,), start))
        start += count
    return out
