"""A safetensors file's header: names, dtypes and shapes, checked against the format, never the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fulldiff.cases.model import Shape


class FileError(ValueError):
    """A file that cannot be used; the message names the file, what is at fault and what to do."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its dtype as the format spells it (``F16``, ``BF16``, ``F8_E4M3``, …) and its shape."""

    dtype: str
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file declares. ``data`` is where tensor bytes begin; TensorInfo counts from there."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data: int
