"""A joined file's own words: its tensors' names in a family, and the metadata that tells its parts.

The metadata ``ljl`` is JSON: ``files`` (names), ``weights`` (those that are in the factors) and ``ranks``, for each
module the ranks of every file's block in order, 0 where a file does not adapt it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fulldiff.cases.model import Shape
from fulldiff.harness.files.container import FileError, Header
from fulldiff.harness.files.joining import ALPHA, EMBED, JoinedLayer, Plan
from fulldiff.harness.files.piece import Piece, UnspellableError
from fulldiff.harness.files.writers import HOLDS, Writer, Written, module_name, write

METADATA = "ljl"
FORMAT = 1
STORED = {"f16": "F16", "bf16": "BF16", "f32": "F32", "f64": "F64"}


@dataclass(frozen=True)
class Spec:
    """A tensor to write: which factor of which layer, its dtype as the format spells it, its shape."""

    layer: int
    factor: str
    dtype: str
    shape: Shape


def written(made: Plan, family: Writer) -> Written[Spec]:
    """The joined file's tensors by name, its metadata, and PEFT's config.

    Raises:
        FileError: the family cannot hold one of the layers; the message names it.
    """
    pieces = [_piece(at, layer, family) for at, layer in enumerate(made.layers)]
    try:
        spelled: Written[Spec] = write(family, pieces) if pieces else Written()
        blocks = {module_name(family, layer.rows[0], layer.stored): layer for layer in made.layers}
    except UnspellableError as error:
        raise FileError(f"not joined as {family}: {error}") from error
    ranks = {name: layer.ranks(len(made.names)) for name, layer in blocks.items()}
    own = {"format": FORMAT, "files": made.names, "weights": made.weights, "ranks": ranks}
    tokens = {token.name: EMBED for token in made.tokens}
    return replace(spelled, metadata=spelled.metadata | tokens | {METADATA: json.dumps(own)})


def _piece(at: int, layer: JoinedLayer, family: Writer) -> Piece[Spec]:
    """Alpha is Σr, so that the scale is 1; only some families have a tensor for it."""
    specs = {factor: Spec(at, factor, STORED[layer.dtype], shape) for factor, shape in layer.shapes().items()}
    if ALPHA in HOLDS[family]:
        specs[ALPHA] = Spec(at, ALPHA, "F32", ())
    return Piece(layer.rows, "lora", specs, layer.stored, float(layer.rank), layer.rank)


@dataclass(frozen=True)
class Parts:
    """What a joined file knows of its files: names, the weights they were joined with, ranks by module."""

    files: tuple[str, ...]
    weights: tuple[float, ...]
    ranks: Mapping[str, tuple[int, ...]]


def parts_of(header: Header) -> Parts:
    """The parts that a joined file's metadata tells of; of any other file one part, which is the whole file.

    Raises:
        FileError: the metadata cannot be read.
    """
    text = header.metadata.get(METADATA)
    if text is None:
        return Parts((header.path.stem,), (1.0,), {})
    try:
        known = json.loads(text)
        files, weights = tuple(map(str, known["files"])), tuple(map(float, known["weights"]))
        ranks = {str(name): tuple(map(int, own)) for name, own in known["ranks"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{header.path}: its metadata {METADATA!r} cannot be read ({error}); join it again") from error
    return Parts(files, weights, ranks)
