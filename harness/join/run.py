"""`fulldiff join`: several LoRA files as one, and the check that it is their weighted sum on every layer.

The manager reads headers and plans; a worker writes the tensors and compares, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from fulldiff.cases.model import FactorDType
from fulldiff.harness.convert import parts
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import FileError, Header, read_header
from fulldiff.harness.files.joining import JoinedLayer, Plan, family_of, plan
from fulldiff.harness.files.match import Match, matched
from fulldiff.harness.files.writers import Writer
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import CheckSum, Join, Judgement, Part

SHOWN = 3


@dataclass(frozen=True)
class Joined:
    """What was joined and how it compares: by layer, and the tokens that are not in it bit for bit.

    ``seconds`` and ``peak_bytes`` are the writing's own; the peak is None where it cannot be measured.
    """

    plan: Plan
    family: Writer
    layers: dict[str, Judgement]
    bad_tokens: list[str]
    seconds: float
    peak_bytes: int | None

    @property
    def wrong(self) -> dict[str, Judgement]:
        """The layers that are not the weighted sum."""
        return {name: j for name, j in self.layers.items() if j.outcome != "passed"}


def join(
    paths: Sequence[Path],
    weights: Sequence[float],
    model: str,
    family: Writer | None,
    dtype: FactorDType | None,
    out: Path,
    worker: Worker,
    start: Callable[[int], Callable[[], None]] = lambda layers: lambda: None,
) -> Joined:
    """Write ``out``; it takes its name only when every layer is the weighted sum.

    ``start`` is told the number of layers, and gives what to call after each.

    Raises:
        FileError: a file cannot be joined whole; the message says which module and why.
    """
    named = family or family_of(paths, model)
    made = plan(paths, weights, model, named, dtype)
    partial = out.with_name(f"{out.stem}.partial{out.suffix}")
    files = tuple(str(path) for path in paths)
    answer = worker.ask(Join(files, tuple(weights), model, named, str(partial), dtype))
    if answer.bench is None:
        partial.unlink(missing_ok=True)
        message = answer.judgement.message if answer.judgement else "no answer"
        raise FileError(f"{out} was not written: {message.removeprefix('FileError: ')}")
    header = read_header(partial)
    bad = [
        token.name
        for token in made.tokens
        if _bytes(made.headers[token.file], token.tensor) != _bytes(header, token.name)
    ]
    layers = dict(_checked(made, header, model, worker, start))
    joined = Joined(made, named, layers, bad, answer.bench["seconds"], answer.bench["peak_bytes"])
    if not (joined.wrong or bad):
        partial.replace(out)
    return joined


def _bytes(header: Header, name: str) -> bytes:
    """A tensor's raw bytes; none where the file has no such tensor."""
    info = header.tensors.get(name)
    if info is None:
        return b""
    with header.path.open("rb") as file:
        file.seek(header.data + info.begin)
        return file.read(info.end - info.begin)


def _checked(
    made: Plan, header: Header, model: str, worker: Worker, start: Callable[[int], Callable[[], None]]
) -> Iterator[tuple[str, Judgement]]:
    """Every layer that a file or the joined one adapts. What a layer is, is read from each file anew."""
    wanted: dict[str, list[Part]] = {}
    for match, weight in zip(made.matches, made.weights, strict=True):
        for name, own in parts(match).items():
            wanted.setdefault(name, []).extend(replace(p, adapter=replace(p.adapter, strength=weight)) for p in own)
    found = parts(matched(header, table(model)))
    advance = start(len(wanted.keys() | found.keys()))
    for name in dict.fromkeys((*wanted, *found)):
        judgement = worker.ask(CheckSum(tuple(wanted.get(name, ())), found.get(name, ()))).judgement
        assert judgement is not None
        yield name, judgement
        advance()


def describe(joined: Joined, paths: Sequence[Path]) -> list[str]:
    """What went in, what came out, and what to know of it."""
    made = joined.plan
    lines = [_file_line(made, at, path) for at, path in enumerate(paths)]
    ranks = [layer.rank for layer in made.layers]
    dtypes = ", ".join(sorted({layer.dtype for layer in made.layers}))
    if ranks:
        lines.append(f"joined: {len(ranks)} layers of rank {_range(ranks)} in {dtypes}, as {joined.family}")
    lines += [f"token {t.tensor} of {made.names[t.file]} is {t.name}" for t in made.tokens]
    lines += _remarks(made.layers, len(paths))
    return [*lines, *(f"left out {name}: {reason}" for name, reason in made.left_out.items())]


def _file_line(made: Plan, at: int, path: Path) -> str:
    found: Match = made.matches[at]
    ranks = [target.adapter.factors["lora_down.weight"][0] for target in found.targets]
    alphas = ", ".join(f"{source} {count}" for source, count in found.alphas.items())
    held = f"{len(ranks)} modules of rank {_range(ranks)}; alpha: {alphas}" if ranks else "no modules"
    return f"{path}: weight {made.weights[at]:g}; {held}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _remarks(layers: Sequence[JoinedLayer], files: int) -> Iterator[str]:
    """Layers that not all files adapt, and those whose rank is more than a weight of their size needs."""
    partly = [layer.name for layer in layers if 0 in layer.ranks(files)]
    if partly:
        yield f"{len(partly)} layers are not adapted by all files, which is zero there: {', '.join(partly[:SHOWN])} …"
    wasteful = [layer.name for layer in layers if layer.rank > min(layer.shape[0], layer.shape[1])]
    if wasteful:
        yield (
            f"{len(wasteful)} layers have a rank above their smaller side, which is right but wasteful: "
            f"{', '.join(wasteful[:SHOWN])} …"
        )
