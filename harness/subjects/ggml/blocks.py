"""A tensor whose dimensions have names, and contracting one of them with a matrix, in as few copies as can be.

Axes: ``s`` the positions of an image (absent for a linear layer), ``v`` and ``u`` the two parts of the channels
(w2's and w1's), ``n`` the images or tokens. A block's data is contiguous in the order of its axes, the first the
fastest. ggml multiplies along the first axis only, and puts the product's new axis first or last as its operands
are given: the choice that the next step needs spares a transposed copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fulldiff.harness.subjects.ggml.graph import Graph, Node

# Vulkan: an operand must begin at a multiple of 256 bytes, or ggml asserts; so many f32 numbers.
ALIGNED = 64


@dataclass(frozen=True)
class Block:
    """A contiguous tensor, its axes from the fastest on, and their sizes."""

    node: Node
    order: tuple[str, ...]
    sizes: Mapping[str, int]

    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in self.order)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes.values())


def bring(g: Graph, block: Block, front: tuple[str, ...]) -> Block:
    """The block with these axes first: itself, or a copy."""
    if block.order[: len(front)] == front:
        return block
    order = (*front, *(axis for axis in block.order if axis not in front))
    return Block(g.cont(ordered(g, block, order)), order, block.sizes)


def ordered(g: Graph, block: Block, order: tuple[str, ...]) -> Node:
    """A view of the block with its axes in this order."""
    node = g.reshape(block.node, *block.shape())
    if order == block.order:
        return node
    places = [block.order.index(axis) for axis in order]
    return g.permute(node, *places, *range(len(places), 4))


def contract(g: Graph, block: Block, axis: str, matrix: Node, then: tuple[str, ...]) -> Block:
    """The block with ``axis`` (size d) replaced by the rows of ``matrix`` [d, e].

    The new axis comes last where that leaves the axes ``then`` in front, as what follows needs them.
    """
    block = bring(g, block, (axis,))
    rest = block.order[1:]
    rows, inner = g.sizes(matrix)[1], block.sizes[axis]
    last = rest[: len(then)] == then
    flat = g.reshape(block.node, inner, block.elements // inner)
    node = product(g, flat, matrix, last)
    return Block(node, (*rest, axis) if last else (axis, *rest), {**block.sizes, axis: rows})


def product(g: Graph, block: Node, matrix: Node, last: bool) -> Node:
    """[m, e] if ``last``, else [e, m], from a block [d, m] and a matrix [d, e]: in even parts of m.

    As few parts as the device's work groups allow, for any m; one part needs no copy.
    """
    inner, m = g.sizes(block)[:2]
    parts = list(even_parts(m, g.session.columns, ALIGNED))
    if len(parts) == 1:
        return g.mul_mat(block, matrix) if last else g.mul_mat(matrix, block)
    rows = g.sizes(matrix)[1]
    out = g.room(m, rows) if last else g.room(rows, m)
    for start, count in parts:
        piece = g.view(block, (inner, count), (inner,), start * inner)
        made = g.mul_mat(piece, matrix) if last else g.mul_mat(matrix, piece)
        into = g.view(out, (count, rows), (m,), start) if last else g.view(out, (rows, count), (rows,), start * rows)
        g.copy(made, into)
    return out


def even_parts(items: int, limit: int, unit: int = 1) -> Iterator[tuple[int, int]]:
    """(start, count) of as few even parts as the limit allows, each a multiple of ``unit`` but the last.

    Any number of items will do, a prime too: at most one part more than without the unit, where the limit is
    larger than a few units.
    """
    whole = limit if items <= limit else max(unit, limit // unit * unit)
    parts = max(1, math.ceil(items / max(1, whole)))
    size = min(whole, math.ceil(items / parts / unit) * unit) if parts > 1 else items
    for start in range(0, max(1, items), max(1, size)):
        yield start, min(size, items - start)
