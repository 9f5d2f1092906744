"""A LoKr or LoRA file's header in the manager: names, shapes and dtypes, never the tensors.

Names are matched to a model's layers through the layer tables' aliases (kohya, LyCORIS, diffusers and
ldm spellings). What does not match is counted and named, never dropped silently.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fulldiff.cases.model import Adapter, Alpha, DType, FileRef, Shape
from fulldiff.cases.tables import TableRow, alias_index

HEADER_LIMIT = 100_000_000
DTYPE_NAMES: dict[str, DType] = {"F64": "f64", "F32": "f32", "BF16": "bf16", "F16": "f16"}
SUFFIXES = ("lora_up.weight", "lora_down.weight", "lora_mid.weight", "lokr_w1", "lokr_w1_a", "lokr_w1_b",
            "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "alpha")  # fmt: skip


class FileError(ValueError):
    """A file that is not a usable adapter; the message names the file, the reason and what to do."""


@dataclass(frozen=True)
class AdapterFile:
    """What a file holds for a model: (layer, adapter) pairs, and the tensors that fit nothing."""

    path: Path
    modules: tuple[tuple[TableRow, Adapter], ...]
    unmatched: tuple[str, ...]


def header(path: Path) -> dict[str, tuple[str, Shape]]:
    """Tensor name → (dtype, shape), from the first bytes of a safetensors file."""
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", _exactly(file.read(8), 8, path))[0]
            if not 2 <= length <= min(HEADER_LIMIT, path.stat().st_size - 8):
                raise FileError(f"{path}: not a safetensors file (header length {length}); convert it first")
            entries = json.loads(file.read(length))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}; name a safetensors file") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FileError(f"{path}: its header is no JSON ({error}); download it again") from error
    if not isinstance(entries, dict):
        raise FileError(f"{path}: its header is a {type(entries).__name__}, not an object")
    return dict(_tensors(path, entries))


def read(path: Path, model: str) -> AdapterFile:
    """Match the file's modules to the layers of ``model``; raises FileError where nothing matches."""
    index = alias_index(model)
    modules: dict[str, dict[str, tuple[str, Shape]]] = {}
    unmatched = []
    for name, entry in header(path).items():
        suffix = next((s for s in SUFFIXES if name.endswith(f".{s}")), None)
        prefix = name[: -len(suffix) - 1] if suffix else name
        if suffix is None or len(index.get(prefix, ())) != 1:
            unmatched.append(name)
        else:
            modules.setdefault(prefix, {})[suffix] = entry
    if not modules:
        raise FileError(
            f"{path}: none of its {len(unmatched)} tensors names a layer of {model} (first: {unmatched[:3]})"
        )
    pairs = tuple((index[prefix][0], _adapter(path, prefix, found)) for prefix, found in modules.items())
    return AdapterFile(path, pairs, tuple(unmatched))


def _adapter(path: Path, prefix: str, found: dict[str, tuple[str, Shape]]) -> Adapter:
    factors = {name: shape for name, (_, shape) in found.items() if name != "alpha"}
    if not factors:
        raise FileError(f"{path}: {prefix} has an alpha but no factors; remove it or restore them")
    dtype = DTYPE_NAMES.get(found[next(iter(factors))][0])
    if dtype is None:
        raise FileError(
            f"{path}: {prefix} is stored as {found[next(iter(factors))][0]}; convert it to F16, BF16 or F32"
        )
    kind = "lokr" if any(name.startswith("lokr") for name in factors) else "lora"
    return Adapter(
        kind,
        factors,
        Alpha(),
        dtype=dtype,
        source=FileRef(str(path.resolve()), {name: f"{prefix}.{name}" for name in found}),
    )


def _tensors(path: Path, entries: dict[str, object]) -> Iterator[tuple[str, tuple[str, Shape]]]:
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict) or not {"dtype", "shape"} <= set(entry):
            raise FileError(f"{path}: header entry {name!r} has no dtype and shape; write the file anew")
        yield name, (str(entry["dtype"]), tuple(entry["shape"]))


def _exactly(data: bytes, size: int, path: Path) -> bytes:
    if len(data) != size:
        raise FileError(f"{path}: {len(data)} bytes are no safetensors file; download it again")
    return data
