"""Subjects ``fault:NAME``: a known wrong way to compute, run where a correct one should be."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fulldiff.cases.model import Layer
from fulldiff.harness.subjects.base import Adapter, Detach, Subject, replace_forward
from fulldiff.harness.subjects.registry import SubjectError
from fulldiff.reference.faults import FAULTS
from fulldiff.reference.faults.scale import ScaleOff
from fulldiff.reference.truth import Factors, Truth

SCALE_OFF = "scale-off-"


class Faulty(Subject):
    """One of the reference's named faults, on any layer."""

    def __init__(self, name: str) -> None:
        if name.startswith(SCALE_OFF):
            self.truth: Truth = ScaleOff(float(name.removeprefix(SCALE_OFF)))
        elif name in FAULTS:
            self.truth = FAULTS[name]
        else:
            raise SubjectError(f"no fault {name!r}: use one of {', '.join(FAULTS)}, {SCALE_OFF}SHARE")

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        layer, weight, bias = layer_of(module), module.weight, module.bias
        assert isinstance(weight, Tensor)
        wide = [
            Factors(a.kind, {n: t.double() for n, t in a.tensors.items()}, a.strength, rows=a.rows) for a in adapters
        ]
        wide_bias = bias.double() if isinstance(bias, Tensor) else None

        def forward(x: Tensor) -> Tensor:
            return self.truth.forward(layer, weight.double(), wide_bias, wide, x.double()).to(x.dtype)

        return replace_forward(module, forward)


def layer_of(module: nn.Module) -> Layer:
    """The layer's description, read off the torch module."""
    if isinstance(module, nn.Linear):
        return Layer("linear", module.out_features, module.in_features, bias=module.bias is not None)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    kinds = {nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d"}
    return Layer(
        kinds[type(module)], module.out_channels, module.in_channels, module.kernel_size, module.stride,  # type: ignore[arg-type]
        module.padding, module.dilation, module.padding_mode, module.groups, module.bias is not None,  # type: ignore[arg-type]
    )  # fmt: skip
