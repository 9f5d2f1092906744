"""ΔW made whole on a ggml graph, [window·in / groups, out] in f32: the full diff's way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter, Refused, Unsupported
from fulldiff.harness.subjects.ggml.blocks import Block, bring, contract
from fulldiff.harness.subjects.ggml.graph import Graph, Node


def delta(g: Graph, adapter: Adapter, shape: Sequence[int], scale: float, place: int = 0) -> Node:
    """scale · ΔW for a weight of this shape (rows, in / groups, *kernel); the factors lie on the device ``place``."""
    t = {name: tensor.float() for name, tensor in adapter.tensors.items() if name != "alpha"}
    columns, window = torch.Size(shape[1:]).numel(), torch.Size(shape[2:]).numel()
    maker = _Maker(g, t, window, place)
    kinds = {"lora": maker.lora, "lokr": maker.lokr, "loha": maker.loha, "diff": maker.diff}
    if "dora_scale" in t or adapter.kind not in kinds:
        raise Unsupported(f"{'DoRA' if 'dora_scale' in t else adapter.kind}: not made on ggml's graphs")
    node = kinds[adapter.kind](shape, scale)
    if g.sizes(node)[0] * g.sizes(node)[1] * g.sizes(node)[2] * g.sizes(node)[3] != columns * shape[0]:
        raise Refused(f"the factors give {g.sizes(node)}, the weight is {tuple(shape)}")
    return g.reshape(node, columns, shape[0])


class _Maker:
    """The products of each kind, from factors ``t`` in f32."""

    def __init__(self, g: Graph, t: Mapping[str, Tensor], window: int, place: int) -> None:
        self.g, self.t, self.window, self.place = g, t, window, place

    def diff(self, shape: Sequence[int], scale: float) -> Node:
        return self._tensor(self.t["diff"].flatten(1) * scale)

    def lora(self, shape: Sequence[int], scale: float) -> Node:
        up, down = self.t["lora_up.weight"].flatten(1) * scale, self.t["lora_down.weight"]
        if "lora_mid.weight" in self.t:
            return self._tucker(self.t["lora_mid.weight"], up.T, down.flatten(1))
        return self._matrix(up, down.flatten(1))

    def loha(self, shape: Sequence[int], scale: float) -> Node:
        return self.g.mul(self._hada("1", scale), self._hada("2", 1.0))

    def lokr(self, shape: Sequence[int], scale: float) -> Node:
        """w1 ⊗ w2: w2 repeated for every element of w1, times that element."""
        (up, uq), (vp, vq) = factors.w1_sizes(self.t), factors.w2_sizes(self.t, shape)
        inner = vq * self.window
        g, w1, w2 = self.g, self._w1(scale), self._w2()
        if g.sizes(w2)[0] * g.sizes(w2)[1] * g.sizes(w2)[2] * g.sizes(w2)[3] != vp * inner:
            raise Refused(f"w2 gives {g.sizes(w2)}, the weight {tuple(shape)} needs ({vp}, {vq}, …)")
        whole = g.repeat(g.reshape(w2, inner, 1, vp, 1), inner, uq, vp, up)
        return g.mul(whole, g.reshape(w1, 1, uq, 1, up))

    def _w1(self, scale: float) -> Node:
        if "lokr_w1" in self.t:
            return self._tensor(self.t["lokr_w1"] * scale)
        return self._matrix(self.t["lokr_w1_a"] * scale, self.t["lokr_w1_b"])

    def _w2(self) -> Node:
        if "lokr_w2" in self.t:
            return self._tensor(self.t["lokr_w2"].flatten(1))
        a, b = self.t["lokr_w2_a"], self.t["lokr_w2_b"]
        return self._tucker(self.t["lokr_t2"], a, b) if "lokr_t2" in self.t else self._matrix(a, b)

    def _hada(self, number: str, scale: float) -> Node:
        a, b = self.t[f"hada_w{number}_a"] * scale, self.t[f"hada_w{number}_b"]
        core = self.t.get(f"hada_t{number}")
        return self._matrix(a, b) if core is None else self._tucker(core, a, b)

    def _matrix(self, a: Tensor, b: Tensor) -> Node:
        """[q, p] of a (p, r) · b (r, q)."""
        g = self.g
        return g.mul_mat(g.cont(g.transpose(self._tensor(b))), self._tensor(a))

    def _tucker(self, core: Tensor, a: Tensor, b: Tensor) -> Node:
        """[window·q, p] of the core (m, n, *kernel), a (m, p) and b (n, q)."""
        g, (m, n) = self.g, core.shape[:2]
        a_node, b_node = (g.cont(g.transpose(self._tensor(t))) for t in (a, b))
        block = Block(self._tensor(core.flatten(2)), ("k", "q", "p"), {"k": core[0, 0].numel(), "q": n, "p": m})
        block = contract(g, contract(g, block, "q", b_node, ("p",)), "p", a_node, ("k", "q"))
        return bring(g, block, ("k", "q")).node

    def _tensor(self, data: Tensor) -> Node:
        return self.g.tensor(data, place=self.place)
