"""The base model that an adapter file is matched to: a layer table, or a checkpoint's header.

`Base.find` gives the places that a module's name means. A place is a layer as the base stores it: with a
table, a row's layer, or the stored layer for a name of the original checkpoint (fused q, k and v; rows in
another order); with a checkpoint that stores layers fused, a name of one slice is that layer and a span of
its rows.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

import msgspec

from fulldiff.cases.model import Layer
from fulldiff.cases.tables import LDM_PREFIX, TableRow, aliases, load_table, underscored
from fulldiff.harness.files.names import Component
from fulldiff.harness.files.positions import positions

Span = tuple[int, int]
# XLabs' processors: lora1 is the image stream, lora2 the text; a single block has one stream.
XLABS = {
    r"(double_blocks\.\d+)\.img_attn\.(qkv|proj)": r"\1.processor.\2_lora1",
    r"(double_blocks\.\d+)\.txt_attn\.(qkv|proj)": r"\1.processor.\2_lora2",
    r"(single_blocks\.\d+)\.linear2": r"\1.processor.proj_lora",
}


@dataclass(frozen=True)
class Place:
    """A layer that a name means. ``span`` are the rows of a fused layer that it means, None for all;
    ``tensors`` are the checkpoint's weights, in row order, empty for a table; ``refusal`` says why a
    name that is known can have no delta here."""

    name: str
    layer: Layer
    part: Component
    rows: tuple[TableRow, ...] = ()
    span: Span | None = None
    tensors: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class Base:
    """Layers by the names adapter files give them. ``model`` is the table, None where none is recognised."""

    name: str
    model: str | None
    places: Mapping[str, tuple[Place, ...]]
    parts: frozenset[Component] = field(default_factory=frozenset)

    def find(self, module: str) -> tuple[Place, ...]:
        """The places that a module's name means: none, one, or several where it is ambiguous."""
        return self.places.get(module, ())

    def inside(self, module: str) -> tuple[str, ...]:
        """The layers of a whole module that a name means, such as ``lora_unet_time_in``."""
        found: list[str] = []
        for start in (f"{module}.", f"{module}_"):
            for name in self.ordered[bisect_left(self.ordered, start) :]:
                if not name.startswith(start):
                    break
                found += [place.name for place in self.places[name]]
        return tuple(dict.fromkeys(found))

    @cached_property
    def ordered(self) -> list[str]:
        """Every name, sorted: those that start alike are together."""
        return sorted(self.places)


@cache
def table(model: str) -> Base:
    """The layer table ``model`` as a base.

    Raises:
        TableError: there is no such table.
    """
    rows = load_table(model)
    places: dict[str, tuple[Place, ...]] = {}
    for row in rows:
        add(places, row_aliases(row), _row_place(row))
    for stored in by_original(rows):
        replace(places, original_aliases(stored), original_place(stored))
    add_xlabs(places, rows)
    add_positions(places, model, rows)
    return Base(model, model, places, frozenset(row.part for row in rows))


def row_aliases(row: TableRow) -> tuple[str, ...]:
    """All names of a row; a text encoder's also without the part, as one that was saved alone has them."""
    return (*aliases(row), row.name)


def _row_place(row: TableRow) -> Place:
    return Place(layer_name(row), row.layer, row.part, (row,))


def layer_name(row: TableRow) -> str:
    """A row's name, with its part for a text encoder: SDXL's two have the same paths."""
    return f"{row.part}.{row.name}" if row.part.startswith("text_encoder") else row.name


def by_original(rows: Iterable[TableRow]) -> Iterator[tuple[TableRow, ...]]:
    """The rows that share one stored tensor, or are stored in another order than the layer's; in stored order."""
    groups: dict[str, list[TableRow]] = {}
    for row in rows:
        if row.original.rows:
            groups.setdefault(row.original.path, []).append(row)
    for group in groups.values():
        yield tuple(sorted(group, key=lambda row: row.original.rows[0]))


def original_place(rows: tuple[TableRow, ...]) -> Place:
    """The stored layer that these rows are slices of."""
    out = sum(row.out for row in rows)
    layer = msgspec.structs.replace(rows[0].layer, out=out)
    return Place(rows[0].original.path.removeprefix(LDM_PREFIX), layer, rows[0].part, rows)


def original_aliases(rows: tuple[TableRow, ...]) -> list[str]:
    """The aliases of a stored layer: those of its rows that speak of the original path."""
    path = rows[0].original.path.removeprefix(LDM_PREFIX)
    return [name for name in aliases(rows[0]) if name.endswith((path, underscored(path)))]


def add(places: dict[str, tuple[Place, ...]], names: Iterable[str], place: Place) -> None:
    for name in names:
        known = places.get(name, ())
        places[name] = known if place in known else (*known, place)


def replace(places: dict[str, tuple[Place, ...]], names: Iterable[str], *found: Place) -> None:
    """Let names mean these places alone."""
    places.update(dict.fromkeys(names, found))


def add_xlabs(places: dict[str, tuple[Place, ...]], rows: Iterable[TableRow]) -> None:
    """XLabs' processors; a single block's qkv is a part of linear1."""
    for path in dict.fromkeys(row.original.path for row in rows):
        for pattern, name in XLABS.items():
            if path in places and re.fullmatch(pattern, path):
                places[re.sub(pattern, name, path)] = places[path]
    for row in rows:
        path = row.original.path
        if row.name.endswith(".attn.to_v") and path.endswith(".linear1"):
            for whole in places.get(path, ()):
                end = row.original.rows[0][1] * whole.layer.out // sum(r.out for r in whole.rows)
                qkv = dataclasses.replace(whole, rows=whole.rows[:3], span=(0, end))
                replace(places, [path.replace("linear1", "processor.qkv_lora")], qkv)


def add_positions(places: dict[str, tuple[Place, ...]], model: str, rows: Iterable[TableRow]) -> None:
    for name, row in positions(model, rows).items():
        if found := places.get(layer_name(row)):
            places[name] = found
