"""The truth: factors → ΔW → W' = W + Σ strength · scale · ΔW → y = W' x, all in float64.

Conventions (LyCORIS files; see README "Conventions"):

- LoKr: ΔW[i·vp+j, k·vq+l, …] = w1[i,k] · w2[j,l,…] with w1 (up, uq), w2 (vp, vq, *kernel). A factored
  w1 is w1_a (up, r) · w1_b (r, uq). A low-rank w2 is w2_a (vp, r) · w2_b (r, vq·∏kernel). With a Tucker
  core t2 (r, r, *kernel), w2_a is (r, vp) and w2_b (r, vq).
- LoRA / LoCon: lora_up (out, r) · lora_down (r, in / groups, *kernel); with lora_mid (r, r, *kernel)
  the kernel is in the middle, and up and down are 1×1.
- LoHa: (w1_a · w1_b) ∘ (w2_a · w2_b), element by element, with hada_w1_a (out, r), hada_w1_b
  (r, in / groups·∏kernel); with Tucker cores hada_t1, hada_t2 (r, r, *kernel) w1_a is (r, out) and
  w1_b (r, in / groups).
- diff: ΔW stored whole; its alpha, if there is one, means nothing. diff_b (out,), beside any kind, is
  added to the bias: strength · diff_b, no scale; a layer without a bias then has one.
- scale = alpha / rank, 1 where the file has no alpha; other rules are `Policy`s with names. A LoRA's
  ``scale`` tensor takes the place of alpha / rank.
- DoRA (``dora_scale`` beside LoRA, LoHa or LoKr): W' = m · V / ‖V‖ with V = W + scale · ΔW. The delta is
  strength · (W' − W): the strength stays outside the norm (as in ComfyUI). See `Truth.dora`.
- Adapters on one layer sum, of whatever kinds: each delta is taken from the base weight W, but for a DoRA
  under some policies (`Policy.dora_after`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fulldiff.reference.factors import NAMES, POLICIES, DoraAfter, FactorError, Factors, Policy
from fulldiff.reference.layers import LayerLike, apply

__all__ = ["POLICIES", "FactorError", "Factors", "Policy", "Truth"]


# The adapters that count, with their deltas.
Parts = Sequence[tuple[Factors, Tensor]]


@dataclass(frozen=True)
class Truth:
    """The steps from factors to output. A fault is a subclass that gets one of them wrong."""

    policy: Policy = field(default_factory=Policy)

    def forward(
        self, layer: LayerLike, weight: Tensor, bias: Tensor | None, adapters: Sequence[Factors], x: Tensor
    ) -> Tensor:
        """y = (W + Σ ΔW) x + bias + Σ Δbias. Shapes as in `layers.apply`; all tensors float64."""
        active = [adapter for adapter in adapters if self.counts(adapter)]
        deltas = self.deltas(active, weight)
        for adapter in active:
            bias = self.add_bias(bias, adapter, weight)
        return self.output(layer, weight, bias, list(zip(active, deltas, strict=True)), x)

    def counts(self, adapter: Factors) -> bool:
        """Whether the adapter has a part in the output: not at strength 0, whatever its numbers are."""
        return adapter.strength != 0

    def output(self, layer: LayerLike, weight: Tensor, bias: Tensor | None, parts: Parts, x: Tensor) -> Tensor:
        """Add the deltas to the weight, then apply the layer once."""
        return apply(layer, sum((delta for _, delta in parts), start=weight), bias, x)

    def deltas(self, adapters: Sequence[Factors], weight: Tensor) -> list[Tensor]:
        """What each adapter adds to ``weight`` and the adapters before it, all of the weight's shape."""
        made: list[Tensor] = []
        earlier = torch.zeros_like(weight)
        for adapter in adapters:
            made.append(self.delta_after(adapter, weight, earlier))
            earlier = earlier + made[-1]
        return made

    def delta_after(self, adapter: Factors, weight: Tensor, earlier: Tensor) -> Tensor:
        """The adapter's delta where the adapters before it added ``earlier``; only a DoRA's may depend on that."""
        if self.dora_after == "current":
            return self.delta(adapter, weight + earlier)
        delta = self.delta(adapter, weight)
        if self.dora_after == "scaling" and "dora_scale" in adapter.tensors:
            rows = self.rows(adapter, weight)
            grown = (self.growth(adapter, weight[rows]) - 1) * earlier[rows]
            delta[rows] += self.strength(adapter) * torch.where(earlier[rows] == 0, 0.0, grown)
        return delta

    @property
    def dora_after(self) -> DoraAfter:
        """What a DoRA behind other adapters starts from."""
        return self.policy.dora_after

    def delta(self, adapter: Factors, weight: Tensor) -> Tensor:
        """The adapter's delta for ``weight`` (out, in / groups, *kernel), zero outside its rows."""
        rows = self.rows(adapter, weight)
        delta = torch.zeros_like(weight)
        delta[rows] = self.change(adapter, weight[rows])
        return delta

    def rows(self, adapter: Factors, weight: Tensor) -> slice:
        """The output rows that the adapter fills."""
        start, end = adapter.rows or (0, weight.shape[0])
        if not 0 <= start < end <= weight.shape[0]:
            raise FactorError(f"rows {start} to {end} are not in a weight of {weight.shape[0]} rows")
        return slice(start, end)

    def change(self, adapter: Factors, weight: Tensor) -> Tensor:
        """strength · scale · ΔW, or strength · (W' − W) of a DoRA, for the adapter's rows of the weight."""
        if "dora_scale" in adapter.tensors:
            return self.strength(adapter) * (self.dora(adapter, weight) - weight)
        return self.strength(adapter) * self.scale(adapter) * self.product(adapter, weight.shape)

    def add_bias(self, bias: Tensor | None, adapter: Factors, weight: Tensor) -> Tensor | None:
        """The bias (out,), or none, plus the adapter's bias delta in its rows."""
        if "diff_b" not in adapter.tensors:
            return bias
        rows, diff_b = self.rows(adapter, weight), adapter.tensors["diff_b"]
        if diff_b.shape != (rows.stop - rows.start,):
            raise FactorError(f"diff_b is {tuple(diff_b.shape)}, the adapter has {rows.stop - rows.start} rows")
        total = weight.new_zeros(weight.shape[0]) if bias is None else bias.clone()
        total[rows] += self.strength(adapter) * diff_b
        return total

    def strength(self, adapter: Factors) -> float:
        """The user's multiplier; any sign."""
        return adapter.strength

    def scale(self, adapter: Factors) -> float:
        """alpha / rank under the policy; 1 where there is no alpha, and for a diff."""
        alpha = self.alpha(adapter)
        if "scale" in adapter.tensors:
            return float(adapter.tensors["scale"].reshape(()))
        if alpha is None or adapter.kind == "diff":
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
        if "hada_w1_b" in t:
            return t["hada_w1_b"].shape[0]
        ranks = {w: t[f"lokr_{w}_b"].shape[0] for w in ("w1", "w2") if f"lokr_{w}_b" in t}
        return ranks.get(self.policy.rank_from) or next(iter(ranks.values()), None)

    def product(self, adapter: Factors, shape: Sequence[int]) -> Tensor:
        """ΔW without any scale, in the weight's shape; raises FactorError for an unknown kind or tensor."""
        kind, t = adapter.kind, adapter.tensors
        if kind not in NAMES:
            raise FactorError(f"adapter kind {kind!r} is unknown: the reference knows {', '.join(NAMES)}")
        if unknown := sorted(t.keys() - NAMES[kind]):
            raise FactorError(f"{kind} with {', '.join(unknown)}: the reference knows {', '.join(sorted(NAMES[kind]))}")
        made = {"lora": self.lora, "lokr": self.lokr, "loha": self.loha, "diff": self.diff}[kind]
        try:
            return made(t, shape)
        except KeyError as missing:
            raise FactorError(f"{kind} without {missing.args[0]}: it has {', '.join(sorted(t))}") from missing

    def lora(self, t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """up · down, or up · mid · down with the kernel in the middle."""
        up, down = t["lora_up.weight"].flatten(1), t["lora_down.weight"]
        if "lora_mid.weight" in t:
            return self.place(self.tucker(t["lora_mid.weight"], up.T, down.flatten(1)), shape)
        if down.dim() == len(shape) and down.shape[1:] != tuple(shape[1:]):
            raise FactorError(f"lora_down is {tuple(down.shape)}, the weight is {tuple(shape)}")
        return self.place(_multiply(up, down.flatten(1)), shape)

    def lokr(self, t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """w1 ⊗ w2."""
        w1 = self.w1(t)
        return self.place(self.kron(w1, self.w2(t, w1, shape)), shape)

    def loha(self, t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """The two products, each in the weight's shape, multiplied element by element."""
        return self.hadamard(self.hada(t, 1, shape), self.hada(t, 2, shape))

    def hada(self, t: Mapping[str, Tensor], number: int, shape: Sequence[int]) -> Tensor:
        """w1_a · w1_b (or w2's), or the Tucker form where there is a core."""
        a, b = t[f"hada_w{number}_a"], t[f"hada_w{number}_b"]
        if f"hada_t{number}" in t:
            return self.place(self.tucker(t[f"hada_t{number}"], a, b), shape)
        return self.place(self.low_rank(a, b), shape)

    def hadamard(self, one: Tensor, two: Tensor) -> Tensor:
        """one[o,i,…] · two[o,i,…]."""
        return one * two

    def diff(self, t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """ΔW as stored; zero where the file changes only the bias."""
        if "diff" not in t:
            return t["diff_b"].new_zeros(tuple(shape))
        return self.place(t["diff"], shape)

    def dora(self, adapter: Factors, weight: Tensor) -> Tensor:
        """W' = m · V / ‖V‖ with V = W + scale · ΔW; where ‖V‖ is 0, W' is 0.

        m has a number per output row (out, 1, …), or per input (1, in / groups, 1, …), and the norm is
        taken over all other dimensions, the kernel among them. See `magnitude` for 1-D ones.
        """
        moved, magnitude, norm = self.decomposed(adapter, weight)
        return torch.where(norm == 0, 0.0, magnitude * moved / norm)

    def growth(self, adapter: Factors, weight: Tensor) -> Tensor:
        """m / ‖V‖ in the magnitude's shape; 0 where ‖V‖ is 0."""
        _, magnitude, norm = self.decomposed(adapter, weight)
        return torch.where(norm == 0, 0.0, magnitude / norm)

    def decomposed(self, adapter: Factors, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A DoRA's V, and m and ‖V‖ in one shape."""
        moved = weight + self.scale(adapter) * self.product(adapter, weight.shape)
        magnitude = self.magnitude(adapter, weight.shape)
        return moved, magnitude, self.norm(weight, moved, magnitude.shape)

    def norm(self, weight: Tensor, moved: Tensor, shape: Sequence[int]) -> Tensor:
        """‖V‖, of V ``moved``, in the magnitude's ``shape``: taken over each dimension that is 1 there."""
        return moved.square().sum_to_size(*shape).sqrt()

    def magnitude(self, adapter: Factors, shape: Sequence[int]) -> Tensor:
        """m as (out, 1, …) or (1, in / groups, 1, …): its own shape decides.

        (out,) and (out, 1, …) are per output row, (in,) and (1, in, 1, …) per input. What fits both, a
        1-D one on a square layer, is per output row (as PEFT stores it); what fits neither is refused.
        """
        m = adapter.tensors["dora_scale"]
        ones = (1,) * (len(shape) - 1)
        rest = m.numel() == (m.shape or [0])[0]
        if rest and m.numel() == shape[0]:
            return m.reshape(-1, *ones)
        if m.numel() == shape[1] and (rest or tuple(m.shape[:2]) == (1, shape[1])):
            return m.reshape(1, -1, *ones[1:])
        raise FactorError(f"dora_scale {tuple(m.shape)} fits neither rows nor inputs of a weight {tuple(shape)}")

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
