"""Files of every container's kind: those to refuse, with the reason that must be given, and those to accept."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import struct
import zipfile

from fulldiff.harness.files.container import BITS, HEADER_CAP


def pack(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file's bytes; ``length`` overrides the header's true one."""
    raw = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]", more: str = "") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}'


def one(**fields: str) -> bytes:
    """A file with the one tensor ``a``, four bytes of it; the fields are JSON text."""
    return pack(f'{{"a":{entry(**fields)}}}', bytes(4))


def meta(value: str) -> bytes:
    return pack(f'{{"a":{entry()},"__metadata__":{value}}}', bytes(4))


def two(first: str, second: str, size: int) -> bytes:
    """Two tensors of one float each at the given offsets, and ``size`` bytes of data."""
    return pack(f'{{"a":{entry(offsets=first)},"b":{entry(offsets=second)}}}', bytes(size))


def zipped(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, bytes(100))
    return file.getvalue()


def four(dtype: str, size: int) -> bytes:
    """Four elements of a dtype, of ``size`` bytes together."""
    return pack('{"a":' + entry(f'"{dtype}"', "[4]", f"[0,{size}]") + "}", bytes(size))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
LEGACY_PICKLE = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + bytes(100)  # torch's, before zips
GOOD = f'{{"a":{entry()}}}'
HUGE = "9" * 10_000  # Python refuses to convert a number of more than 4,300 digits

REFUSED: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "it is empty"),
    "3 bytes": (b"\1\0\0", "it has 3 bytes"),
    "7 bytes": (bytes(7), "it has 7 bytes"),
    "length 0": (pack(""), "header length is 0"),
    "length 0 before data": (pack("", bytes(100)), "header length is 0"),
    "length 1": (pack("{"), "no JSON"),
    "length 2^63": (pack(GOOD, bytes(4), 2**63), "header length 9223372036854775808 is above"),
    "length 2^64-1": (pack(GOOD, bytes(4), 2**64 - 1), "is above the format's cap"),
    "length beyond the file": (pack(GOOD, bytes(4), 1000), "header length 1000 is beyond its"),
    "length above the cap": (pack(GOOD, bytes(4), HEADER_CAP + 1), "header length 100000001 is above"),
    "length at the cap, beyond the file": (pack(GOOD, bytes(4), HEADER_CAP), "is beyond its"),
    "length cuts the header": (pack(GOOD, bytes(4), len(GOOD) - 1), "no JSON"),
    "header not UTF-8": (pack(b'{"\xff' + GOOD.encode()[2:], bytes(4)), "not UTF-8 (byte 0xff at 2)"),
    "header in UTF-16": (pack(GOOD.encode("utf-16-le"), bytes(4)), "no JSON"),
    "header a list": (pack("[]"), "a JSON list"),
    "header a string": (pack('"a"'), "begins with '\"'"),
    "header after a space": (pack(" " + GOOD, bytes(4)), "begins with a space"),
    "header after a BOM": (pack("\ufeff" + GOOD, bytes(4)), "begins with a byte order mark"),
    "header and more": (pack(GOOD + "{}", bytes(4)), "no JSON (Extra data"),
    "header padded with NUL": (pack(GOOD + "\0", bytes(4)), "no JSON (Extra data"),
    "raw control character": (pack(GOOD.replace('"a"', '"\1"'), bytes(4)), "no JSON (Invalid control character"),
    "duplicate tensor": (pack(f'{{"a":{entry()},"a":{entry()}}}', bytes(4)), "the key 'a' twice"),
    "duplicate tensor, escaped": (pack(f'{{"a":{entry()},"\\u0061":{entry()}}}', bytes(4)), "the key 'a' twice"),
    "duplicate metadata": (pack('{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' twice"),
    "duplicate metadata key": (meta('{"x":"1","x":"2"}'), "the key 'x' twice"),
    "duplicate field": (one(more=',"dtype":"F32"'), "the key 'dtype' twice"),
    "overlap": (two("[0,4]", "[2,6]", 6), "tensor 'b' overlaps another: it begins at 2, not at 4"),
    "same offsets": (two("[0,4]", "[0,4]", 4), "overlaps another"),
    "gap": (two("[0,4]", "[6,10]", 10), "a gap of 2 bytes comes before tensor 'b'"),
    "gap before the first": (two("[4,8]", "[8,12]", 12), "a gap of 4 bytes comes before tensor 'a'"),
    "trailing bytes": (two("[0,4]", "[4,8]", 11), "3 trailing bytes"),
    "bytes and no tensors": (pack("{}", bytes(4)), "4 trailing bytes"),
    "one byte short": (two("[0,4]", "[4,8]", 7), "tensor 'b' ends at 8, but only 7 bytes follow"),
    "no data": (pack(GOOD), "tensor 'a' ends at 4, but only 0 bytes follow"),
    "end < begin": (one(offsets="[4,0]"), "tensor 'a' ends at 0, before it begins at 4"),
    "negative offset": (one(offsets="[-4,0]"), "data_offsets has -4, which is negative"),
    "offset -0": (one(offsets="[-0,4]"), "data_offsets has -0.0, not an integer"),
    "offset 2^64": (one(offsets="[0,18446744073709551616]"), "18446744073709551616, beyond 64 bits"),
    "offset a float": (one(offsets="[0,4.0]"), "data_offsets has 4.0, not an integer"),
    "one offset": (one(offsets="[4]"), "has 1 data_offsets, not 2"),
    "three offsets": (one(offsets="[0,4,4]"), "has 3 data_offsets, not 2"),
    "offsets a string": (one(offsets='"04"'), "data_offsets is '04', not a list"),
    "shape too large": (one(shape="[2]"), "F32 [2] takes 8 bytes, its offsets span 4"),
    "shape too small": (one(shape="[0]"), "F32 [0] takes 0 bytes, its offsets span 4"),
    "dtype too small": (one(dtype='"F16"'), "F16 [1] takes 2 bytes, its offsets span 4"),
    "product over 2^64": (one(shape="[4294967296,4294967296,2]"), "the size of F32 [4294967296, 4294967296, 2]"),
    "product wraps to fit": (one(shape="[4611686018427387905]"), "is beyond 64 bits"),
    "product over 2^64 before a 0": (
        one(shape="[9223372036854775808,2,0]", offsets="[0,0]"),
        "the size of F32 [9223372036854775808, 2, 0] is beyond",
    ),
    "size 2^64": (one(shape="[18446744073709551616]"), "18446744073709551616, beyond 64 bits"),
    "huge number": (one(shape=f"[{HUGE}]"), "beyond 64 bits"),
    "huge number in an unknown field": (one(more=f',"x":-{HUGE}'), "beyond 64 bits"),
    "negative size": (one(shape="[-1]"), "shape has -1, which is negative"),
    "size true": (one(shape="[true]"), "shape has True, not an integer"),
    "size 1.0": (one(shape="[1.0]"), "shape has 1.0, not an integer"),
    "size 1e400": (one(shape="[1e400]"), "1e400, out of range"),
    "size NaN": (one(shape="[NaN]"), "its header has NaN"),
    "size Infinity": (one(shape="[-Infinity]"), "its header has -Infinity"),
    "size null": (one(shape="[null]"), "shape has None, not an integer"),
    "shape a number": (one(shape="1"), "shape is 1, not a list"),
    "shape null": (one(shape="null"), "shape is None, not a list"),
    "unknown dtype": (one(dtype='"F33"'), "tensor 'a' has the unknown dtype 'F33'"),
    "dtype in lower case": (one(dtype='"f32"'), "the unknown dtype 'f32'"),
    "dtype a list": (one(dtype='["F32"]'), "the unknown dtype ['F32']"),
    "half a byte": (one(dtype='"F4"', shape="[7]"), "F4 [7] takes 28 bits"),
    "no dtype": (pack('{"a":{"shape":[1],"data_offsets":[0,4]}}', bytes(4)), "tensor 'a' has no dtype"),
    "no shape": (pack('{"a":{"dtype":"F32","data_offsets":[0,4]}}', bytes(4)), "tensor 'a' has no shape"),
    "no offsets": (pack('{"a":{"dtype":"F32","shape":[1]}}', bytes(4)), "tensor 'a' has no data_offsets"),
    "entry null": (pack('{"a":null}'), "the entry of 'a' is None, not an object"),
    "entry a list": (pack('{"a":["F32",[1],[0,4]]}', bytes(4)), "not an object"),
    "metadata value a number": (meta('{"x":1}'), "__metadata__ has 1 under 'x', not a string"),
    "metadata value null": (meta('{"x":null}'), "has None under 'x', not a string"),
    "metadata value an object": (meta('{"x":{}}'), "has {} under 'x', not a string"),
    "metadata a list": (meta("[]"), "__metadata__ is [], not an object"),
    "half a surrogate pair": (meta('{"x":"\\ud800"}'), "has '\\ud800', half of a surrogate pair"),
    "nested 200 deep": (one(more=f',"x":{"[" * 200}{"]" * 200}'), "the entry of 'a' is nested too deeply"),
    "nested 126 deep": (one(more=f',"x":{"[" * 126}{"]" * 126}'), "the entry of 'a' is nested too deeply"),
    "nested 100,000 deep": (pack('{"a":' * 100_000), "nested too deeply"),
    "shape nested 300 deep": (one(shape="[" * 300 + "]" * 300), "its shape has [["),
    "Git LFS pointer": (LFS, "a Git LFS pointer (to sha256:4d7a214614ab2935, 12345 bytes)"),
    "HTML page": (b"<!DOCTYPE html>\n<html><title>404</title></html>", "an HTML page (it starts with '<!DOCTYPE"),
    "HTML page after space": (b"\xef\xbb\xbf\n\n  <HTML lang=en>", "an HTML page"),
    "XML page": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML page"),
    "zip": (zipped("weights.safetensors"), "it is a zip archive; unpack it"),
    "torch's zip": (zipped("archive/data.pkl"), "a zip with a pickle in it, as torch.save writes"),
    "empty zip": (zipped("x")[-22:], "it is a zip archive"),
    "pickle": (pickle.dumps({"a": [1.0] * 100}), "it is a pickle (protocol 4)"),
    "torch's old pickle": (LEGACY_PICKLE, "it is a pickle (protocol 2)"),
    "short pickle": (pickle.dumps(1), "it is a pickle"),
    "gzip": (gzip.compress(one()), "compressed with gzip; unpack it"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(100), "a GGUF file"),
    "JSON": (json.dumps({"weight_map": {}}).encode(), "it is a JSON file"),
    "random bytes": (random.Random(1).randbytes(1000), "above the format's cap"),
}

ACCEPTED: dict[str, bytes] = {
    "plain": one(),
    "no tensors": pack("{}"),
    "trailing spaces": pack(GOOD + " " * 31, bytes(4)),
    "trailing newline": pack(GOOD + "\n", bytes(4)),
    "shape [0]": one(shape="[0]", offsets="[0,0]")[:-4],
    "shape [3, 0, 2^63]": one(shape="[3,0,9223372036854775808]", offsets="[0,0]")[:-4],
    "0-D": one(shape="[]"),
    "empty between others": pack(
        f'{{"a":{entry()},"b":{entry(shape="[0]", offsets="[4,4]")},"c":{entry(offsets="[4,8]")}}}', bytes(8)
    ),
    "empty listed after the one that begins with it": pack(
        f'{{"a":{entry()},"b":{entry(shape="[0]", offsets="[0,0]")}}}', bytes(4)
    ),
    "metadata only": pack('{"__metadata__":{"format":"pt"}}'),
    "metadata null": meta("null"),
    "metadata holding bad JSON": meta('{"config":"{\\"rank\\": [4,"}'),
    "metadata with an emoji, escaped": meta('{"x":"\\ud83d\\ude00"}'),
    "name with NUL": pack(f'{{"a\\u0000b":{entry()}}}', bytes(4)),
    "name not ASCII": pack(f'{{"слой.ü.層":{entry()}}}', bytes(4)),
    "name empty": pack(f'{{"":{entry()}}}', bytes(4)),
    "name of 10,000 characters": pack(f'{{"{"n" * 10_000}":{entry()}}}', bytes(4)),
    "not sorted by offset": two("[4,8]", "[0,4]", 8),
    "unknown field": one(more=',"x":{"y":[1,-2.5,null,true]}'),
    "unknown field nested 125 deep": one(more=f',"x":{"[" * 125}{"]" * 125}'),
    "header above the sniffed size": pack(GOOD + " " * 5000, bytes(4)),
    "NaN values": pack(GOOD, b"\xff" * 4),
    **{f"dtype {dtype}": four(dtype, bits // 2) for dtype, bits in BITS.items()},
}
