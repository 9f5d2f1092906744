"""`fulldiff convert`: the adapters of a file under another family's names, each layer's delta checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import FileError, read_header
from fulldiff.harness.files.joining import is_stored
from fulldiff.harness.files.match import Match, Target, match
from fulldiff.harness.files.writers import Writer
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Compare, Judgement, Part, Write

FAMILIES: tuple[str, ...] = get_args(Writer)


@dataclass(frozen=True)
class Converted:
    """Each layer's comparison, and the tensors that were left out (with the reason)."""

    layers: dict[str, Judgement]
    left_out: dict[str, str]

    @property
    def wrong(self) -> dict[str, Judgement]:
        """The layers whose delta is not the same."""
        return {name: j for name, j in self.layers.items() if j.outcome != "passed"}


def convert(
    path: Path, model: str, family: str, out: Path, worker: Worker, start: Callable[[int], Callable[[], None]]
) -> Converted:
    """Write ``out``; it takes its name only when every layer's delta is the same.

    ``start`` is told the number of layers, and gives what to call after each.

    Raises:
        FileError: the file is not wholly usable, or the family cannot hold it.
    """
    before = whole(match(read_header(path), table(model)))
    partial = out.with_name(f"{out.stem}.partial{out.suffix}")
    answer = worker.ask(Write(str(path), model, family, str(partial)))
    if answer.judgement is not None:
        raise FileError(f"{path}: not written as {family}: {answer.judgement.message}")
    after = whole(match(read_header(partial), table(model)))
    one, other = parts(before), parts(after)
    advance = start(len(one))
    layers = {}
    for name in one | other:
        layers[name] = _compared(worker, Compare(one.get(name, ()), other.get(name, ())))
        advance()
    made = Converted(layers, {skipped.tensor: skipped.reason for skipped in before.skipped})
    if not made.wrong:
        partial.replace(out)
    return made


def whole(found: Match) -> Match:
    """The match, if it left nothing that should be applied."""
    bad = [f"{r.tensors[0]}: {r.reason}" for r in found.refused] + [
        f"{name}: no such layer" for name in found.unmatched
    ]
    if bad:
        raise FileError(f"{found.path}: {len(bad)} modules are not usable on {found.base}, first {bad[0]}; mend them")
    return found


def parts(found: Match) -> dict[str, tuple[Part, ...]]:
    """For each layer of the table, what of the file's adapters means it."""
    made: dict[str, list[Part]] = {}
    for target in found.targets:
        for row in target.rows:
            ranges = row.original.rows if is_stored(target) else ()
            made.setdefault(f"{row.part}.{row.name}", []).append(Part(target.adapter, _shape(target), ranges))
    return {name: tuple(own) for name, own in made.items()}


def _shape(target: Target) -> tuple[int, ...]:
    rows = target.adapter.rows
    shape = target.layer.weight_shape
    return (rows[1] - rows[0], *shape[1:]) if rows else shape


def _compared(worker: Worker, request: Compare) -> Judgement:
    judgement = worker.ask(request).judgement
    assert judgement is not None
    return judgement
