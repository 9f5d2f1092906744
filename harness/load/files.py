"""`fulldiff load`: several adapter files onto one model, end to end; what each did to which part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from fulldiff.cases.model import AdapterFile, Case, LoadCase, Model
from fulldiff.cases.tables import models
from fulldiff.harness.files.container import FileError, read_header
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Load

MIB = 2**20
SHOWN = 4
REMEDY = (
    "It is of another base, or in names that these loaders do not read: `fulldiff check` says which, "
    "`fulldiff convert` writes it under other names, --rejection never applies what does match"
)


class Part(msgspec.Struct, frozen=True):
    """What a file does to one part of the model."""

    tensors: int
    weights: int
    kinds: list[str]
    strength: float


class Told(msgspec.Struct, frozen=True):
    """What became of one file: by part what it does; its unmatched tensors; weights that the model lacks."""

    file: str
    rejected: bool
    tensors: int
    parts: dict[str, Part]
    unmatched: list[str]
    skipped: list[str]

    @property
    def whole(self) -> bool:
        """Whether all of it was used."""
        return not (self.rejected or self.unmatched or self.skipped) and bool(self.parts)


class Loading(msgspec.Struct, frozen=True):
    """A whole load: each file, seconds by stage, bytes held, how many weights were merged."""

    files: list[Told]
    seconds: dict[str, float]
    bytes: dict[str, int]
    weights: int

    @property
    def whole(self) -> bool:
        """Whether all of every file was used."""
        return all(file.whole for file in self.files)


def load(
    paths: Sequence[Path], model: str, strengths: Sequence[float], text: Sequence[float], rejection: str,
    loader: str, worker: Worker,
) -> Loading:  # fmt: skip
    """Load the files in their order onto weights made in f16.

    ``strengths`` and ``text`` (the text encoders', none: the same) have one number for all files, or one for each.

    Raises:
        FileError: a file cannot be read or loaded, or there is no such model or not a strength for each file.
    """
    if model not in models():
        raise FileError(f"--model {model}: there is no such layer table; use one of {', '.join(models())}")
    for path in paths:
        read_header(path)
    pairs = zip(paths, spread(strengths, len(paths)), spread(text or strengths, len(paths)), strict=True)
    files = tuple(AdapterFile(path=str(path), strength=one, text_strength=other) for path, one, other in pairs)
    answer = worker.ask(Load(Case(LoadCase(Model(model, "f16"), files, rejection)), loader))
    if answer.bench is None:
        reason = answer.judgement.message if answer.judgement else "no answer"
        raise FileError(f"not loaded: {reason.partition(': ')[2] or reason}")
    return msgspec.convert(answer.bench, Loading)


def spread(numbers: Sequence[float], count: int) -> list[float]:
    """One number for each of ``count`` files; raises FileError where there are neither one nor as many."""
    if len(numbers) not in (1, count):
        raise FileError(f"{len(numbers)} strengths for {count} files; give one for all, or one for each")
    return list(numbers) * (count if len(numbers) == 1 else 1)


def show(loading: Loading, model: str, console: Console) -> None:
    """Print each file's parts, what of it was not used, and the time and bytes of the whole."""
    table = Table("file", "part", "tensors", "weights", "kinds", "strength", box=SIMPLE)
    for column in (2, 3, 5):
        table.columns[column].justify = "right"
    for told in loading.files:
        for name, part in told.parts.items():
            row = (str(part.tensors), str(part.weights), ", ".join(part.kinds), f"{part.strength:g}")
            table.add_row(Path(told.file).name, name, *row)
    console.print(table)
    for line in lines(loading, model):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def lines(loading: Loading, model: str) -> Iterator[str]:
    """Everything below the table."""
    for told in loading.files:
        yield from _unused(told, model)
    stages = ", ".join(f"{stage} {1e3 * seconds:,.1f} ms" for stage, seconds in loading.seconds.items())
    held = ", ".join(f"{what} {count / MIB:,.1f} MiB" for what, count in loading.bytes.items())
    yield f"time: {stages} ({loading.weights} weights)"
    yield f"bytes: {held}"


def _unused(told: Told, model: str) -> Iterator[str]:
    """What of a file was not applied, and what to do."""
    if told.rejected:
        yield (
            f"REJECTED {told.file}: {len(told.unmatched)} of {told.tensors} tensors match nothing of {model}. " + REMEDY
        )
    elif told.unmatched:
        yield f"unmatched in {told.file}: {_some(told.unmatched)}: no layer of {model} has this name"
    if told.skipped:
        yield f"skipped in {told.file}: {_some(told.skipped)}: {model} has no such weight"


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
