"""A convolution layer's own computation with another weight, shared by our runtime subjects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: nn.functional.conv1d,
    nn.Conv2d: nn.functional.conv2d,
    nn.Conv3d: nn.functional.conv3d,
}


def convolve(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """The layer's convolution (its stride, padding, dilation) with another weight, one group, no bias."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding: Any = module.padding
    if module.padding_mode != "zeros":
        x = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = 0
    return CONVOLUTIONS[type(module)](x, weight, None, module.stride, padding, module.dilation)
