"""The worker's side of a join case: its files written, and any file read back as the reference's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fulldiff.cases import tensors as generator
from fulldiff.cases.model import Adapter, Case, JoinCase, Values
from fulldiff.cases.tables import TableRow, load_table
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import read_header
from fulldiff.harness.files.fold import prepared, put
from fulldiff.harness.files.joining import EMBED, is_token
from fulldiff.harness.files.match import matched
from fulldiff.harness.files.piece import Piece
from fulldiff.harness.files.stitching import read_tensor
from fulldiff.harness.files.writers import Writer, write
from fulldiff.harness.realise import DTYPES
from fulldiff.reference.factors import Factors
from fulldiff.reference.join import Part

TOKEN_SIZE = 768


def write_files(case: Case, folder: Path) -> list[Path]:
    """Write the case's files, each in a folder of its own (PEFT's has a config beside it)."""
    body = case.body
    assert isinstance(body, JoinCase)
    paths = []
    for at, file in enumerate(body.files):
        if file.path is not None:
            paths.append(Path(file.path))
            continue
        path = folder / str(at) / f"file{at}.safetensors"
        path.parent.mkdir()
        pieces = [_piece(case.seed, body, at, name, adapter) for name, adapter in file.modules.items()]
        family: Writer = file.spelling  # type: ignore[assignment]
        save(path, family, pieces, {f"<s{n + 1}>": _token(case.seed, at, n) for n in range(file.tokens)})
        paths.append(path)
    return paths


def save(path: Path, family: Writer, pieces: Sequence[Piece[Tensor]], tokens: Mapping[str, Tensor]) -> None:
    """Write pieces and learned tokens as one file of ``family``."""
    spelled = write(family, prepared(family, pieces)) if pieces else write("kohya", pieces)
    metadata = spelled.metadata | dict.fromkeys(tokens, EMBED)
    put(path, replace(spelled, tensors=spelled.tensors | dict(tokens), metadata=metadata))


@cache
def rows_of(model: str) -> dict[str, TableRow]:
    """The model's layers by name with their part."""
    return {f"{row.part}.{row.name}": row for row in load_table(model)}


def _piece(seed: int, body: JoinCase, file: int, name: str, adapter: Adapter) -> Piece[Tensor]:
    row = rows_of(body.model.name)[name]
    tensors = {
        factor: _made(body.values, seed, f"{file}.{name}.{factor}", shape).to(DTYPES[adapter.dtype])
        for factor, shape in adapter.factors.items()
    }
    if adapter.alpha.shape is not None:
        alpha = torch.tensor(adapter.alpha.value, dtype=DTYPES[adapter.alpha.dtype])
        tensors["alpha"] = alpha.reshape(adapter.alpha.shape)
    return Piece((row,), adapter.kind, tensors)


def _made(values: Values, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(generator.factor(values, seed, name, shape)))


def _token(seed: int, file: int, number: int) -> Tensor:
    return torch.from_numpy(generator.normal(seed, f"{file}.token.{number}", (TOKEN_SIZE,))).float()


def parts_of_files(paths: Sequence[Path], weights: Sequence[float], model: str) -> dict[str, list[Part]]:
    """For each layer that any file adapts what each holds, by name with its part, in the table's order."""
    found: dict[str, list[Part]] = {}
    for at, (path, weight) in enumerate(zip(paths, weights, strict=True)):
        for name, adapters in adapters_of(path, model).items():
            text = name.startswith("text_encoder")
            found.setdefault(name, []).extend(Part(adapter, weight, at, text) for adapter in adapters)
    return {name: found[name] for name in rows_of(model) if name in found}


def adapters_of(path: Path, model: str) -> dict[str, list[Factors]]:
    """The adapters of one file in float64, by layer; layers that are stored fused are not looked at."""
    header = read_header(path)
    found: dict[str, list[Factors]] = {}
    for target in matched(header, table(model)).targets:
        (row,), source, alpha = target.rows, target.adapter.source, target.adapter.alpha
        assert source is not None
        t = {factor: read_tensor(header, name).double() for factor, name in source.tensors.items()}
        if alpha.form != "absent":
            t["alpha"] = torch.tensor(alpha.value, dtype=torch.float64)
        found.setdefault(f"{row.part}.{row.name}", []).append(Factors(target.adapter.kind, t))
    return found


def tokens_of(path: Path) -> dict[str, Tensor]:
    """A file's learned tokens by name, in the order of their names."""
    header = read_header(path)
    return {name: read_tensor(header, name) for name in sorted(header.tensors) if is_token(header, name)}
