"""Linear and convolution layers written out as sums, without torch's own operators for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Protocol

import torch
from torch import Tensor


class LayerLike(Protocol):
    """What the reference needs to know of a layer (one entry per spatial dimension)."""

    @property
    def kind(self) -> str: ...
    @property
    def kernel(self) -> Sequence[int]: ...
    @property
    def stride(self) -> Sequence[int]: ...
    @property
    def padding(self) -> Sequence[int]: ...
    @property
    def dilation(self) -> Sequence[int]: ...
    @property
    def padding_mode(self) -> str: ...
    @property
    def groups(self) -> int: ...


def apply(layer: LayerLike, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """y = weight · x + bias.

    Linear: x (…, in), weight (out, in) → (…, out). Convolution: x (batch, in, *spatial), weight
    (out, in / groups, *kernel) → (batch, out, *spatial out), as torch.nn.ConvNd defines it.
    """
    inputs, channels = weight.shape[1] * layer.groups, x.shape[-1 if layer.kind == "linear" else 1]
    if channels != inputs:  # einsum would broadcast a size of 1
        raise ValueError(f"x {tuple(x.shape)} has {channels} channels, the layer takes {inputs}")
    if layer.kind == "linear":
        y = torch.einsum("...i,oi->...o", x, weight)
        return y if bias is None else y + bias
    y = convolve(layer, weight, x)
    return y if bias is None else y + bias.reshape(-1, *[1] * len(layer.kernel))


def convolve(layer: LayerLike, weight: Tensor, x: Tensor) -> Tensor:
    """The sum over kernel offsets of weight[offset] · (x shifted by that offset)."""
    x = pad(layer, x)
    steps = list(zip(x.shape[2:], layer.kernel, layer.stride, layer.dilation, strict=True))
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in steps]
    grouped_x = x.unflatten(1, (layer.groups, -1))
    grouped_w = weight.unflatten(0, (layer.groups, -1))
    y = x.new_zeros(x.shape[0], *grouped_w.shape[:2], *sizes)
    for offset in product(*map(range, layer.kernel)):
        window = [
            slice(o * d, o * d + s * (n - 1) + 1, s) for o, n, (_, _, s, d) in zip(offset, sizes, steps, strict=True)
        ]
        shifted = grouped_x[(..., *window)]
        y += torch.einsum("gof,ngf...->ngo...", grouped_w[(..., *offset)], shifted)
    return y.flatten(1, 2)


def pad(layer: LayerLike, x: Tensor) -> Tensor:
    """x padded on both sides of each spatial dimension in the layer's padding mode."""
    for dim, width in enumerate(layer.padding, start=2):
        if layer.padding_mode == "zeros":
            edge = x.new_zeros([width if d == dim else n for d, n in enumerate(x.shape)])
            x = torch.cat([edge, x, edge], dim)
        else:
            x = x.index_select(dim, _source_index(layer.padding_mode, x.shape[dim], width))
    return x


def _source_index(mode: str, size: int, width: int) -> Tensor:
    """For each padded position the position it copies: ``reflect`` does not repeat the edge."""
    at = torch.arange(-width, size + width)
    if mode == "circular":
        return at % size
    if mode == "replicate":
        return at.clamp(0, size - 1)
    if mode == "reflect":
        return (size - 1) - ((size - 1) - at.abs()).abs()
    raise ValueError(f"padding mode {mode!r}: use zeros, reflect, replicate or circular")
