"""What a file is when it is no safetensors file, told by its first bytes alone. Nothing is unpacked or run."""

from __future__ import annotations

SNIFF_SIZE = 512

FETCH = "download the file itself"
CONVERT = (
    "loading a pickle can run code, so it is never loaded here: convert it in a sandbox, "
    "with torch.load(…, weights_only=True) and safetensors.torch.save_file"
)
MARKUP = (b"<!doctype", b"<html", b"<head", b"<body", b"<?xml", b"<!--", b"<error")
LAST_PICKLE_PROTOCOL = 5


def sniff(head: bytes) -> tuple[str, str] | None:
    """What the file is and what to do about it, or None where its first bytes look like nothing known."""
    return _lfs_pointer(head) or _markup(head) or _zip(head) or _pickle(head) or _other(head)


def _lfs_pointer(head: bytes) -> tuple[str, str] | None:
    if not head.startswith(b"version https://git-lfs.github.com/spec/"):
        return None
    fields = dict(line.partition(" ")[::2] for line in head.decode("ascii", "replace").splitlines())
    which = f"{fields.get('oid', 'an object it does not name')}, {fields.get('size', '?')} bytes"
    return f"it is a Git LFS pointer (to {which}), not the file", "fetch the file with git lfs pull"


def _markup(head: bytes) -> tuple[str, str] | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text.lower().startswith(MARKUP):
        return None
    start = text[:40].decode("utf-8", "replace").splitlines()[0]
    kind = "an XML" if text.lower().startswith((b"<?xml", b"<error")) else "an HTML"
    return f"it is {kind} page (it starts with {start!r}), perhaps a login or an error", FETCH


def _zip(head: bytes) -> tuple[str, str] | None:
    if not head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return None
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if first.endswith((b"/data.pkl", b"/.format_version")):
        return "it is a zip with a pickle in it, as torch.save writes", CONVERT
    return "it is a zip archive", f"unpack it; if torch.save wrote it, {CONVERT}"


def _pickle(head: bytes) -> tuple[str, str] | None:
    """A pickle since protocol 2: its opcode, the protocol, and an opcode that is no NUL."""
    if head[:1] != b"\x80" or len(head) < 3 or not 2 <= head[1] <= LAST_PICKLE_PROTOCOL or head[2] == 0:
        return None
    return f"it is a pickle (protocol {head[1]})", CONVERT


def _other(head: bytes) -> tuple[str, str] | None:
    if head.startswith(b"\x1f\x8b\x08"):
        return "it is compressed with gzip", "unpack it with gunzip"
    if head.startswith(b"GGUF"):
        return "it is a GGUF file", "name the safetensors file that it was made from"
    if head.startswith((b'{"', b"{\n", b"{\r", b"{}")) and head[8:].isascii():
        return "it is a JSON file, perhaps an index or a configuration", "name the safetensors file beside it"
    return None
