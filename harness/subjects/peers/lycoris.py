"""LyCORIS's modules: forward (which rebuilds ΔW), bypass, and merged as `merge_to` leaves it.

The factors go into the parameters of LyCORIS's own module. Where its factorisation would choose other sizes
for a LoKr, the module gets parameters of the file's sizes and the flags that say which are there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter, Detach, Refused, Subject, Unsupported, replace_forward
from fulldiff.harness.subjects.peers import alone, alpha_of, check, library

CLASSES = {"lora": "LoConModule", "lokr": "LokrModule", "loha": "LohaModule"}
CORES = {"lora_mid.weight", "lokr_t2", "hada_t1"}


class Lycoris(Subject):
    """Every adapter's module applied with `apply_to`, taken off with `restore`."""

    policy = "lycoris"
    bypass = False

    def __init__(self) -> None:
        self.modules = library("lycoris.modules", "lycoris-lora")

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        made = [self.build(module, adapter) for adapter in adapters]
        for each in made:
            each.apply_to()

        def detach() -> None:
            for each in reversed(made):
                each.restore()

        return detach

    def build(self, base: nn.Module, adapter: Adapter) -> Any:
        """LyCORIS's module for one adapter, with the file's factors."""
        check(adapter, tuple(CLASSES))
        tucker = bool(CORES & adapter.tensors.keys())
        weight = base.weight
        assert isinstance(weight, Tensor)
        if tucker and all(size == 1 for size in weight.shape[2:]):
            raise Unsupported("a Tucker core on a 1×1 convolution: it makes none")
        rank = factors.rank(adapter.tensors)
        more = {"full_matrix": rank is None} if adapter.kind == "lokr" else {}
        made = getattr(self.modules, CLASSES[adapter.kind])(
            "layer", base, adapter.strength, rank or 1, alpha_of(adapter), use_tucker=tucker,
            bypass_mode=self.bypass, **more,
        )  # fmt: skip
        made.to(weight.dtype)
        if adapter.kind == "lokr":
            _make_parameters(made, adapter, weight)
        for name in adapter.tensors.keys() - {"alpha"}:
            _fill(made.get_parameter(name), adapter.tensors[name], weight)
        return made.requires_grad_(False).eval()


class LycorisBypass(Lycoris):
    """The modules in bypass mode."""

    bypass = True


class LycorisMerge(Lycoris):
    """The modules merged into (a copy of) the base, one after the other."""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        alone(module)
        base: Any = copy.deepcopy(module)
        for adapter in adapters:
            self.build(base, adapter).merge_to(adapter.strength)
        return replace_forward(module, lambda x: base(x))


def _make_parameters(made: Any, adapter: Adapter, weight: Tensor) -> None:
    """The LoKr parameters of the file's sizes, and the flags and scale that its constructor sets with them."""
    t, rank, alpha = adapter.tensors, factors.rank(adapter.tensors), alpha_of(adapter)
    for name in [name for name in made._parameters if name.startswith("lokr_")]:
        del made._parameters[name]
    vp, vq = factors.w2_sizes(t, weight.shape)
    for name in t.keys() - {"alpha"}:
        shape = (vp, vq, *weight.shape[2:]) if name == "lokr_w2" else tuple(t[name].shape)
        made.register_parameter(name, nn.Parameter(weight.new_zeros(shape)))
    made.use_w1, made.use_w2, made.tucker = "lokr_w1" in t, "lokr_w2" in t, "lokr_t2" in t
    made.scale = 1.0 if rank is None else (alpha or rank) / rank


def _fill(parameter: nn.Parameter, tensor: Tensor, weight: Tensor) -> None:
    if parameter.numel() != tensor.numel():
        raise Refused(f"a factor {tuple(tensor.shape)} for a parameter {tuple(parameter.shape)}")
    parameter.data = tensor.detach().reshape(parameter.shape).to(weight.dtype).clone()
