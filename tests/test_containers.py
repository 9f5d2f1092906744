"""A safetensors file's header: each container vector gets its right answer, and the library's where it has one."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from container_vectors import ACCEPTED, HUGE, REFUSED, entry, one, pack
from safetensors import SafetensorError, safe_open

from fulldiff.harness.files.container import BITS, FileError, Header, TensorInfo, read_header

FUZZ = int(os.environ.get("FULLDIFF_FUZZ", "2000"))
SEED = 20240607
STRICTER = (
    " twice",  # the format forbids equal keys; the library keeps the last
    "its header begins with a space",  # the format says "{"; the library's JSON parser skips space
    "its header begins with '\\",  # the same for a tab or a line's end
    ", not an object",  # the library reads a list as an entry, its fields by position
    "beyond 64 bits",  # the library reads a longer number as a float, which only an unknown field may hold
)
"""The reasons for which a file is refused that the library may accept."""


def write(folder: Path, data: bytes) -> Path:
    path = folder / "file.safetensors"
    path.write_bytes(data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        read_header(path)
    return str(caught.value)


def library_accepts(path: Path) -> bool:
    try:
        with safe_open(path, "np"):
            return True
    except SafetensorError:
        return False


@pytest.mark.parametrize("vector", REFUSED)
def test_a_bad_file_is_refused_with_its_name_the_reason_and_what_to_do(tmp_path: Path, vector: str) -> None:
    data, reason = REFUSED[vector]
    message = refusal(write(tmp_path, data))
    assert message.startswith(f"{tmp_path / 'file.safetensors'}: ")
    assert reason in message
    assert "; " in message
    assert len(message) < len(str(tmp_path)) + 500


@pytest.mark.parametrize("vector", ACCEPTED)
def test_a_sound_file_is_read_as_the_library_reads_it(tmp_path: Path, vector: str) -> None:
    path = write(tmp_path, ACCEPTED[vector])
    header = read_header(path)
    with safe_open(path, "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert header.metadata == (file.metadata() or {})
    assert {name: (info.dtype, list(info.shape)) for name, info in header.tensors.items()} == {
        name: (found.get_dtype(), found.get_shape()) for name, found in slices.items()
    }


@pytest.mark.parametrize("vector", REFUSED)
def test_the_library_refuses_too_or_the_difference_is_listed(tmp_path: Path, vector: str) -> None:
    path = write(tmp_path, REFUSED[vector][0])
    if library_accepts(path):
        assert any(reason in refusal(path) for reason in STRICTER)


def test_every_dtype_that_the_library_knows_is_known(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError) as caught:
        safe_open(write(tmp_path, one(dtype='"F33"')), "np")
    assert set(str(caught.value).split("`")[3::2]) <= set(BITS)


def test_offsets_count_from_the_end_of_the_header(tmp_path: Path) -> None:
    path = write(tmp_path, pack(f'{{"a":{entry()},"__metadata__":{{"x":"1"}}}}  ', b"\0\0\x80\x3f"))
    header = read_header(path)
    assert header == Header(path, {"a": TensorInfo("F32", (1,), 0, 4)}, {"x": "1"}, path.stat().st_size - 4)


@pytest.mark.parametrize("vector", ["torch's zip", "pickle", "torch's old pickle"])
def test_a_pickle_under_pt_is_refused_with_the_way_to_convert_it(tmp_path: Path, vector: str) -> None:
    path = tmp_path / "adapter.pt"
    path.write_bytes(REFUSED[vector][0])
    assert "never loaded here: convert it in a sandbox, with torch.load(…, weights_only=True)" in refusal(path)


def test_the_content_decides_not_the_suffix(tmp_path: Path) -> None:
    path = tmp_path / "adapter.pt"
    path.write_bytes(one())
    assert list(read_header(path).tensors) == ["a"]


def test_what_cannot_be_opened_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{tmp_path}: it is a directory" in refusal(tmp_path)
    assert "missing: No such file or directory" in refusal(tmp_path / "missing")
    assert "no file can have this name" in refusal(tmp_path / "a\0b")
    path = write(tmp_path, one())

    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    assert f"{path}: Permission denied; name a safetensors file that can be read" in refusal(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is a pipe" in refusal(tmp_path / "pipe")


def test_a_large_header_takes_well_under_100_ms(tmp_path: Path) -> None:
    entries = {
        f"lora_unet_down_blocks_1_attentions_0_layer_{i}.lora_up.weight": {
            "dtype": "F16",
            "shape": [1280, 1],
            "data_offsets": [2560 * i, 2560 * (i + 1)],
        }
        for i in range(2364)
    }
    path = write(tmp_path, pack(json.dumps(entries), bytes(2560 * len(entries))))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert len(read_header(path).tensors) == 2364
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1


class Raw(str):
    """JSON text that stands for itself."""


class Pairs(list[tuple[str, object]]):
    """A JSON object that may have a key twice."""


def dump(value: object) -> str:
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{dump(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return value if isinstance(value, Raw) else json.dumps(value, ensure_ascii=False)


def sample() -> Pairs:
    """A header of five tensors over 34 bytes, out of order, one empty and one 0-D, with metadata."""
    tensors = [("F32", [2, 2], [0, 16]), ("F16", [1, 4], [20, 28]), ("BF16", [], [28, 30]), ("F4", [8], [30, 34])]
    tensors += [("I64", [3, 0], [16, 16]), ("U8", [4], [16, 20])]
    named = (
        (f"t{i}", Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", offsets)]))
        for i, (dtype, shape, offsets) in enumerate(tensors)
    )
    return Pairs([("__metadata__", Pairs([("format", "pt"), ("rank", "[4, 8")])), *named])


NUMBERS = (0, 1, 2, 4, 8, 16, 20, 28, 30, 34, -1, 2**31, 2**63, 2**64 - 1, 2**64, True, 4.0)
TEXTS = ("F32", "F16", "I32", "F8_E4M3", "F6_E2M3", "F33", "", "t0", "dtype", "\ud800", "\0", "ü", None)
RAWS = ("NaN", "-Infinity", "-0", "1e999", "1E1", "{}", "[]", "[[]]", '{"x":1}', '"\\udc00"', "01", HUGE,
        "[" * 125 + "]" * 125, "[" * 2000 + "]" * 2000, "[" * 100_000)  # fmt: skip


def nasty(rng: random.Random) -> object:
    return rng.choice([rng.choice(NUMBERS), rng.choice(TEXTS), Raw(rng.choice(RAWS))])


def edit(value: object, rng: random.Random) -> object:
    """One change somewhere in a JSON value: an item replaced, nudged, doubled, dropped, moved, added or renamed."""
    if not isinstance(value, list) or not value or rng.random() < 0.1:
        return value + rng.choice((-1, 1, 2)) if type(value) is int and rng.random() < 0.5 else nasty(rng)
    at, act = rng.randrange(len(value)), rng.choice(("inside",) * 6 + ("double", "drop", "move", "add", "rename"))
    pairs, item = isinstance(value, Pairs), value[at]
    if act == "inside":
        value[at] = (item[0], edit(item[1], rng)) if pairs else edit(item, rng)
    elif act == "double":
        value.insert(rng.randrange(len(value)), item)
    elif act == "drop":
        del value[at]
    elif act == "move":
        rng.shuffle(value)
    else:
        key = rng.choice(("x", "t0", "shape", "__metadata__", "слой"))
        value.append((key, item[1] if act == "rename" else nasty(rng)) if pairs else nasty(rng))
    return value


def edited(rng: random.Random) -> bytes:
    header: object = sample()
    for _ in range(rng.choice((1, 1, 2, 3))):
        header = edit(header, rng)
    return pack(dump(header) + " " * rng.randrange(3), bytes(max(0, 34 + rng.choice((0, 0, 0, 0, 0, 0, -1, 1, 4)))))


def relaid(rng: random.Random) -> bytes:
    """Tensors of any dtype and shape in any order, laid out without a gap unless one of them has an odd end."""
    entries, filled = Pairs(), 0
    for i in range(rng.randrange(6)):
        dtype, shape = rng.choice(list(BITS)), [rng.choice((0, 1, 2, 3, 4, 8)) for _ in range(rng.randrange(4))]
        end = filled + math.prod(shape) * BITS[dtype] // 8
        entries.append((f"t{i}", Pairs([("data_offsets", [filled, end]), ("dtype", dtype), ("shape", shape)])))
        filled = end
    rng.shuffle(entries)
    return pack(dump(entries if rng.random() < 0.7 else edit(entries, rng)), bytes(filled))


def flipped(rng: random.Random) -> bytes:
    data = bytearray(pack(dump(sample()), bytes(34)))
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(rng: random.Random) -> bytes:
    """A piece left out or repeated, or the end cut off; the header's length is as it was, or made to fit."""
    data = pack(dump(sample()), bytes(34))
    begin, end = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    data = rng.choice((data[:begin], data[:begin] + data[end:], data[:end] + data[begin:]))
    return pack(data[8:-34], data[-34:]) if rng.random() < 0.5 else data


MUTATIONS: tuple[Callable[[random.Random], bytes], ...] = (edited, edited, relaid, flipped, cut)


def test_no_mutated_header_raises_anything_else_or_passes_where_the_library_refuses(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    path, accepted = tmp_path / "file.safetensors", 0
    for number in range(FUZZ):
        data = rng.choice(MUTATIONS)(rng)
        path.write_bytes(data)
        try:
            read_header(path)
        except FileError as error:
            justified = not library_accepts(path) or any(reason in str(error) for reason in STRICTER)
            assert justified, f"mutant {number} is refused here alone: {error}\n{data[:2000]!r}"
        else:
            accepted += 1
            assert library_accepts(path), f"mutant {number} is accepted here alone:\n{data[:2000]!r}"
    assert FUZZ / 10 < accepted < FUZZ / 2
