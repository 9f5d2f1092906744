"""The written-out layers: 1-D convolutions by hand, then agreement with torch's own operators."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fulldiff.cases.model import Layer
from fulldiff.reference.layers import apply, pad

CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
MODULE: dict[int, Any] = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
MODES = ("zeros", "reflect", "replicate", "circular")
SIZES, KERNEL = (7, 6, 5), (3, 2, 3)


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def integers(*shape: int) -> Tensor:
    """Different small integers of both signs in a fixed order."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return ((count * 37 + 11) % 23 - 11).reshape(shape)


def fractions(*shape: int) -> Tensor:
    """Numbers in [−1, 1] that are not representable: sums of them round."""
    return integers(*shape) / 11


def conv1d(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, **more: Any) -> Layer:
    """A 1-D convolution of one channel unless told otherwise."""
    sizes = {"out": 1, "inp": 1} | more
    return Layer(
        "conv1d",
        kernel=(kernel,),
        stride=(stride,),
        padding=(padding,),
        dilation=(dilation,),
        **sizes,
    )


# By hand. x is 1 2 3 4 5 and the kernel [100, 10, 1] gives the window's numbers as digits.

DIGITS = {
    "plain": (conv1d(3), [123, 234, 345]),
    "stride 2": (conv1d(3, stride=2), [123, 345]),
    "stride 3": (conv1d(3, stride=3), [123]),
    "padding 1": (conv1d(3, padding=1), [12, 123, 234, 345, 450]),
    "padding 2, stride 2": (conv1d(3, stride=2, padding=2), [1, 123, 345, 500]),
    "dilation 2": (conv1d(3, dilation=2), [135]),
    "dilation 2, padding 2": (conv1d(3, padding=2, dilation=2), [13, 24, 135, 240, 350]),
    "dilation 2, padding 2, stride 2": (conv1d(3, stride=2, padding=2, dilation=2), [13, 135, 350]),
    "reflect 2": (
        conv1d(3, padding=2, padding_mode="reflect"),
        [321, 212, 123, 234, 345, 454, 543],
    ),
    "replicate 2": (
        conv1d(3, padding=2, padding_mode="replicate"),
        [111, 112, 123, 234, 345, 455, 555],
    ),
    "circular 2": (
        conv1d(3, padding=2, padding_mode="circular"),
        [451, 512, 123, 234, 345, 451, 512],
    ),
    "circular 1, stride 2": (
        conv1d(3, stride=2, padding=1, padding_mode="circular"),
        [512, 234, 451],
    ),
}


@pytest.mark.parametrize("name", DIGITS)
def test_conv1d_by_hand(name: str) -> None:
    layer, expected = DIGITS[name]
    y = apply(layer, f64([[[100, 10, 1]]]), None, f64([[[1, 2, 3, 4, 5]]]))
    assert y.tolist() == [[expected]]


def test_two_groups_by_hand() -> None:
    """Output 0 sees inputs 0 and 1, output 1 sees inputs 2 and 3."""
    layer = conv1d(2, out=2, inp=4, groups=2)
    weight = f64([[[1, 0], [0, 10]], [[100, 0], [0, 1]]])
    x = f64([[[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 3, 5]]])
    assert apply(layer, weight, None, x).tolist() == [[[51, 62], [703, 805]]]


def test_channels_sum_and_bias_is_per_output_channel() -> None:
    layer = conv1d(1, out=2, inp=2)
    y = apply(layer, f64([[[1], [10]], [[2], [0]]]), f64([1000, -1]), f64([[[1, 2], [3, 4]]]))
    assert y.tolist() == [[[1031, 1042], [1, 3]]]


def test_conv2d_by_hand_height_before_width() -> None:
    ones = (1, 1)
    layer = Layer("conv2d", 1, 1, kernel=(2, 1), stride=(1, 2), padding=(0, 0), dilation=ones)
    x = f64([[[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]])
    assert apply(layer, f64([[[[10], [1]]]]), None, x).tolist() == [[[[14, 36], [47, 69]]]]


def test_linear_by_hand() -> None:
    layer = Layer("linear", out=2, inp=3)
    y = apply(layer, f64([[1, 2, 3], [0, -1, 0]]), f64([10, 20]), f64([1, 2, 3]))
    assert y.tolist() == [24, 18]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("zeros", [0, 0, 1, 2, 3, 0, 0]),
        ("reflect", [3, 2, 1, 2, 3, 2, 1]),
        ("replicate", [1, 1, 1, 2, 3, 3, 3]),
        ("circular", [2, 3, 1, 2, 3, 1, 2]),
    ],
)
def test_padding_by_hand(mode: Any, expected: list[float]) -> None:
    layer = conv1d(1, padding=2, padding_mode=mode)
    assert pad(layer, f64([[[1, 2, 3]]])).tolist() == [[expected]]


# Errors: a size of 1 must not be broadcast.


@pytest.mark.parametrize(
    ("layer", "weight", "x"),
    [
        (Layer("linear", out=2, inp=3), (2, 3), (4, 1)),
        (Layer("linear", out=2, inp=1), (2, 1), (4, 3)),
        (conv1d(1, out=2, inp=3), (2, 3, 1), (1, 1, 4)),
        (conv1d(1, out=2, inp=4, groups=2), (2, 2, 1), (1, 2, 4)),
    ],
)
def test_a_wrong_channel_count_is_an_error(layer: Layer, weight: tuple[int, ...], x: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="channels"):
        apply(layer, integers(*weight), None, integers(*x))


# Agreement with torch.


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups", "batch"),
    list(itertools.product((1, 2), (0, 1), (1, 2), (1, 2), (0, 2))),
)
def test_convolution_is_torchs(dims: int, stride: int, padding: int, dilation: int, groups: int, batch: int) -> None:
    kernel = KERNEL[:dims]
    each = [(n,) * dims for n in (stride, padding, dilation)]
    layer = Layer(f"conv{dims}d", 6, 4, kernel, *each, groups=groups)
    weight, bias = fractions(*layer.weight_shape), fractions(6)
    x = fractions(batch, 4, *SIZES[:dims])
    expected = CONV[dims](x, weight, bias, stride, padding, dilation, groups)
    torch.testing.assert_close(apply(layer, weight, bias, x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", [1, 2])
def test_padding_mode_is_torchs(dims: int, mode: Any, stride: int) -> None:
    """Each dimension has a padding, stride and dilation of its own."""
    padding, strides, dilation = (2, 1, 2)[:dims], (stride, 1, stride)[:dims], (1, 2, 1)[:dims]
    kernel = KERNEL[:dims]
    layer = Layer(f"conv{dims}d", 2, 4, kernel, strides, padding, dilation, mode, groups=2)
    module: Any = MODULE[dims](4, 2, kernel, strides, padding, dilation, 2, True, mode).double()
    weight, bias, x = fractions(*layer.weight_shape), fractions(2), fractions(2, 4, *SIZES[:dims])
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
        torch.testing.assert_close(apply(layer, weight, bias, x), module(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
def test_linear_takes_any_leading_dimensions(leading: tuple[int, ...], with_bias: bool) -> None:
    weight, bias = fractions(4, 5), fractions(4) if with_bias else None
    x = fractions(*leading, 5)
    y = apply(Layer("linear", 4, 5), weight, bias, x)
    torch.testing.assert_close(y, functional.linear(x, weight, bias), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", [Layer("linear", 4, 3), conv1d(2, out=4, inp=3)])
def test_a_transposed_input_gives_the_same(layer: Layer) -> None:
    weight, x = integers(*layer.weight_shape), integers(3, 3, 3)
    assert torch.equal(apply(layer, weight, None, x.mT), apply(layer, weight, None, x.mT.contiguous()))
