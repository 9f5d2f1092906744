"""For each fault a case by hand where it differs from the truth, and one where it must not.

The input reads the weight off: an identity for a linear layer, powers of ten for a convolution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulldiff.cases.model import Layer
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


def other(kind: str, strength: float = 1.0, rows: tuple[int, int] | None = None, **tensors: Any) -> Factors:
    """Any adapter from literals, named as in a file but for ``up`` and ``down``."""
    named = {f"lora_{name}.weight" if name in ("up", "down") else name: f64(v) for name, v in tensors.items()}
    return Factors(kind, named, strength, rows=rows)


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

    def input(self) -> Tensor:
        return reading(self.layer) if self.x is None else f64(self.x)

    def run(self, truth: Truth) -> Tensor:
        weight = torch.zeros(self.layer.weight_shape, dtype=torch.float64)
        weight = weight if self.weight is None else f64(self.weight)
        bias = None if self.bias is None else f64(self.bias)
        return truth.forward(self.layer, weight, bias, self.adapters, self.input())


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


def padded(mode: str, weight: Any = (0, 0, 0)) -> Setting:
    layer = conv(1, 1, 3, padding=1, padding_mode=mode)
    return Setting(layer, (lokr(w1=[[1]], w2=[[[1, 1, 1]]]),), x=[[[1, 2, 3, 4]]], weight=[[weight]])


def dilated(dilation: int) -> Setting:
    layer = conv(1, 1, 2, dilation=dilation)
    return Setting(layer, (lokr(w1=[[1]], w2=[[[1, 1]]]),), x=[[[1, 2, 4, 8]]])


def dilated_lora() -> Setting:
    layer = conv(1, 1, 2, dilation=2)
    return Setting(layer, (lora(up=[[1]], down=[[[1, 1]]]), lokr(w1=[[1]], w2=[[[1, 1]]])), x=[[[1, 2, 4, 8]]])


def grouped(first: float, second: float) -> Setting:
    layer = conv(2, 2, 1, groups=2)
    return Setting(layer, (lora(up=[[1], [3]], down=[[1]]),), x=[[[first], [second]]])


def grouped_lokr(*x: float) -> Setting:
    """ΔW = [[1, 2], [5, 10], [3, 4], [15, 20]], of two groups."""
    layer = conv(4, 4, 1, groups=2)
    return Setting(layer, (lokr(w1=[[1, 2], [3, 4]], w2=[[[1]], [[5]]]),), x=[[[value] for value in x]])


EYE = [[1, 0], [0, 1]]
ONES = [[1, 1], [1, 1]]


def loha(w1_a: Any, w1_b: Any, w2_a: Any, w2_b: Any) -> Setting:
    factors = {"hada_w1_a": w1_a, "hada_w1_b": w1_b, "hada_w2_a": w2_a, "hada_w2_b": w2_b}
    return linear(len(w1_a), len(w1_b[0]), other("loha", **factors))


def tucker_loha(core1: Any, core2: Any, a: Any, b: Any) -> Setting:
    """A Tucker LoHa of rank 2 on two channels; w2's a and b are identities."""
    factors = {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": EYE, "hada_w2_b": EYE}
    return Setting(conv(2, 2, 1), (other("loha", **factors, hada_t1=core1, hada_t2=core2),))


def dora(magnitude: Any, strength: float = 1.0, weight: Any = ((1, 2), (1, 0)), alpha: float = 1) -> Setting:
    """V = W + alpha · [[2, 2], [3, 3]]: [[3, 4], [4, 3]] unless W or alpha is another."""
    one = other("lora", strength, up=[[2], [3]], down=[[1, 1]], alpha=alpha, dora_scale=magnitude)
    return linear(2, 2, one, weight=weight)


def behind(first: bool) -> Setting:
    """The DoRA of ``dora([5, 10])`` before or behind a diff: (3, 4), (4, 3) more."""
    found = dora([5, 10])
    both = (other("diff", diff=[[3, 4], [4, 3]]), found.adapters[0])
    return replace(found, adapters=both[::-1] if first else both)


def dora_conv(*down: float) -> Setting:
    """A kernel of two on one channel, from zero: V is ``down``."""
    return Setting(conv(1, 1, 2), (other("lora", up=[[1]], down=[down], dora_scale=[10]),))


def fused(*parts: Factors, out: int = 4) -> Setting:
    """Parts of a fused layer with one input."""
    return linear(out, 1, *parts)


def q(rank: int = 1, start: int = 0) -> Factors:
    """Two rows of a fused layer: ΔW = [[1 + … + rank], [the same]]."""
    return other("lora", 1.0, (start, start + 2), up=[[*range(1, rank + 1)]] * 2, down=[[1]] * rank)


def one_row(row: int, value: float = 5) -> Factors:
    return other("diff", 1.0, (row, row + 1), diff=[[value]])


def biased(strength: float = 1.0, alpha: float = 1, bias: Any = None) -> Setting:
    """A LoRA of scale ``alpha`` with diff_b, read where x is 0 and where it is 1."""
    one = other("lora", strength, up=[[1]], down=[[1]], alpha=alpha, diff_b=[3])
    return linear(1, 1, one, x=[[0], [1]], bias=bias)


DIFF = other("diff", diff=[[1, 2]])
SCALED = {"up": [[1, 1]], "down": [[1, 2], [3, 4]], "alpha": 6}
ONE, TWO = lokr(w1=[[1]], w2=[[1, 2]]), lokr(2.0, w1=[[1]], w2=[[3, 4]])
KNOWN_CONV1D = Setting(conv(1, 4, 2), (lokr(w1=[[1, 2]], w2=[[[1, 2], [3, 4]]]),))

PAIRS = {
    "scale-twice": Pair(rank2(alpha=4), rank2(alpha=2)),
    "scale-twice-but-lora": Pair(
        linear(2, 3, lokr(w1=[[1]], w2_a=EYE, w2_b=[[1, 2, 3], [4, 5, 6]], alpha=4)), rank2(alpha=4)
    ),
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
    "last-adapter-only": Pair(linear(1, 2, ONE, TWO), linear(1, 2, TWO)),
    "last-strength-for-all": Pair(linear(1, 2, ONE, TWO), linear(1, 2, TWO, TWO)),
    "delta-replaces-base": Pair(linear(1, 2, ONE, weight=[[5, 6]]), linear(1, 2, ONE)),
    "bias-twice": Pair(linear(1, 2, ONE, bias=[7]), linear(1, 2, ONE, bias=[0])),
    "delta-padding-mode-zeros": Pair(padded("circular"), padded("zeros")),
    "padding-mode-zeros": Pair(padded("circular", (1, 0, 0)), padded("zeros", (1, 0, 0))),
    "delta-dilation-ignored": Pair(dilated(2), dilated(1)),
    "lora-dilation-ignored": Pair(dilated_lora(), dilated(2)),
    "stride-before-kernel": Pair(strided(2, 1, 1), strided(2, 1)),
    "first-group-input": Pair(grouped(1, 2), grouped(2, 2)),
    "kron-groups-in-w2": Pair(grouped_lokr(1, 10, 100, 1000), grouped_lokr(1, 1, 1, 1)),
    "first-batch-only": Pair(linear(1, 2, ONE, x=[[1, 1], [1, 2]]), linear(1, 2, ONE, x=[[1, 1]])),
    "scale-in-f32": Pair(rank2(strength=0.7), rank2(strength=0.75)),
    "scale-tensor-ignored": Pair(
        linear(1, 2, other("lora", **SCALED, scale=5)), linear(1, 2, other("lora", **SCALED, scale=3))
    ),
    "diff-scaled": Pair(linear(1, 2, other("diff", diff=[[1, 2]], alpha=3)), linear(1, 2, DIFF)),
    "orphan-alpha-applied": Pair(linear(1, 2, other("diff", diff=[[1, 2]], alpha=3)), rank2(alpha=4)),
    "bias-delta-scaled": Pair(biased(alpha=2), biased(alpha=1)),
    "loha-matrix-product": Pair(loha(ONES, EYE, EYE, [[1, 2], [3, 4]]), loha([[1]], [[1, 2]], [[1]], [[3, 4]])),
    "loha-sum": Pair(loha([[1]], [[1, 2]], [[1]], [[3, 4]]), loha([[1]], [[2, 2]], [[1]], [[2, 2]])),
    "loha-second-ignored": Pair(loha([[1]], [[1, 2]], [[1]], [[3, 4]]), loha([[1]], [[1, 2]], [[1]], [[1, 1]])),
    "loha-tucker-swapped": Pair(
        tucker_loha([[[1], [2]], [[3], [4]]], [[[1], [1]], [[1], [1]]], [[1, 2], [3, 4]], EYE),
        tucker_loha([[[1], [2]], [[3], [4]]], [[[1], [1]], [[1], [1]]], EYE, EYE),
    ),
    "loha-tucker-cores-swapped": Pair(
        tucker_loha([[[1], [2]], [[3], [4]]], [[[1], [1]], [[1], [1]]], [[1, 2], [3, 4]], EYE),
        tucker_loha([[[1], [2]], [[3], [4]]], [[[1], [2]], [[3], [4]]], [[1, 2], [3, 4]], EYE),
    ),
    "dora-magnitude-ignored": Pair(dora([5, 10]), dora([5, 5])),
    "dora-wrong-axis": Pair(dora([[5], [10]], weight=[[1, 2], [2, 1]]), dora([[5], [10]])),
    "dora-row-magnitude-along-inputs": Pair(dora([5, 10]), dora([[5], [10]])),
    "dora-norm-of-base": Pair(dora([5, 10]), dora([5, 10], weight=[[3, 4], [4, 3]], alpha=0)),
    "dora-norm-of-delta": Pair(dora([5, 10]), dora([5, 10], weight=((0, 0), (0, 0)))),
    "dora-norm-per-kernel-position": Pair(dora_conv(3, 4), dora_conv(5, 0)),
    "dora-strength-inside": Pair(dora([5, 10], strength=2), dora([5, 10])),
    "dora-strength-ignored": Pair(dora([5, 10], strength=2), dora([5, 10])),
    "dora-strength-on-magnitude": Pair(dora([5, 10], strength=2), dora([5, 10])),
    "dora-base-not-removed": Pair(dora([5, 10]), dora([5, 10], weight=((0, 0), (0, 0)))),
    "dora-of-current": Pair(behind(False), behind(True)),
    "dora-scales-earlier": Pair(behind(False), behind(True)),
    "lokr-ignored": Pair(linear(1, 2, ONE, DIFF), linear(1, 2, DIFF)),
    "first-kind-only": Pair(linear(1, 2, ONE, DIFF), linear(1, 2, ONE, TWO)),
    "bias-delta-ignored": Pair(biased(), linear(1, 2, ONE)),
    "bias-delta-needs-bias": Pair(biased(), biased(bias=[1])),
    "bias-delta-not-multiplied": Pair(biased(strength=2), biased(strength=1)),
    "fused-rows-packed": Pair(fused(q(), one_row(3)), fused(q(), one_row(2))),
    "fused-part-after-gap-dropped": Pair(fused(q(), one_row(3)), fused(q(), one_row(2))),
    "fused-equal-parts": Pair(fused(one_row(0), q(start=1)), fused(q(), one_row(3))),
    "fused-down-split": Pair(fused(q(rank=2)), linear(2, 1, q(rank=2))),
}
