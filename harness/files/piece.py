"""One adapter on one layer, on its way into a file of any family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from fulldiff.cases.tables import TableRow

T = TypeVar("T")


class UnspellableError(ValueError):
    """What a family of names cannot hold; the message names the layer, the factor and what can."""


@dataclass(frozen=True)
class Piece(Generic[T]):
    """One adapter to write: canonical factor → tensor, on one layer (one row) or on a fused one (several).

    ``stored`` says that the tensors' rows are in the order of the original checkpoint's tensor, which a fused
    layer's always are. ``alpha`` and ``rank`` are for formats that keep them in a config.
    """

    rows: tuple[TableRow, ...]
    kind: str
    tensors: Mapping[str, T]
    stored: bool = False
    alpha: float | None = None
    rank: int | None = None
