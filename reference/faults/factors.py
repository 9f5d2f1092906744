"""Faults in how factors become a delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fulldiff.reference.faults.registry import fault
from fulldiff.reference.truth import Factors, Truth


@fault("kron-swapped")
class KronSwapped(Truth):
    """w2 ⊗ w1 for w1 ⊗ w2."""

    def kron(self, w1: Tensor, w2: Tensor) -> Tensor:
        blocks = torch.einsum("ik,jl...->jilk...", w1, w2)
        return blocks.flatten(2, 3).flatten(0, 1)


@fault("w1-transposed")
class W1Transposed(Truth):
    """A square w1 read as its transpose."""

    def w1(self, t: Mapping[str, Tensor]) -> Tensor:
        w1 = super().w1(t)
        return w1.T if w1.shape[0] == w1.shape[1] else w1


@fault("w2-transposed")
class W2Transposed(Truth):
    """A square w2 read as its transpose."""

    def w2(self, t: Mapping[str, Tensor], w1: Tensor, shape: Sequence[int]) -> Tensor:
        w2 = super().w2(t, w1, shape)
        return w2.transpose(0, 1) if w2.shape[0] == w2.shape[1] else w2


@fault("w2-a-then-b")
class W2AThenB(Truth):
    """The low-rank factors in the wrong order, where sizes allow it (D1: r = vp = vq)."""

    def low_rank(self, a: Tensor, b: Tensor) -> Tensor:
        return b @ a if a.shape == b.shape and a.shape[0] == a.shape[1] else a @ b


@fault("kernel-not-last")
class KernelNotLast(Truth):
    """The flattened kernel of w2_b or of a 2-D down read as (kernel, in) for (in, kernel)."""

    def place(self, product: Tensor, shape: Sequence[int]) -> Tensor:
        if product.dim() == 2 and len(shape) > 2:
            product = product.unflatten(1, (-1, shape[1])).transpose(1, 2).flatten(1)
        return super().place(product, shape)


@fault("kron-not-unsqueezed")
class KronNotUnsqueezed(Truth):
    """Conv1d with a full w2: the 2-D w1 aligned with w2's trailing dimensions (PEFT 0.21.2)."""

    def lokr(self, t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        if "lokr_w2" not in t or len(shape) != 3:
            return super().lokr(t, shape)
        w1 = self.w1(t)
        return torch.einsum("ik,lmn->limkn", w1, self.w2(t, w1, shape)).reshape(tuple(shape))


@fault("tucker-core-ignored")
class TuckerCoreIgnored(Truth):
    """The core read nowhere (D13): its place taken by the identity at every kernel position."""

    def tucker(self, core: Tensor, a: Tensor, b: Tensor) -> Tensor:
        identity = torch.eye(core.shape[0], dtype=core.dtype).reshape(*core.shape[:2], *[1] * (core.dim() - 2))
        return super().tucker(identity.expand(core.shape), a, b)


@fault("tucker-core-transposed")
class TuckerCoreTransposed(Truth):
    """The core's two rank axes swapped."""

    def tucker(self, core: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return super().tucker(core.transpose(0, 1), a, b)


@fault("tucker-a-not-transposed")
class TuckerANotTransposed(Truth):
    """Tucker's a, stored (r, vp), read as (vp, r) where r = vp."""

    def tucker(self, core: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return super().tucker(core, a.T if a.shape[0] == a.shape[1] else a, b)


@fault("kernel-flipped")
class KernelFlipped(Truth):
    """The delta's kernel mirrored (convolution for cross-correlation)."""

    def product(self, adapter: Factors, shape: Sequence[int]) -> Tensor:
        return super().product(adapter, shape).flip(list(range(2, len(shape))))


@fault("kernel-axes-swapped")
class KernelAxesSwapped(Truth):
    """The delta's kernel height and width swapped, where they are equal."""

    def product(self, adapter: Factors, shape: Sequence[int]) -> Tensor:
        delta = super().product(adapter, shape)
        return delta.transpose(-1, -2) if len(shape) > 3 and shape[-1] == shape[-2] else delta


# LoHa


@fault("loha-matrix-product")
class LohaMatrixProduct(Truth):
    """The two products of a LoHa multiplied as matrices, where they are square, not element by element."""

    def hadamard(self, one: Tensor, two: Tensor) -> Tensor:
        if one.shape[0] != one.shape[1]:
            return super().hadamard(one, two)
        return torch.einsum("oc...,ci...->oi...", one, two)


@fault("loha-sum")
class LohaSum(Truth):
    """The two products of a LoHa added."""

    def hadamard(self, one: Tensor, two: Tensor) -> Tensor:
        return one + two


@fault("loha-second-ignored")
class LohaSecondIgnored(Truth):
    """Only w1_a · w1_b applied: the LoHa run as a LoRA."""

    def hadamard(self, one: Tensor, two: Tensor) -> Tensor:
        return one


@fault("loha-tucker-swapped")
class LohaTuckerSwapped(Truth):
    """A Tucker LoHa's a and b swapped, where the layer is square."""

    def hada(self, t: Mapping[str, Tensor], number: int, shape: Sequence[int]) -> Tensor:
        a, b = f"hada_w{number}_a", f"hada_w{number}_b"
        if f"hada_t{number}" in t and t[a].shape == t[b].shape:
            t = {**t, a: t[b], b: t[a]}
        return super().hada(t, number, shape)


@fault("loha-tucker-cores-swapped")
class LohaTuckerCoresSwapped(Truth):
    """hada_t1 used with w2's factors and hada_t2 with w1's."""

    def loha(self, t: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        if "hada_t1" in t and t["hada_t1"].shape == t["hada_t2"].shape:
            t = {**t, "hada_t1": t["hada_t2"], "hada_t2": t["hada_t1"]}
        return super().loha(t, shape)
