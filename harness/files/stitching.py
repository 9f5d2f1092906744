"""A join's tensors, in workers only (torch): one layer at a time is read, weighed, joined and written.

A block's weight · alpha / rank goes into one of its factors, once, in float64: into up or down, whichever leaves
more of its values in the dtype's normal range (an f16 up of 1e-4 times 1/32 would lose half its digits). Where the
joined layer has no core, a block's core is multiplied into its down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulldiff.cases.model import Adapter, FactorDType
from fulldiff.harness.files.container import FileError, Header, TensorInfo
from fulldiff.harness.files.joined import METADATA, Spec, written
from fulldiff.harness.files.joining import (
    ALPHA,
    DOWN,
    EMBED,
    MID,
    UP,
    Block,
    JoinedLayer,
    Plan,
    family_of,
    plan,
)
from fulldiff.harness.files.layout import Layout
from fulldiff.harness.files.metadata import CONFIG
from fulldiff.harness.files.writers import Writer, Written

TORCH: dict[str, torch.dtype] = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPES: dict[FactorDType, torch.dtype] = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Triple:
    """A LoRA in float64 whose scale is in its factors: up (out, r), mid (r, r, *kernel) or None, down (r, in, *…)."""

    up: Tensor
    mid: Tensor | None
    down: Tensor


def read_tensor(header: Header, name: str) -> Tensor:
    """One tensor, read from the file without mapping it, so that what was read is given back at once."""
    info = header.tensors[name]
    if info.dtype not in TORCH:
        raise FileError(f"{header.path}: {name} is {info.dtype}, which cannot be read; convert it to F32")
    raw = bytearray(info.end - info.begin)
    with header.path.open("rb") as file:
        file.seek(header.data + info.begin)
        if file.readinto(raw) != len(raw):
            raise FileError(f"{header.path}: ends within {name}; it changed while it was read, try again")
    return _tensor(raw, info)


def _tensor(raw: bytearray, info: TensorInfo) -> Tensor:
    if not raw:
        return torch.empty(info.shape, dtype=TORCH[info.dtype])
    return torch.frombuffer(raw, dtype=TORCH[info.dtype]).reshape(info.shape)


def triple(header: Header, block: Block, layer: JoinedLayer) -> Triple:
    """One block's factors, weighed.

    Raises:
        FileError: a factor or its alpha is not finite; the message names file, tensor and value.
    """
    assert block.adapter.source is not None
    names = block.adapter.source.tensors
    t = {factor: read_tensor(header, name).double() for factor, name in names.items()}
    if block.weight:
        _check_finite(header, names, t)
    scale = block.weight * own_scale(block.adapter, t) if block.weight else 0.0
    if not math.isfinite(scale):
        raise FileError(f"{header.path}: {names[UP]}: a scale of {scale} cannot be folded; mend its alpha")
    if block.ranges:
        t[UP] = torch.cat([t[UP][start:end] for start, end in block.ranges])
    return fold(t, scale, layer.shape, layer.core, DTYPES[layer.dtype])


def _check_finite(header: Header, names: Mapping[str, str], t: Mapping[str, Tensor]) -> None:
    for factor, tensor in t.items():
        if factor != ALPHA and not bool(torch.isfinite(tensor).all()):
            value = float(tensor[~torch.isfinite(tensor)].flatten()[0])
            raise FileError(f"{header.path}: {names[factor]} holds {value}; leave the file out, or give it weight 0")


def own_scale(adapter: Adapter, t: Mapping[str, Tensor]) -> float:
    """alpha / rank, of a tensor or the file's metadata, or a scale tensor; 1 where there is none."""
    if "scale" in t:
        return float(t["scale"].reshape(()))
    if ALPHA in t:
        return float(t[ALPHA].reshape(())) / t[DOWN].shape[0]
    return 1.0 if adapter.alpha.form == "absent" else adapter.alpha.value / t[DOWN].shape[0]


def fold(t: Mapping[str, Tensor], scale: float, shape: Sequence[int], core: bool, dtype: torch.dtype) -> Triple:
    """Factors in the layer's shapes, with the scale in one of them; ``dtype`` is what they will be stored in.

    A scale of 0 gives zeros whatever the factors hold. ``core`` keeps a mid factor as it is.
    """
    kernel = list(shape[2:])
    up, down, mid = t[UP].flatten(1), t[DOWN], t.get(MID)
    if mid is not None and not core:
        down, mid = torch.einsum("mn...,ni->mi...", mid, down.flatten(1)), None
    down = down.reshape(down.shape[0], shape[1], *([1] * len(kernel) if mid is not None else kernel))
    if scale == 0:
        return Triple(torch.zeros_like(up), None if mid is None else torch.zeros_like(mid), torch.zeros_like(down))
    if _small(up * scale, dtype) <= _small(down * scale, dtype):
        return Triple(up * scale, mid, down)
    return Triple(up, mid, down * scale)


def _small(t: Tensor, dtype: torch.dtype) -> float:
    """The share of values that are not zero and leave the dtype's normal range, at either end."""
    size, limits = t.abs(), torch.finfo(dtype)
    return float((((size > 0) & (size < limits.tiny)) | (size > limits.max)).double().mean()) if t.numel() else 0.0


def stack(triples: Sequence[Triple], shape: Sequence[int]) -> dict[str, Tensor]:
    """The joined factors in float64: ups side by side, downs one above another, cores on the diagonal."""
    kernel = list(shape[2:])
    up = torch.cat([t.up for t in triples], 1)
    joined = {UP: up.reshape(*up.shape, *[1] * len(kernel)), DOWN: torch.cat([t.down for t in triples])}
    cores = [t.mid for t in triples if t.mid is not None]
    return joined | ({MID: diagonal(cores, kernel)} if cores else {})


def diagonal(cores: Sequence[Tensor], kernel: Sequence[int]) -> Tensor:
    """(Σr, Σr, *kernel) with the cores as blocks on its diagonal."""
    whole = torch.zeros(*[sum(core.shape[0] for core in cores)] * 2, *kernel, dtype=torch.float64)
    at = 0
    for core in cores:
        end = at + core.shape[0]
        whole[at:end, at:end] = core.reshape(core.shape[0], core.shape[0], *kernel)
        at = end
    return whole


def joined_factors(made: Plan, layer: JoinedLayer, numbers: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The tensors of one layer in its dtype; ``numbers`` weigh each rank once more."""
    triples = [triple(made.headers[block.file], block, layer) for block in layer.blocks]
    wide = stack(triples, layer.shape)
    if numbers is not None:
        wide[UP] = weighed(wide[UP], numbers)
    factors = {name: tensor.to(DTYPES[layer.dtype]) for name, tensor in wide.items()}
    for name, tensor in factors.items():
        if bool(tensor.isinf().any()):
            raise FileError(f"{layer.name}: {name} leaves the range of {layer.dtype}; write it as f32")
    return factors | {ALPHA: torch.tensor(float(layer.rank))}


def weighed(up: Tensor, numbers: Sequence[float]) -> Tensor:
    """up (out, r, …) with each column multiplied by its number; 0 gives zeros."""
    v = torch.tensor(numbers, dtype=torch.float64).reshape(1, -1, *[1] * (up.dim() - 2))
    return torch.where(v == 0, 0.0, up * v)


def write(made: Plan, family: Writer, out: Path) -> int:
    """Write the joined file, layer by layer; how many layers it has.

    Raises:
        FileError: a value cannot be joined, or the family cannot hold a layer.
    """
    return _write(made, written(made, family), out, {})


def realise(path: Path, model: str, out: Path, numbers: Mapping[str, Sequence[float]]) -> int:
    """Write the file at ``path`` anew with each rank's number (layer's name → Σr of them) in its up, once.

    Names, dtypes, tokens and what the file says of its parts stay.
    """
    made = plan([path], [1.0], model, family := family_of([path], model))
    tokens = tuple(replace(token, name=token.tensor) for token in made.tokens)
    made = replace(made, tokens=tokens)
    spelled = written(made, family)
    kept = {name: text for name, text in made.headers[0].metadata.items() if name == METADATA or text == EMBED}
    own = {name: text for name, text in spelled.metadata.items() if text != EMBED}
    return _write(made, replace(spelled, metadata=own | kept), out, numbers)


def _write(made: Plan, spelled: Written[Spec], out: Path, numbers: Mapping[str, Sequence[float]]) -> int:
    specs = {name: (spec.dtype, spec.shape) for name, spec in spelled.tensors.items()}
    tokens = {token.name: (token.dtype, token.shape) for token in made.tokens}
    by_layer: dict[int, dict[str, str]] = {}
    for name, spec in spelled.tensors.items():
        by_layer.setdefault(spec.layer, {})[spec.factor] = name
    with Layout(out, specs | tokens, spelled.metadata) as layout:
        for at, names in by_layer.items():
            layer = made.layers[at]
            factors = joined_factors(made, layer, numbers.get(layer.name))
            for factor, name in names.items():
                layout.put(name, raw_bytes(factors[factor]))
        for token in made.tokens:
            layout.put(token.name, raw_bytes(read_tensor(made.headers[token.file], token.tensor)))
    if spelled.config is not None:
        out.with_name(CONFIG).write_text(json.dumps(spelled.config, indent=1), encoding="utf-8")
    return len(made.layers)


def raw_bytes(t: Tensor) -> memoryview:
    """A tensor's bytes as they are stored."""
    array: Any = t.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
