"""PEFT's ways to join LoRAs. Needs `pip install peft`.

fulldiff conform --suite join --subject fulldiff.harness.subjects.peers.peft_join:Cat
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn

from fulldiff.harness.files.piece import Piece
from fulldiff.harness.join.files import adapters_of, rows_of, save
from fulldiff.harness.realise import module_for
from fulldiff.harness.subjects.base import Unsupported
from fulldiff.harness.subjects.joiner import Joiner, Running
from fulldiff.reference.join import DOWN, UP
from fulldiff.reference.truth import Factors, Truth


class _Holder(nn.Module):
    """A model of the given layers."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def _fill(wrapped: Any, name: str, t: Mapping[str, Tensor], scale: float) -> None:
    for factors_of, factor in ((wrapped.lora_A, t[DOWN]), (wrapped.lora_B, t[UP])):
        weight = factors_of[name].weight
        weight.data = factor.detach().reshape(weight.shape).to(wrapped.weight.dtype)
    wrapped.scaling[name] = scale


class PeftJoiner(Joiner):
    """`add_weighted_adapter` with one combination type."""

    combination = "cat"
    # The files read as rsLoRA: their scale is alpha / √r, with an alpha that gives the same.
    root = False

    def join(self, files: Sequence[Path], weights: Sequence[float], model: str, out: Path) -> None:
        rows, adapters = rows_of(model), [adapters_of(path, model) for path in files]
        names = {layer: f"l{at}" for at, layer in enumerate(dict.fromkeys(n for own in adapters for n in own))}
        layers = {short: _zero(rows[layer].layer) for layer, short in names.items()}
        joined: Any = None
        for at, own in enumerate(adapters):
            config = self._config({names[layer]: only for layer, (only,) in own.items()})
            if joined is None:
                joined = peft.LoraModel(_Holder(layers), {"f0": config}, "f0")
            else:
                joined.peft_config[f"f{at}"] = config
                joined.inject_adapter(joined.model, f"f{at}")
            for layer, (only,) in own.items():
                wrapped = joined.model.get_submodule(names[layer])
                _fill(wrapped, f"f{at}", only.tensors, Truth().scale(only))
        files_of = [f"f{at}" for at in range(len(files))]
        joined.add_weighted_adapter(files_of, list(weights), "joined", combination_type=self.combination)
        deltas = {n: joined.model.get_submodule(short).get_delta_weight("joined") for n, short in names.items()}
        pieces = [
            Piece((rows[n],), "diff", {"diff": d.detach().reshape(rows[n].weight_shape)}) for n, d in deltas.items()
        ]
        save(out, "kohya", pieces, {})

    def _config(self, own: Mapping[str, Factors]) -> Any:
        ranks = {name: adapter.tensors[DOWN].shape[0] for name, adapter in own.items()}
        return peft.LoraConfig(
            r=max(ranks.values()), lora_alpha=max(ranks.values()), lora_dropout=0.0, target_modules=list(ranks),
            rank_pattern=ranks, use_rslora=self.root,
        )  # fmt: skip

    def attach(self, file: Path, layers: Mapping[str, nn.Module], model: str) -> Running:
        raise Unsupported("PEFT has no diagonal; a joined adapter is one whole")


class Cat(PeftJoiner):
    """`cat`."""


class CatRoot(PeftJoiner):
    """`cat` of rsLoRA adapters."""

    root = True


class Linear(PeftJoiner):
    """`linear`."""

    combination = "linear"


class Svd(PeftJoiner):
    """`svd` as it is set: cut to the largest rank."""

    combination = "svd"


def _zero(layer: Any) -> nn.Module:
    module = module_for(layer, torch.zeros(layer.weight_shape, dtype=torch.float64), None)
    return module
