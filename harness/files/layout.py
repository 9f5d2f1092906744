"""Writing a safetensors file piece by piece: the header is known from shapes alone, tensors follow in any order.

Only one tensor is in memory at a time. Wider dtypes come first in the file, so that every tensor is aligned, and
within one dtype the order is the given one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from fulldiff.cases.model import Shape, numel
from fulldiff.harness.files.container import BITS, METADATA, PREFIX, FileError

ALIGNMENT = 8


class Layout:
    """An open file of these tensors (name → dtype as the format spells it, shape), each to be put once."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.spans = spans(tensors)
        self.missing = set(tensors)
        header = _header(tensors, self.spans, metadata)
        self._data = len(header)
        self._file: BinaryIO = path.open("wb")
        self._file.write(header)
        self._file.truncate(self._data + max((end for _, end in self.spans.values()), default=0))

    def put(self, name: str, data: memoryview) -> None:
        """Write the bytes of one tensor.

        Raises:
            FileError: they are not as many as its dtype and shape take.
        """
        begin, end = self.spans[name]
        raw = data.cast("B")
        if raw.nbytes != end - begin:
            raise FileError(f"{self.path}: {name} has {raw.nbytes} bytes, its shape takes {end - begin}; report this")
        self._file.seek(self._data + begin)
        self._file.write(raw)
        self.missing.discard(name)

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()
        if error is None and self.missing:
            raise FileError(f"{self.path}: {len(self.missing)} tensors were not written, {min(self.missing)} first")


def spans(tensors: Mapping[str, tuple[str, Shape]]) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes are, counted from the end of the header."""
    found, at = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -BITS[item[1][0]]):
        size = numel(shape) * BITS[dtype] // 8
        found[name] = (at, at + size)
        at += size
    return found


def _header(
    tensors: Mapping[str, tuple[str, Shape]], at: Mapping[str, tuple[int, int]], metadata: Mapping[str, str]
) -> bytes:
    """The length and the JSON, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    for name, (dtype, shape) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": list(at[name])}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(PREFIX, "little") + text
