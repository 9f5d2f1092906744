"""Each fault on a case by hand where it differs from the truth, and on one where it must not.

The input reads the weight off: an identity for a linear layer, powers of ten for a convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fulldiff.cases.model import Layer
from fulldiff.reference.faults import FAULTS
from fulldiff.reference.truth import Factors, Truth


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def lokr(strength: float = 1.0, **tensors: Any) -> Factors:
    """A LoKr from literals: ``w1``, ``w2_a``, ``t2`` …, and ``alpha``."""
    named = {k if k == "alpha" else f"lokr_{k}": f64(v) for k, v in tensors.items()}
    return Factors("lokr", named, strength)


def lora(strength: float = 1.0, **tensors: Any) -> Factors:
    """A LoRA or LoCon from literals: ``up``, ``down``, ``mid`` and ``alpha``."""
    named = {k if k == "alpha" else f"lora_{k}.weight": f64(v) for k, v in tensors.items()}
    return Factors("lora", named, strength)


def conv(out: int, inp: int, *kernel: int, **more: Any) -> Layer:
    """A convolution; ``stride`` and its like are given for one spatial dimension."""
    defaults = {"stride": 1, "padding": 0, "dilation": 1}
    sizes = {name: (more.pop(name, value),) * len(kernel) for name, value in defaults.items()}
    return Layer(f"conv{len(kernel)}d", out, inp, kernel, **sizes, **more)


def reading(layer: Layer) -> Tensor:
    """An input whose output shows every number of the weight."""
    if layer.kind == "linear":
        return torch.eye(layer.inp, dtype=torch.float64)
    places = torch.arange(torch.Size((layer.inp, *layer.kernel)).numel(), dtype=torch.float64)
    return (10**places).reshape(1, layer.inp, *layer.kernel)


@dataclass(frozen=True)
class Setting:
    """A layer (base weight 0 and no bias unless given), its adapters and an input."""

    layer: Layer
    adapters: tuple[Factors, ...]
    x: Any = None
    weight: Any = None
    bias: Any = None

    def run(self, truth: Truth) -> Tensor:
        x = reading(self.layer) if self.x is None else f64(self.x)
        weight = torch.zeros(self.layer.weight_shape, dtype=torch.float64)
        weight = weight if self.weight is None else f64(self.weight)
        bias = None if self.bias is None else f64(self.bias)
        return truth.forward(self.layer, weight, bias, self.adapters, x)


class Pair(NamedTuple):
    """Where the fault shows, and the nearest case where it does not."""

    differs: Setting
    equals: Setting


def linear(out: int, inp: int, *adapters: Factors, **more: Any) -> Setting:
    return Setting(Layer("linear", out, inp), adapters, **more)


def rank2(alpha: float | None = None, strength: float = 1.0) -> Setting:
    """A LoRA of rank 2 on 3 inputs: ΔW = scale · [[1, 2, 3], [4, 5, 6]]."""
    scale = {} if alpha is None else {"alpha": alpha}
    return linear(2, 3, lora(strength, up=[[1, 0], [0, 1]], down=[[1, 2, 3], [4, 5, 6]], **scale))


def rank1(alpha: float | None = None) -> Setting:
    """A LoRA of rank 1 on 2 inputs."""
    return linear(2, 2, lora(up=[[1], [2]], down=[[3, 4]], **({} if alpha is None else {"alpha": alpha})))


def square_tucker(core: Any, a: Any, b: Any) -> Setting:
    return Setting(conv(2, 2, 1), (lokr(w1=[[1]], t2=core, w2_a=a, w2_b=b),))


def both_full(alpha: float) -> Setting:
    return linear(1, 2, lokr(w1=[[1]], w2=[[3, 4]], alpha=alpha))


def kron(w1: Any, w2: Any) -> Setting:
    """A linear layer with both factors full."""
    return linear(len(w1) * len(w2), len(w1[0]) * len(w2[0]), lokr(w1=w1, w2=w2))


def strided(stride: int, *kernel: float) -> Setting:
    layer = conv(1, 1, len(kernel), stride=stride)
    return Setting(layer, (lokr(w1=[[1]], w2=[[kernel]]),), x=[[[1, 2, 3, 4]]])


def padded(mode: str) -> Setting:
    layer = conv(1, 1, 3, padding=1, padding_mode=mode)
    return Setting(layer, (lokr(w1=[[1]], w2=[[[1, 1, 1]]]),), x=[[[1, 2, 3, 4]]])


def dilated(dilation: int) -> Setting:
    layer = conv(1, 1, 2, dilation=dilation)
    return Setting(layer, (lokr(w1=[[1]], w2=[[[1, 1]]]),), x=[[[1, 2, 4, 8]]])


def grouped(first: float, second: float) -> Setting:
    layer = conv(2, 2, 1, groups=2)
    return Setting(layer, (lora(up=[[1], [3]], down=[[1]]),), x=[[[first], [second]]])


EYE = [[1, 0], [0, 1]]
ONE, TWO = lokr(w1=[[1]], w2=[[1, 2]]), lokr(2.0, w1=[[1]], w2=[[3, 4]])
KNOWN_CONV1D = Setting(conv(1, 4, 2), (lokr(w1=[[1, 2]], w2=[[[1, 2], [3, 4]]]),))

PAIRS = {
    "scale-twice": Pair(rank2(alpha=4), rank2(alpha=2)),
    "scale-ignored": Pair(rank2(alpha=4), rank2(alpha=2)),
    "alpha-not-divided": Pair(rank2(alpha=4), rank1(alpha=4)),
    "missing-alpha-is-one": Pair(rank2(), rank2(alpha=4)),
    "both-full-scaled": Pair(both_full(alpha=4), rank2(alpha=4)),
    "rank-from-in-features": Pair(rank2(alpha=6), linear(1, 2, lora(up=[[1, 1]], down=[[1, 2], [3, 4]], alpha=6))),
    "rank-one-unscaled": Pair(rank1(alpha=4), rank2(alpha=4)),
    "strength-ignored": Pair(rank2(strength=2), rank2(strength=1)),
    "strength-squared": Pair(rank2(strength=2), rank2(strength=1)),
    "strength-unsigned": Pair(rank2(strength=-1), rank2(strength=2)),
    "kron-swapped": Pair(kron([[1, 2]], [[3, 4]]), kron([[1, 2]], [[1], [3]])),
    "w1-transposed": Pair(kron([[1, 2], [3, 4]], [[1]]), kron([[1, 2]], [[1, 2], [3, 4]])),
    "w2-transposed": Pair(kron([[1]], [[1, 2], [3, 4]]), kron([[1, 2], [3, 4]], [[1, 2]])),
    "w2-a-then-b": Pair(
        linear(2, 2, lokr(w1=[[1]], w2_a=[[1, 1], [0, 1]], w2_b=[[1, 0], [1, 1]])),
        linear(2, 2, lokr(w1=[[1]], w2_a=[[1], [2]], w2_b=[[3, 4]])),
    ),
    "kernel-not-last": Pair(
        Setting(conv(1, 2, 2), (lokr(w1=[[1]], w2_a=[[1]], w2_b=[[1, 2, 3, 4]]),)),
        Setting(conv(1, 2, 2), (lokr(w1=[[1, 2]], w2_a=[[1]], w2_b=[[1, 2]]),)),
    ),
    "kron-not-unsqueezed": Pair(KNOWN_CONV1D, Setting(conv(1, 4, 1, 1), (lokr(w1=[[1, 2]], w2=[[[[1]], [[2]]]]),))),
    "tucker-core-ignored": Pair(
        square_tucker([[[1], [2]], [[3], [4]]], EYE, EYE),
        square_tucker([[[1], [0]], [[0], [1]]], [[1, 2], [3, 4]], EYE),
    ),
    "tucker-core-transposed": Pair(
        square_tucker([[[1], [2]], [[3], [4]]], EYE, EYE),
        square_tucker([[[1], [2]], [[2], [3]]], [[1, 2], [3, 4]], EYE),
    ),
    "tucker-a-not-transposed": Pair(
        square_tucker([[[1], [0]], [[0], [1]]], [[1, 2], [3, 4]], EYE),
        square_tucker([[[1], [2]], [[3], [4]]], [[1, 2], [2, 3]], EYE),
    ),
    "kernel-flipped": Pair(
        Setting(conv(1, 1, 2), (lokr(w1=[[1]], w2=[[[1, 2]]]),)),
        Setting(conv(1, 1, 2), (lokr(w1=[[1]], w2=[[[3, 3]]]),)),
    ),
    "kernel-axes-swapped": Pair(
        Setting(conv(1, 1, 2, 2), (lokr(w1=[[1]], w2=[[[[1, 2], [3, 4]]]]),)),
        Setting(conv(1, 1, 2, 2), (lokr(w1=[[1]], w2=[[[[1, 2], [2, 3]]]]),)),
    ),
    "first-adapter-only": Pair(linear(1, 2, ONE, TWO), linear(1, 2, TWO)),
    "last-strength-for-all": Pair(linear(1, 2, ONE, TWO), linear(1, 2, TWO, TWO)),
    "delta-replaces-base": Pair(linear(1, 2, ONE, weight=[[5, 6]]), linear(1, 2, ONE)),
    "bias-twice": Pair(linear(1, 2, ONE, bias=[7]), linear(1, 2, ONE, bias=[0])),
    "delta-padding-mode-zeros": Pair(padded("circular"), padded("zeros")),
    "delta-dilation-ignored": Pair(dilated(2), dilated(1)),
    "stride-before-kernel": Pair(strided(2, 1, 1), strided(2, 1)),
    "first-group-input": Pair(grouped(1, 2), grouped(2, 2)),
    "first-batch-only": Pair(linear(1, 2, ONE, x=[[1, 1], [1, 2]]), linear(1, 2, ONE, x=[[1, 1]])),
}


def test_the_table_covers_the_faults_exactly() -> None:
    assert PAIRS.keys() == FAULTS.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_the_fault_differs_from_the_truth(name: str) -> None:
    setting = PAIRS[name].differs
    wrong, right = setting.run(FAULTS[name]), setting.run(Truth())
    assert wrong.shape == right.shape
    assert wrong.isfinite().all()
    assert not torch.equal(wrong, right)


@pytest.mark.parametrize("name", PAIRS)
def test_the_fault_is_the_truth_where_its_step_does_not_matter(name: str) -> None:
    setting = PAIRS[name].equals
    right = setting.run(Truth())
    assert torch.equal(setting.run(FAULTS[name]), right)
    assert right.any()


@pytest.mark.parametrize("name", FAULTS)
def test_without_adapters_a_fault_is_the_truth(name: str) -> None:
    setting = linear(1, 2, weight=[[5, 6]], bias=[7])
    assert setting.run(FAULTS[name]).tolist() == [[12], [13]]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_says_what_goes_wrong(name: str) -> None:
    kind = type(FAULTS[name])
    assert "__doc__" in vars(kind)
    assert kind.__doc__


# Wrong values by hand: what the fault gives, and what is right.

VALUES = {
    "scale-twice": ([[4, 8, 12], [16, 20, 24]], [[2, 4, 6], [8, 10, 12]]),
    "missing-alpha-is-one": ([[0.5, 1, 1.5], [2, 2.5, 3]], [[1, 2, 3], [4, 5, 6]]),
    "kron-swapped": ([[3, 6, 4, 8]], [[3, 4, 6, 8]]),
    "w2-a-then-b": ([[1, 1], [1, 2]], [[2, 1], [1, 1]]),
    "kernel-not-last": ([[[1, 3], [2, 4]]], [[[1, 2], [3, 4]]]),
    "kron-not-unsqueezed": ([[[1, 2], [2, 4], [3, 4], [6, 8]]], [[[1, 2], [3, 4], [2, 4], [6, 8]]]),
    "kernel-flipped": ([[[2, 1]]], [[[1, 2]]]),
    "kernel-axes-swapped": ([[[[1, 3], [2, 4]]]], [[[[1, 2], [3, 4]]]]),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_wrong_delta_by_hand(name: str) -> None:
    setting, (wrong, right) = PAIRS[name].differs, VALUES[name]
    shape = setting.layer.weight_shape
    assert FAULTS[name].delta(setting.adapters[0], shape).tolist() == wrong
    assert Truth().delta(setting.adapters[0], shape).tolist() == right


OUTPUTS = {
    "delta-padding-mode-zeros": ([3, 6, 9, 7], [7, 6, 9, 8]),
    "delta-dilation-ignored": ([3, 6], [5, 10]),
    "stride-before-kernel": ([4, 0], [3, 7]),
    "first-group-input": ([1, 3], [1, 6]),
    "first-batch-only": ([3, 0], [3, 5]),
    "bias-twice": ([15, 16], [8, 9]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_wrong_output_by_hand(name: str) -> None:
    setting, (wrong, right) = PAIRS[name].differs, OUTPUTS[name]
    assert setting.run(FAULTS[name]).flatten().tolist() == wrong
    assert setting.run(Truth()).flatten().tolist() == right


@pytest.mark.parametrize(("alpha", "ratio"), [(8, 4), (2, 1), (1, 0.5)])
def test_scale_twice_over_the_truth_is_alpha_over_rank(alpha: float, ratio: float) -> None:
    setting = rank2(alpha=alpha)
    assert torch.equal(setting.run(FAULTS["scale-twice"]), ratio * setting.run(Truth()))


@pytest.mark.parametrize("name", ["kernel-flipped", "kernel-axes-swapped", "kernel-not-last"])
def test_kernel_faults_show_in_a_low_rank_lokr_and_in_a_locon(name: str) -> None:
    flat = [[1, 2, 3, 4, 5, 6, 7, 8]]
    for adapter in (lokr(w1=[[1]], w2_a=[[1]], w2_b=flat), lora(up=[[1]], down=flat)):
        setting = Setting(conv(1, 2, 2, 2), (adapter,))
        assert not torch.equal(setting.run(FAULTS[name]), setting.run(Truth()))
