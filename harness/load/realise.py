"""From a load case to what loaders get: the base's names and shapes, the files' tensors, the base's weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fulldiff.cases import tensors as generator
from fulldiff.cases.load_names import base_names, factor_key
from fulldiff.cases.model import Adapter, AdapterFile, Case, LoadCase, Model, Shape
from fulldiff.cases.state_dicts import state_dict
from fulldiff.harness.files.container import FileError, read_header
from fulldiff.harness.realise import DTYPES
from fulldiff.reference.key_maps import Base
from fulldiff.reference.load import File


@cache
def base_of(model: Model) -> Base:
    """The model's names; one object per model, as loaders may remember what they know of it."""
    return base_names(model)


def files_of(case: Case, body: LoadCase) -> list[File]:
    """The files with their tensors. Entries with the same contents are the same file.

    A file whose strengths are all 0 is full of NaN: nothing of it may be looked at.
    """
    named = [(identity(file), file) for file in body.files]
    heard = {name for name, file in named if file.strength or file.text_strength}
    known = {name: tensors_of(case, name, file, name not in heard) for name, file in dict(named).items()}
    return [
        File(name, known[name], file.strength, file.strength if file.text_strength is None else file.text_strength)
        for name, file in named
    ]


def identity(file: AdapterFile) -> str:
    """A file's path, or a hash of what is to be written in it."""
    if file.path is not None:
        return file.path
    return hashlib.blake2b(msgspec.json.encode((file.spelling, file.modules)), digest_size=4).hexdigest()


def tensors_of(case: Case, name: str, file: AdapterFile, silent: bool) -> Mapping[str, Tensor]:
    """A file's tensors by name."""
    if file.path is not None:
        return opened(Path(file.path))
    made: dict[str, Tensor] = {}
    for module, adapter in file.modules.items():
        made.update(_module(case.seed, name, module, adapter))
    if silent:
        return {k: torch.full_like(t, math.nan) if t.is_floating_point() else t for k, t in made.items()}
    return made


def opened(path: Path) -> dict[str, Tensor]:
    """All tensors of a real file; raises FileError, whatever is wrong with it."""
    read_header(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError, KeyError) as error:  # KeyError: a dtype that torch has not
        raise FileError(f"{path}: {error}; write the file anew with the safetensors library") from error


def _module(seed: int, file: str, module: str, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    for factor, shape in adapter.factors.items():
        stream = f"{file}.{module}.{factor}"
        maker = generator.magnitude if factor == "dora_scale" else generator.factor
        values = torch.from_numpy(maker("normal", seed, stream, shape).copy()).reshape(shape)
        yield factor_key(module, adapter.spelling, factor), values.to(DTYPES[adapter.dtype])
    if adapter.alpha.shape is not None:
        alpha = torch.tensor(adapter.alpha.value, dtype=torch.float64).reshape(adapter.alpha.shape)
        yield f"{module}.alpha", alpha.to(DTYPES[adapter.alpha.dtype])


def weight_of(seed: int, model: Model, name: str) -> Tensor:
    """A weight of the base, from the seed."""
    shape: Shape = state_dict(model).shapes[name]
    return torch.from_numpy(generator.base("normal", seed, name, shape).copy()).to(DTYPES[model.dtype])


def digest(files: Sequence[File]) -> str:
    """A hash of every tensor of the files."""
    state = hashlib.blake2b(digest_size=8)
    for file in files:
        for key, tensor in file.tensors.items():
            state.update(key.encode())
            state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return state.hexdigest()
