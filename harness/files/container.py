"""A safetensors file's header: names, dtypes and shapes, checked against the format, never the tensors.

``read_header`` accepts nothing that the safetensors library refuses. It is stricter in what the format forbids
and the library lets pass: a duplicate name, a header that does not begin with ``{``, an entry that is no object,
an integer beyond 64 bits.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from fulldiff.cases.model import Shape
from fulldiff.harness.files.sniff import SNIFF_SIZE, sniff

PREFIX = 8
"""The size of the header's length, which comes before the header."""
HEADER_CAP = 100_000_000
WORD = 2**64
NESTING = 125
"""How deeply the value of a field that the format does not know may be nested (the library's limit)."""
METADATA = "__metadata__"
FIELDS = ("dtype", "shape", "data_offsets")
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Every dtype of the format, and the bits of one element."""

REWRITE = "write the file anew with the safetensors library"
DOWNLOAD = "download or copy it again"
NAME = "name a safetensors file"
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


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


class _Fault(Exception):
    """Why a file is refused and what to do; ``read_header`` puts the file's name before it."""

    def __init__(self, reason: str, remedy: str = REWRITE) -> None:
        super().__init__(f"{reason}; {remedy}")


def read_header(path: Path) -> Header:
    """What the file at ``path`` declares, in its own order; FileError where it is no sound safetensors file.

    Only the header is read, and the file's size: whether the tensors' values are finite is not looked at.
    """
    try:
        raw, size = _load(path)
        entries = _parse(raw)
        metadata = _metadata(entries.pop(METADATA, None))
        tensors = {name: _tensor(name, entry) for name, entry in entries.items()}
        _check_layout(tensors, size - PREFIX - len(raw))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}; {NAME} that can be read") from error
    except _Fault as fault:
        raise FileError(f"{path}: {fault}") from fault
    return Header(path, tensors, metadata, PREFIX + len(raw))


def _load(path: Path) -> tuple[bytes, int]:
    """The header's bytes and the size of the whole file."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(SNIFF_SIZE)
        end = PREFIX + _length(head, size)
        raw = head[PREFIX:end] + file.read(max(0, end - len(head)))
    if len(raw) != end - PREFIX:
        raise _Fault("it changed while it was read", "try again once it is written")
    return raw, size


def _open(path: Path) -> BinaryIO:
    """Open a regular file; a pipe or a device could block, so it is refused unopened."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:
        raise _Fault(f"no file can have this name ({error})", NAME) from error
    if stat.S_ISDIR(mode):
        raise _Fault("it is a directory", f"{NAME} in it")
    if not stat.S_ISREG(mode):
        raise _Fault("it is a pipe, a socket or a device", NAME)
    return path.open("rb")


def _length(head: bytes, size: int) -> int:
    """The header's length, from the first bytes of a file of ``size`` bytes."""
    length = int.from_bytes(head[:PREFIX], "little")
    begins_well = head[PREFIX : PREFIX + 1] == b"{"
    if not (begins_well and length <= HEADER_CAP) and (found := sniff(head)):
        raise _Fault(*found)
    if size < PREFIX:
        raise _Fault(f"it has {size} bytes, no header" if size else "it is empty", DOWNLOAD)
    if length == 0:
        raise _Fault("its header length is 0")
    if length > HEADER_CAP:
        raise _Fault(f"its header length {length} is above the format's cap of {HEADER_CAP}", NAME)
    if length > size - PREFIX:
        raise _Fault(f"its header length {length} is beyond its {size} bytes", DOWNLOAD)
    if not begins_well:
        raise _Fault(f"its header begins with {_first(head[PREFIX:])}, not with '{{'")
    return length


def _first(header: bytes) -> str:
    """In words, what a header begins with that does not begin as it must."""
    names = {b"[": "'[' (a JSON list)", b" ": "a space", b"\xef\xbb\xbf": "a byte order mark"}
    return next((name for start, name in names.items() if header.startswith(start)), repr(header[:1])[1:])


def _parse(raw: bytes) -> dict[str, object]:
    """The header as JSON: each key once, no half of a surrogate pair, no number that JSON does not know."""
    try:
        text = raw.decode()
        entries: dict[str, object] = json.loads(
            text, object_pairs_hook=_unique, parse_int=_integer, parse_float=_real, parse_constant=_constant
        )
        if HALF_PAIR.search(text):
            json.dumps(entries, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _Fault(f"its header is not UTF-8 (byte {raw[error.start]:#04x} at {error.start})") from error
    except UnicodeEncodeError as error:
        raise _Fault(f"its header has {error.object[error.start]!a}, half of a surrogate pair") from error
    except json.JSONDecodeError as error:
        raise _Fault(f"its header is no JSON ({error})") from error
    except RecursionError as error:
        raise _Fault("its header is nested too deeply") from error
    return entries


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _Fault(f"its header has the key {_short(key)} twice")
    return found


def _integer(digits: str) -> int | float:
    """An integer of 64 bits. "-0" is no integer, as in the library; no long number is ever converted."""
    if len(digits) > 21 or not -WORD < int(digits) < WORD:
        raise _Fault(f"its header has the number {digits[:40]}, beyond 64 bits")
    return -0.0 if digits == "-0" else int(digits)


def _real(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise _Fault(f"its header has the number {digits[:40]}, out of range")
    return value


def _constant(name: str) -> NoReturn:
    raise _Fault(f"its header has {name}, which is no JSON")


def _metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Fault(f"its {METADATA} is {_short(value)}, not an object")
    for key, text in value.items():
        if not isinstance(text, str):
            raise _Fault(f"its {METADATA} has {_short(text)} under {_short(key)}, not a string")
    return value


def _tensor(name: str, entry: object) -> TensorInfo:
    """Check one entry by itself: its fields, and that shape and dtype take the bytes that the offsets span."""
    fields = _fields(name, entry)
    dtype = _dtype(name, fields["dtype"])
    shape, (begin, end) = _counts(name, "shape", fields["shape"]), _offsets(name, fields["data_offsets"])
    size, span = _size(name, dtype, shape), end - begin
    if size != span:
        raise _Fault(
            f"tensor {_short(name)}: {dtype} {_short(list(shape))} takes {size} bytes, its offsets span {span}"
        )
    return TensorInfo(dtype, shape, begin, end)


def _fields(name: str, entry: object) -> dict[str, object]:
    if not isinstance(entry, dict):
        raise _Fault(f"the entry of {_short(name)} is {_short(entry)}, not an object")
    for field in FIELDS:
        if field not in entry:
            raise _Fault(f"tensor {_short(name)} has no {field}")
    _check_nesting(name, [value for field, value in entry.items() if field not in FIELDS])
    return entry


def _check_nesting(name: str, level: list[object]) -> None:
    """Refuse what the library cannot parse: values nested more than NESTING deep in unknown fields."""
    for _ in range(NESTING + 1):
        nested = [value for value in level if isinstance(value, dict | list)]
        if not nested:
            return
        level = [child for value in nested for child in (value.values() if isinstance(value, dict) else value)]
    raise _Fault(f"the entry of {_short(name)} is nested too deeply")


def _counts(name: str, field: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _Fault(f"tensor {_short(name)}: its {field} is {_short(value)}, not a list")
    for count in value:
        if type(count) is not int:
            raise _Fault(f"tensor {_short(name)}: its {field} has {_short(count)}, not an integer")
        if count < 0:
            raise _Fault(f"tensor {_short(name)}: its {field} has {count}, which is negative")
    return tuple(value)


def _offsets(name: str, value: object) -> tuple[int, int]:
    offsets = _counts(name, "data_offsets", value)
    if len(offsets) != 2:
        raise _Fault(f"tensor {_short(name)} has {len(offsets)} data_offsets, not 2")
    begin, end = offsets
    if end < begin:
        raise _Fault(f"tensor {_short(name)} ends at {end}, before it begins at {begin}")
    return begin, end


def _dtype(name: str, dtype: object) -> str:
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Fault(f"tensor {_short(name)} has the unknown dtype {_short(dtype)}; known are {', '.join(BITS)}")
    return dtype


def _size(name: str, dtype: str, shape: Shape) -> int:
    """The bytes of a tensor, which must be whole; no product on the way may leave 64 bits, as in the library."""
    total = 1
    for factor in (*shape, BITS[dtype]):
        total *= factor
        if total >= WORD:
            raise _Fault(f"tensor {_short(name)}: the size of {dtype} {_short(list(shape))} is beyond 64 bits")
    if total % 8:
        raise _Fault(
            f"tensor {_short(name)}: {dtype} {_short(list(shape))} takes {total} bits, which are no whole bytes"
        )
    return total // 8


def _check_layout(tensors: Mapping[str, TensorInfo], size: int) -> None:
    """The tensors must fill the ``size`` bytes after the header: no gap, no overlap, nothing left."""
    name, filled = "", 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < filled:
            raise _Fault(f"tensor {_short(name)} overlaps another: it begins at {tensor.begin}, not at {filled}")
        if tensor.begin > filled:
            raise _Fault(f"a gap of {tensor.begin - filled} bytes comes before tensor {_short(name)}")
        filled = tensor.end
    if filled > size:
        raise _Fault(f"tensor {_short(name)} ends at {filled}, but only {size} bytes follow the header", DOWNLOAD)
    if filled < size:
        raise _Fault(f"{size - filled} trailing bytes follow its last tensor")


def _short(value: object) -> str:
    """A value for a message: never long, however large or deep it is."""
    return _REPR.repr(value)
