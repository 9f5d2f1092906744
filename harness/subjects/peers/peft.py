"""PEFT's LoRA, LoHa and LoKr on a model of one layer: unmerged, or merged as `merge()` leaves it.

The factors go into the parameters that PEFT makes itself (`create_adapter_parameters`), of the file's sizes
where PEFT's own factorisation would choose others; alpha and rank into its config, the strength into
`set_scale`. A LoKr with both factors whole has no rank: its config gets r = alpha = 1, so that scale is 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter, Detach, Refused, Subject, Unsupported, replace_forward
from fulldiff.harness.subjects.peers import alone, alpha_of, check, library

LAYER = "layer"
LORA = {"lora_up.weight": "lora_B", "lora_down.weight": "lora_A"}


class Peft(Subject):
    """Every adapter injected, active and unmerged."""

    policy = "peft"
    merge = False

    def __init__(self) -> None:
        self.peft = library("peft", "peft")

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        alone(module)
        for adapter in adapters:
            self._check(module, adapter)
        if not adapters:
            return lambda: None
        if len({adapter.kind for adapter in adapters}) > 1:
            raise Unsupported("adapters of several kinds on one layer")
        holder = _Holder(copy.deepcopy(module))
        names = [f"a{number}" for number in range(len(adapters))]
        for name, adapter in zip(names, adapters, strict=True):
            self._inject(holder, name, adapter)
        wrapped: Any = holder.layer
        wrapped.set_adapter(names)
        wrapped.requires_grad_(False)
        holder.eval()
        if self.merge:
            wrapped.merge()
        return replace_forward(module, lambda x: wrapped(x))

    def _check(self, module: nn.Module, adapter: Adapter) -> None:
        check(adapter, ("lora", "lokr", "loha"), ("lora_mid.weight",))
        if adapter.kind == "lora" and getattr(module, "groups", 1) > 1:
            raise Unsupported("LoRA on a grouped convolution: its lora_B has fewer columns than a file's lora_up")

    def _inject(self, holder: nn.Module, name: str, adapter: Adapter) -> None:
        rank = factors.rank(adapter.tensors)
        alpha = alpha_of(adapter)
        r, a = (1, 1.0) if rank is None else (rank, float(rank) if alpha is None else alpha)
        try:
            self.peft.inject_adapter_in_model(self._config(adapter.kind, r, a), holder, name)
        except (ValueError, TypeError) as error:
            raise Unsupported(f"PEFT: {str(error)[:200]}") from error
        wrapped: Any = holder.get_submodule(LAYER)
        if adapter.kind == "lora":
            for tensor, own in LORA.items():
                fill(getattr(wrapped, own)[name].weight, adapter.tensors[tensor], wrapped.weight)
        else:
            _make_parameters(wrapped, name, adapter, r)
            for tensor in adapter.tensors.keys() - {"alpha"}:
                fill(getattr(wrapped, tensor)[name], adapter.tensors[tensor], wrapped.base_layer.weight)
        wrapped.set_scale(name, adapter.strength)

    def _config(self, kind: str, r: int, alpha: float) -> Any:
        if kind == "lora":
            return self.peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=[LAYER], init_lora_weights=False)
        made = {"lokr": self.peft.LoKrConfig, "loha": self.peft.LoHaConfig}[kind]
        return made(r=r, alpha=alpha, target_modules=[LAYER], init_weights=False)


class PeftMerged(Peft):
    """The same, merged into (a copy of) the base."""

    merge = True


class _Holder(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def _make_parameters(wrapped: Any, name: str, adapter: Adapter, r: int) -> None:
    """PEFT's own parameters again, in the sizes of the file's factors."""
    for own in wrapped.adapter_layer_names:
        if name in getattr(wrapped, own):
            del getattr(wrapped, own)[name]
    t, shape = adapter.tensors, tuple(wrapped.base_layer.weight.shape)
    if adapter.kind == "loha":
        whole = shape if "hada_t1" in t else (shape[0], math.prod(shape[1:]))
        wrapped.create_adapter_parameters(name, r, whole)
        return
    (up, uq), (vp, vq) = factors.w1_sizes(t), factors.w2_sizes(t, shape)
    sizes = ((up, vp), (uq, vq), *shape[2:])
    wrapped.create_adapter_parameters(name, r, sizes, "lokr_w1" in t, "lokr_w2" in t, "lokr_t2" in t)


def fill(parameter: nn.Parameter, tensor: Tensor, like: Tensor) -> None:
    """The file's factor in a parameter, in its shape and the layer's dtype; refused where the sizes differ."""
    if parameter.numel() != tensor.numel():
        raise Refused(f"a factor {tuple(tensor.shape)} for a parameter {tuple(parameter.shape)}")
    parameter.data = tensor.detach().reshape(parameter.shape).to(like.dtype).clone()
