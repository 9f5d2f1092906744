"""A joined adapter on a torch model, weighed while the model runs.

    attached = attach({"unet": unet, "text_encoder": text_encoder}, Path("joined.safetensors"), "sd15")
    set_lora_diag(unet, [1, 0])                # one number per file: both models are set
    set_lora_diag(unet, {"a": 0.5, "b": 2.5})  # by file name
    set_lora_diag(unet, [1, 1, 1, 1, 0])       # one per rank, Σr of them
    tune_lora_scale(unet, 0.8)
    realize_as_lora(unet, Path("tuned.safetensors"))
    attached.detach()

All diagonals of a model are views of one vector for each device and dtype: setting them is one gather into it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fulldiff.cases.tables import load_table
from fulldiff.harness.files import stitching
from fulldiff.harness.files.joined import Parts, parts_of
from fulldiff.harness.files.joining import JoinedLayer, Plan, family_of, plan
from fulldiff.harness.files.writers import module_name
from fulldiff.harness.subjects.base import Detach
from fulldiff.harness.subjects.ljl import Branch, Shared

MARK = "_joined_adapter"


class JoinError(ValueError):
    """A joined adapter that cannot be attached or set so; the message names the layer or number, and the remedy."""


@dataclass
class Bank:
    """The diagonals on one device in one dtype: ``values``, and of each which file and which of the Σr it is."""

    values: Tensor
    by_file: Tensor
    by_rank: Tensor

    def fill(self, numbers: Tensor, per_file: bool) -> None:
        """Gather the numbers (float64, on the CPU) into the diagonals."""
        known = numbers.to(self.values.device, self.values.dtype)
        torch.index_select(known, 0, self.by_file if per_file else self.by_rank, out=self.values)


class Attached:
    """A joined adapter on its layers. ``files`` are the names of the files that it was joined from."""

    def __init__(self, path: Path, model: str, made: Plan, parts: Parts, modules: Mapping[str, nn.Module]) -> None:
        self.path, self.model, self.files = path, model, parts.files
        self.ranks = {layer.name: own for layer, own in zip(made.layers, _ranks(made, parts, path, model), strict=True)}
        self.scale, self.numbers = 1.0, torch.ones(len(self.files), dtype=torch.float64)
        self.whole, self.uneven = _whole_ranks(self.ranks, len(self.files))
        self.banks, self.shared = _banks(modules, self.ranks, self.whole), Shared()
        self._undo: list[tuple[nn.Module, Detach]] = []
        try:
            _attach_all(self, made, modules)
        except Exception:
            self.detach()
            raise
        self._fill()

    def set_diagonal(self, numbers: Any) -> None:
        """Weigh the files, or each rank: a sequence or tensor of numbers of any kind, or file name → number.

        Raises:
            JoinError: not as many numbers as files or ranks, a name that is no file's, a number that is not finite.
        """
        known = self._by_name(numbers) if isinstance(numbers, Mapping) else numbers
        v = torch.as_tensor(known, dtype=torch.float64, device="cpu").flatten()
        if not bool(v.isfinite().all()):
            raise JoinError(f"the diagonal has {v[~v.isfinite()][0]}: give finite numbers")
        if len(v) != len(self.files):
            self._check_ranks(len(v))
        self.numbers = v.clone()
        self._fill()

    def tune(self, scale: float) -> None:
        """Multiply the whole adapter; the diagonal stays. Raises JoinError for a scale that is not finite."""
        if not math.isfinite(scale):
            raise JoinError(f"the scale is {scale}: give a finite number")
        self.scale = float(scale)
        self._fill()

    def realise(self, out: Path) -> None:
        """Write the file anew with diagonal and scale in its factors, once; what runs here stays as it is."""
        stitching.realise(self.path, self.model, out, {name: self.diagonal(name) for name in self.ranks})

    def diagonal(self, layer: str) -> list[float]:
        """What each rank of a layer is multiplied with now, the scale included."""
        ranks, starts = self.ranks[layer], [sum(self.whole[:file]) for file in range(len(self.files))]
        per_file = len(self.numbers) == len(self.files)
        at = [file if per_file else starts[file] + k for file, rank in enumerate(ranks) for k in range(rank)]
        return (self.numbers[at] * self.scale).tolist()

    def detach(self) -> None:
        """Take the adapter off; every layer computes as before."""
        for module, undo in reversed(self._undo):
            undo()
            del module.__dict__[MARK]
        self._undo = []

    def _fill(self) -> None:
        for bank in self.banks.values():
            bank.fill(self.numbers * self.scale, len(self.numbers) == len(self.files))

    def _by_name(self, numbers: Mapping[str, float]) -> list[float]:
        if set(numbers) != set(self.files):
            odd = sorted(set(numbers) ^ set(self.files))
            raise JoinError(f"{', '.join(odd)}: give one number for each of {', '.join(self.files)}")
        return [numbers[name] for name in self.files]

    def _check_ranks(self, count: int) -> None:
        if self.uneven:
            raise JoinError(
                f"a diagonal of {count}: {self.uneven} has other ranks ({self.ranks[self.uneven]}) than the layers "
                f"before it, so only one number per file fits all: give {len(self.files)}"
            )
        if count != sum(self.whole):
            first = next(iter(self.ranks), "the file")
            raise JoinError(
                f"a diagonal of {count}: {first} has ranks {self.ranks.get(first, [])}; give {sum(self.whole)} numbers "
                f"(the files' ranks, {self.whole}) or {len(self.files)}, one per file"
            )


def attach(model: nn.Module | Mapping[str, nn.Module], path: Path, base: str) -> Attached:
    """Put the adapter file at ``path``, joined or not, on a model's layers.

    Args:
        model: a UNet or transformer, or models by part (unet, transformer, text_encoder, text_encoder_2).
        base: the model's layer table (sd15, sdxl, flux, zimage), whose layer names the model has.

    Raises:
        FileError: the file cannot be read or fits no such model.
        JoinError: the model lacks one of the file's layers, or a layer has a joined adapter already.
    """
    made = plan([path], [1.0], base, family_of([path], base))
    return attach_layers(named_layers(model, base, made.layers), path, base, made)


def attach_layers(modules: Mapping[str, nn.Module], path: Path, base: str, made: Plan | None = None) -> Attached:
    """`attach` to layers by name with their part (``unet.conv_in``)."""
    known = made or plan([path], [1.0], base, family_of([path], base))
    return Attached(path, base, known, parts_of(known.headers[0]), modules)


def named_layers(
    model: nn.Module | Mapping[str, nn.Module], base: str, layers: Sequence[JoinedLayer]
) -> dict[str, nn.Module]:
    """The model's modules for these layers, by name with their part."""
    main = next(row.part for row in load_table(base) if not row.part.startswith("text_encoder"))
    roots: Mapping[str, nn.Module] = model if isinstance(model, Mapping) else {str(main): model}
    return {layer.name: _module(roots, layer) for layer in layers}


def _module(roots: Mapping[str, nn.Module], layer: JoinedLayer) -> nn.Module:
    part, name = layer.rows[0].part, layer.rows[0].name
    if layer.stored:
        raise JoinError(f"{layer.name} is fused in the file, not in the model: join it with --to diffusers")
    if part not in roots:
        raise JoinError(f"{layer.name}: no {part} was given; pass models by part, {{{part!r}: model, …}}")
    # Newer transformers' CLIPTextModel is what used to be its text_model.
    for known in (name, name.removeprefix("text_model.")):
        with contextlib.suppress(AttributeError):
            return roots[part].get_submodule(known)
    raise JoinError(f"{layer.name}: the {part}, a {type(roots[part]).__name__}, has no {name}; is it the right model?")


def set_lora_diag(model: nn.Module, numbers: Any) -> None:
    """Set the diagonal of the joined adapter on ``model``, and on all models it is attached to: see `Attached`."""
    attached_to(model).set_diagonal(numbers)


def tune_lora_scale(model: nn.Module, scale: float) -> None:
    """Multiply the joined adapter on ``model`` as a whole."""
    attached_to(model).tune(scale)


def realize_as_lora(model: nn.Module, out: Path) -> None:
    """Write the joined adapter on ``model`` with its diagonal and scale folded in exactly once."""
    attached_to(model).realise(out)


def attached_to(model: nn.Module) -> Attached:
    """The joined adapter on a model or layer; raises JoinError where there is none."""
    for module in model.modules():
        if isinstance(found := module.__dict__.get(MARK), Attached):
            return found
    raise JoinError(f"this {type(model).__name__} has no joined adapter; attach one first")


def _attach_all(attached: Attached, made: Plan, modules: Mapping[str, nn.Module]) -> None:
    """A branch on each layer, or none at all."""
    for layer in made.layers:
        if layer.name not in modules:
            raise JoinError(f"{layer.name}: the file adapts it, and it was not given; give all its layers")
        if MARK in modules[layer.name].__dict__:
            raise JoinError(f"{layer.name} has a joined adapter already: detach it, or join the files into one")
    starts: dict[tuple[torch.device, torch.dtype], int] = {}
    for layer in made.layers:
        module = modules[layer.name]
        weight = module.weight
        assert isinstance(weight, Tensor)
        key, rank = (weight.device, weight.dtype), layer.rank
        begin = starts.get(key, 0)
        starts[key] = begin + rank
        t = stitching.joined_factors(made, layer)
        t = {name: tensor.to(weight.device, weight.dtype) for name, tensor in t.items()}
        branch = Branch(module, t, attached.shared, attached.banks[key].values[begin : begin + rank])
        attached._undo.append((module, branch.attach()))
        module.__dict__[MARK] = attached


def _ranks(made: Plan, parts: Parts, path: Path, model: str) -> list[list[int]]:
    """Each layer's ranks by file: what the metadata says, where it says so."""
    family = family_of([path], model)
    found = []
    for layer in made.layers:
        own = parts.ranks.get(module_name(family, layer.rows[0], layer.stored))
        known = list(own) if own else [layer.rank] + [0] * (len(parts.files) - 1)
        if sum(known) != layer.rank or len(known) != len(parts.files):
            raise JoinError(f"{path}: {layer.name} is of rank {layer.rank}, its metadata says {known}; join it again")
        found.append(known)
    return found


def _whole_ranks(ranks: Mapping[str, Sequence[int]], files: int) -> tuple[list[int], str]:
    """Each file's rank in the layers that it adapts, and the first layer where one has another; empty if none."""
    whole = [0] * files
    for name, own in ranks.items():
        for file, rank in enumerate(own):
            if rank and whole[file] not in (0, rank):
                return [max(r[f] for r in ranks.values()) for f in range(files)], name
            whole[file] = rank or whole[file]
    return whole, ""


def _banks(
    modules: Mapping[str, nn.Module], ranks: Mapping[str, Sequence[int]], whole: Sequence[int]
) -> dict[tuple[torch.device, torch.dtype], Bank]:
    """One vector of diagonals for each device and dtype among the layers, in the layers' order."""
    places: dict[tuple[torch.device, torch.dtype], list[tuple[int, int]]] = {}
    for name, own in ranks.items():
        weight = modules[name].weight if name in modules else torch.empty(0)
        assert isinstance(weight, Tensor)
        numbers = places.setdefault((weight.device, weight.dtype), [])
        numbers += [(file, sum(whole[:file]) + k) for file, rank in enumerate(own) for k in range(rank)]
    return {
        (device, dtype): Bank(
            torch.ones(len(numbers), dtype=dtype, device=device),
            torch.tensor([file for file, _ in numbers], device=device),
            torch.tensor([place for _, place in numbers], device=device),
        )
        for (device, dtype), numbers in places.items()
    }
