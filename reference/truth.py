"""The truth: factors → ΔW → W' = W + Σ strength · scale · ΔW → y = W' x, all in float64.

Conventions (LyCORIS files; see README "Conventions"):

- LoKr: ΔW[i·vp+j, k·vq+l, …] = w1[i,k] · w2[j,l,…] with w1 (up, uq), w2 (vp, vq, *kernel). A factored
  w1 is w1_a (up, r) · w1_b (r, uq). A low-rank w2 is w2_a (vp, r) · w2_b (r, vq·∏kernel). With a Tucker
  core t2 (r, r, *kernel), w2_a is (r, vp) and w2_b (r, vq).
- LoRA / LoCon: lora_up (out, r) · lora_down (r, in / groups, *kernel); with lora_mid (r, r, *kernel)
  the kernel is in the middle, and up and down are 1×1.
- scale = alpha / rank, 1 where the file has no alpha; other rules are named `ScalePolicy`s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fulldiff.reference.layers import LayerLike, apply


class FactorError(ValueError):
    """Factors that have no meaning; the message names the tensors and shapes at fault."""


@dataclass(frozen=True)
class Factors:
    """One adapter's float64 tensors by suffix (``lokr_w1``, …, ``alpha``), and its strength.

    ``rank`` is the rank that a config beside the file declares (PEFT), None where there is none.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    strength: float = 1.0
    rank: int | None = None


@dataclass(frozen=True)
class ScalePolicy:
    """How alpha becomes a scale where implementations disagree. All agree on alpha / rank else.

    both_full: scale of a LoKr whose w1 and w2 are both full: 1, or alpha over a declared rank.
    rank_from: whose rank counts when w1 and w2 are both factored and differ.
    zero_alpha: alpha 0 gives a zero delta, or scale 1.
    """

    both_full: Literal["one", "alpha/rank"] = "one"
    rank_from: Literal["w1", "w2"] = "w2"
    zero_alpha: Literal["zero", "one"] = "zero"


POLICIES: dict[str, ScalePolicy] = {
    "default": ScalePolicy(),
    "comfyui": ScalePolicy(),
    "diffusers": ScalePolicy(),
    "comfyui-bypass": ScalePolicy(rank_from="w1"),
    "invokeai": ScalePolicy(rank_from="w1"),
    "lycoris": ScalePolicy(rank_from="w1", zero_alpha="one"),
    "peft": ScalePolicy(both_full="alpha/rank"),
}


@dataclass(frozen=True)
class Truth:
    """The steps from factors to output. A fault is a subclass that gets one of them wrong."""

    policy: ScalePolicy = field(default_factory=ScalePolicy)

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        """y = (W + Σ ΔW) x + bias. Shapes as in `layers.apply`; all tensors float64."""
        deltas = [self.delta(adapter, weight.shape) for adapter in adapters if adapter.strength]
        return self.output(layer, weight, bias, deltas, x)

    def output(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, deltas: Sequence[Tensor], x: Tensor
    ) -> Tensor:
        """Add the deltas to the weight, then apply the layer once."""
        return apply(layer, sum(deltas, start=weight), bias, x)

    def delta(self, adapter: Factors, shape: Sequence[int]) -> Tensor:
        """strength · scale · ΔW in the weight's ``shape`` (out, in / groups, *kernel)."""
        return self.strength(adapter) * self.scale(adapter) * self.product(adapter, shape)

    def strength(self, adapter: Factors) -> float:
        """The user's multiplier; any sign."""
        return adapter.strength

    def scale(self, adapter: Factors) -> float:
        """alpha / rank under the policy; 1 where there is no alpha."""
        alpha = self.alpha(adapter)
        if alpha is None:
            return 1.0
        rank = self.rank(adapter)
        if rank is None:
            if self.policy.both_full == "one" or adapter.rank is None:
                return 1.0
            rank = adapter.rank
        return 1.0 if alpha == 0 and self.policy.zero_alpha == "one" else alpha / rank

    def alpha(self, adapter: Factors) -> float | None:
        """The value of the alpha tensor, whatever its shape ((), (1,) or (1, 1)) and dtype."""
        alpha = adapter.tensors.get("alpha")
        return None if alpha is None else float(alpha.reshape(()))

    def rank(self, adapter: Factors) -> int | None:
        """The rank that alpha is divided by; None when no factor is decomposed."""
        t = adapter.tensors
        if "lora_down.weight" in t:
            return t["lora_down.weight"].shape[0]
        ranks = {w: t[f"lokr_{w}_b"].shape[0] for w in ("w1", "w2") if f"lokr_{w}_b" in t}
        return ranks.get(self.policy.rank_from) or next(iter(ranks.values()), None)

    def product(self, adapter: Factors, shape: Sequence[int]) -> Tensor:
        """ΔW without any scale, in the weight's shape; raises FactorError for an unknown kind."""
        if adapter.kind == "lora":
            return self.lora(adapter.tensors, shape)
        if adapter.kind == "lokr":
            w1 = self.w1(adapter.tensors)
            return self.place(self.kron(w1, self.w2(adapter.tensors, w1, shape)), shape)
        raise FactorError(f"adapter kind {adapter.kind!r} is unknown: the reference knows lora and lokr")

    def lora(self, t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """up · down, or up · mid · down with the kernel in the middle."""
        up, down = t["lora_up.weight"].flatten(1), t["lora_down.weight"]
        if "lora_mid.weight" in t:
            return self.place(self.tucker(t["lora_mid.weight"], up.T, down.flatten(1)), shape)
        if down.dim() == len(shape) and down.shape[1:] != tuple(shape[1:]):
            raise FactorError(f"lora_down is {tuple(down.shape)}, the weight is {tuple(shape)}")
        return self.place(_multiply(up, down.flatten(1)), shape)

    def w1(self, t: Mapping[str, Tensor]) -> Tensor:
        """(up, uq): stored whole or as w1_a · w1_b."""
        return t["lokr_w1"] if "lokr_w1" in t else _multiply(t["lokr_w1_a"], t["lokr_w1_b"])

    def w2(self, t: Mapping[str, Tensor], w1: Tensor, shape: Sequence[int]) -> Tensor:
        """(vp, vq, *kernel): stored whole, as w2_a · w2_b, or with a Tucker core."""
        sizes = (shape[0] // w1.shape[0], shape[1] // w1.shape[1], *shape[2:])
        if "lokr_w2" in t:
            return self.place(t["lokr_w2"], sizes)
        if "lokr_t2" in t:
            return self.place(self.tucker(t["lokr_t2"], t["lokr_w2_a"], t["lokr_w2_b"]), sizes)
        return self.place(self.low_rank(t["lokr_w2_a"], t["lokr_w2_b"]), sizes)

    def low_rank(self, a: Tensor, b: Tensor) -> Tensor:
        """a (vp, r) · b (r, vq·∏kernel), the kernel flattened last."""
        return _multiply(a, b)

    def tucker(self, core: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Σ_mn a[m,p] · core[m,n,…] · b[n,q] → (p, q, …), for core (r, r, *kernel)."""
        if core.shape[:2] != (a.shape[0], b.shape[0]):  # einsum would broadcast a size of 1
            sizes = f"{tuple(core.shape)} does not join {tuple(a.shape)} and {tuple(b.shape)}"
            raise FactorError(f"core {sizes}")
        return torch.einsum("mn...,mp,nq->pq...", core, a, b)

    def kron(self, w1: Tensor, w2: Tensor) -> Tensor:
        """(up·vp, uq·vq, *kernel): output channel i·vp+j, input channel k·vq+l."""
        blocks = torch.einsum("ik,jl...->ijkl...", w1, w2)
        return blocks.flatten(2, 3).flatten(0, 1)

    def place(self, product: Tensor, shape: Sequence[int]) -> Tensor:
        """The product in the weight's shape: its kernel may be flat or differ in sizes of 1."""
        rows = product.shape[0] == shape[0] and product.numel() == math.prod(shape)
        regrouped = product.dim() == 2 or _bare(product.shape) == _bare(shape)
        same = tuple(product.shape) == tuple(shape)
        if not (same or (rows and regrouped and product.dim() != len(shape))):
            raise FactorError(f"the factors give {tuple(product.shape)}, the weight is {tuple(shape)}")
        return product.reshape(tuple(shape))


def _bare(shape: Sequence[int]) -> list[int]:
    """In-channels and kernel, without the kernel sizes of 1."""
    return [*shape[1:2], *(size for size in shape[2:] if size != 1)]


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a · b, or an error that names the shapes."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise FactorError(f"{tuple(a.shape)} and {tuple(b.shape)} have no product")
    return a @ b
