"""A checkpoint's header as a base: its layers as they are stored, by every name adapter files give them.

Names are diffusers' (one part per file, no prefix) or those of the original single file, with or without
``model.diffusion_model.``. A table that the names agree with gives the aliases; the shapes are always the
checkpoint's own, so that a small model with a known model's names works too. Layers that no table has are
known by their own path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from fulldiff.cases.model import Kind, Layer, Shape
from fulldiff.cases.tables import LDM_PREFIX, TableRow, load_table, models, underscored
from fulldiff.harness.files.base import (
    Base,
    Place,
    Span,
    add,
    add_positions,
    add_xlabs,
    by_original,
    layer_name,
    original_aliases,
    replace,
    row_aliases,
)
from fulldiff.harness.files.container import FileError, Header
from fulldiff.harness.files.names import component

KINDS: dict[int, Kind] = {2: "linear", 3: "conv1d", 4: "conv2d", 5: "conv3d"}
OWN_PREFIXES = ("", "unet.", "transformer.", "diffusion_model.")
KOHYA_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
Places = dict[str, tuple[Place, ...]]


@dataclass(frozen=True)
class Weights:
    """A checkpoint's weights by path: the tensor's name and shape."""

    header: Header
    tensors: Mapping[str, str]

    def shape(self, path: str) -> Shape:
        """The shape of the weight at ``path``."""
        return self.header.tensors[self.tensors[path]].shape


def checkpoint(header: Header) -> Base:
    """The layers of a checkpoint file.

    Raises:
        FileError: it has no weight of a linear or convolution layer.
    """
    weights = Weights(header, dict(_weights(header)))
    if not weights.tensors:
        raise FileError(f"{header.path}: none of its {len(header.tensors)} tensors is a layer's weight; name a model")
    model = recognised(weights)
    rows = load_table(model) if model else ()
    places: Places = {}
    _add_rows(places, weights, rows)
    _add_original(places, weights, rows)
    taken = {tensor for found in places.values() for place in found for tensor in place.tensors}
    for path, tensor in weights.tensors.items():
        if tensor not in taken:
            add(places, _own_names(path), _place(path, None, weights, path))
    add_xlabs(places, rows)
    add_positions(places, model or "", rows)
    return Base(str(header.path), model, places, frozenset(p.part for found in places.values() for p in found))


def recognised(weights: Weights) -> str | None:
    """The table that the most layers' names agree with, sizes deciding between equals; None without any."""
    scores = {model: _score(weights, load_table(model)) for model in models()}
    best = max(scores, key=lambda model: scores[model])
    return best if scores[best][0] else None


def _score(weights: Weights, rows: tuple[TableRow, ...]) -> tuple[int, int, int]:
    found = [row for row in rows if row.name in weights.tensors or _original(row) in weights.tensors]
    sized = [row for row in found if row.weight_shape == weights.shape(_stored(row, weights))]
    return (len(found), len(sized), -len(rows))


def _stored(row: TableRow, weights: Weights) -> str:
    return row.name if row.name in weights.tensors else _original(row)


def _original(row: TableRow) -> str:
    return row.original.path.removeprefix(LDM_PREFIX)


def _weights(header: Header) -> Iterator[tuple[str, str]]:
    """Path → tensor of what may be a layer's weight: two to five axes, and no embedding."""
    for name, info in header.tensors.items():
        path = name.removesuffix(".weight").removeprefix(LDM_PREFIX)
        is_weight = name.endswith((".weight", ".in_proj_weight"))
        if is_weight and len(info.shape) in KINDS and not path.endswith(("_embedding", "embed_tokens")):
            yield path, name


def _add_rows(places: Places, weights: Weights, rows: tuple[TableRow, ...]) -> None:
    """Rows that the checkpoint stores as layers of their own, under either name."""
    for row in rows:
        path = _stored(row, weights)
        if path in weights.tensors and not (path != row.name and (row.original.rows or row.original.transposed)):
            add(places, row_aliases(row), _place(layer_name(row), row, weights, path))


def _place(name: str, row: TableRow | None, weights: Weights, path: str) -> Place:
    part = row.part if row else component(path)
    return Place(name, layer_of(weights.shape(path), row), part, (row,) if row else (), None, (weights.tensors[path],))


def layer_of(shape: Shape, row: TableRow | None) -> Layer:
    """A stored weight's layer; stride, padding and the like are the row's, which no checkpoint says."""
    kernel = shape[2:]
    if row and len(row.kernel) == len(kernel):
        groups = row.groups
        layer = msgspec.structs.replace(row.layer, out=shape[0], inp=shape[1] * groups, kernel=kernel)
        return layer
    ones = (1,) * len(kernel)
    return Layer(KINDS[len(shape)], shape[0], shape[1], kernel, ones, tuple(k // 2 for k in kernel), ones)


def _add_original(places: Places, weights: Weights, rows: tuple[TableRow, ...]) -> None:
    """Stored layers that several rows share: as the checkpoint stores them, or as one name of several layers."""
    for group in by_original(rows):
        path = _original(group[0])
        if path in weights.tensors:
            _add_stored(places, weights, group, path)
        elif all(row.name in weights.tensors for row in group):
            replace(places, original_aliases(group), _joined(group, weights, path))


def _add_stored(places: Places, weights: Weights, group: tuple[TableRow, ...], path: str) -> None:
    """One fused tensor: its own names mean all of it, a slice's names a span of its rows."""
    shape = weights.shape(path)
    layer, part, tensors = layer_of(shape, group[0]), group[0].part, (weights.tensors[path],)
    for row in group:
        span = scaled(row, group, shape[0])
        refusal = "" if span else f"its rows {row.original.rows} are no one range of {path} ({shape[0]} rows)"
        add(places, row_aliases(row), Place(path, layer, part, (row,), span, tensors, refusal))
    replace(places, [*original_aliases(group), path], Place(path, layer, part, group, None, tensors))


def scaled(row: TableRow, group: tuple[TableRow, ...], out: int) -> Span | None:
    """A row's range in a stored tensor of ``out`` rows, which a small model has fewer of than the table."""
    if len(row.original.rows) != 1:
        return None
    total = sum(other.out for other in group)
    (start, end), exact = row.original.rows[0], total
    if start * out % exact or end * out % exact:
        return None
    return (start * out // total, end * out // total)


def _joined(group: tuple[TableRow, ...], weights: Weights, path: str) -> Place:
    """A name of the original file on a checkpoint that stores its slices apart."""
    shapes = [weights.shape(row.name) for row in group]
    layer = layer_of((sum(shape[0] for shape in shapes), *shapes[0][1:]), group[0])
    same = len({shape[1:] for shape in shapes}) == 1
    refusal = "" if same else f"its slices have inputs of different sizes: {shapes}"
    return Place(path, layer, group[0].part, group, None, tuple(weights.tensors[row.name] for row in group), refusal)


def _own_names(path: str) -> list[str]:
    """What adapter files call a layer that no table has."""
    dotted = [prefix + path for prefix in OWN_PREFIXES]
    return dotted + [prefix + underscored(path) for prefix in KOHYA_PREFIXES]
