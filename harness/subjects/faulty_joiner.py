"""Subjects ``fault:NAME`` of the suite ``join``: a known wrong way to join, run where a right one should be.

A wrong sum need not have a low rank: files are written with whole deltas, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from fulldiff.harness.files.piece import Piece
from fulldiff.harness.join.effect import ranks
from fulldiff.harness.join.files import adapters_of, parts_of_files, rows_of, save, tokens_of
from fulldiff.harness.subjects.base import Detach, replace_forward
from fulldiff.harness.subjects.faulty import layer_of
from fulldiff.harness.subjects.joiner import Joiner, Running
from fulldiff.harness.subjects.registry import SubjectError
from fulldiff.reference.faults.joins import JOIN_FAULTS
from fulldiff.reference.join import Join, Part, Setting
from fulldiff.reference.layers import apply

Deltas = Callable[[str, Setting], Tensor]


class FaultyJoiner(Joiner):
    """One of the reference's named join faults."""

    def __init__(self, name: str) -> None:
        if name not in JOIN_FAULTS:
            raise SubjectError(f"no join fault {name!r}: use one of {', '.join(JOIN_FAULTS)}")
        self.fault: Join = JOIN_FAULTS[name]
        self.written: dict[Path, tuple[dict[str, list[Part]], int]] = {}

    def join(self, files: Sequence[Path], weights: Sequence[float], model: str, out: Path) -> None:
        parts, rows = parts_of_files(files, weights, model), rows_of(model)
        deltas = {name: self.fault.joined(own, rows[name].weight_shape) for name, own in parts.items()}
        tokens = [tokens_of(path).values() for path in files]
        named = {f"<s{file}-{at}>": t for file, own in enumerate(tokens) for at, t in enumerate(own)}
        _save(out, model, deltas, named)
        self.written = {out: (parts, len(files))}

    def attach(self, file: Path, layers: Mapping[str, nn.Module], model: str) -> Running:
        if file in self.written:
            return FaultyRunning(self.fault, *self.written[file], layers, model, file)
        stored = {name: own[0].tensors["diff"] for name, own in adapters_of(file, model).items()}
        return Stored(file, model, stored)


@dataclass
class FaultyRunning:
    """The fault's joined file on layers."""

    fault: Join
    parts: Mapping[str, list[Part]]
    files: int
    layers: Mapping[str, nn.Module]
    model: str
    file: Path
    setting: Setting = field(init=False)
    undo: list[Detach] = field(init=False)

    def __post_init__(self) -> None:
        self.setting = Setting([1.0] * self.files, ranks(self.parts, self.files))
        self.undo = [self._attach(name, own) for name, own in self.parts.items()]

    def set_diagonal(self, numbers: Sequence[float]) -> None:
        self.setting = Setting(numbers, self.setting.ranks, self.setting.scale)

    def tune(self, scale: float) -> None:
        self.setting = Setting(self.setting.numbers, self.setting.ranks, scale)

    def realise(self, out: Path) -> None:
        shapes = rows_of(self.model)
        deltas = {n: self.fault.realised(own, self.setting, shapes[n].weight_shape) for n, own in self.parts.items()}
        _save(out, self.model, deltas, tokens_of(self.file))

    def detach(self) -> None:
        for undo in self.undo:
            undo()

    def _attach(self, name: str, own: Sequence[Part]) -> Detach:
        module = self.layers[name]
        layer, weight, bias = layer_of(module), module.weight, module.bias
        assert isinstance(weight, Tensor)

        def forward(x: Tensor) -> Tensor:
            delta = self.fault.running(own, self.setting, weight.shape)
            wide = bias.double() if isinstance(bias, Tensor) else None
            return apply(layer, weight.double() + delta, wide, x.double()).to(x.dtype)

        return replace_forward(module, forward)


@dataclass
class Stored:
    """A realised file, loaded again: realised with nothing set it stays what it is."""

    file: Path
    model: str
    deltas: Mapping[str, Tensor]

    def set_diagonal(self, numbers: Sequence[float]) -> None:
        """Nothing is asked of it."""

    def tune(self, scale: float) -> None:
        """Nothing is asked of it."""

    def realise(self, out: Path) -> None:
        _save(out, self.model, self.deltas, tokens_of(self.file))

    def detach(self) -> None:
        """It runs on no layer."""


def _save(out: Path, model: str, deltas: Mapping[str, Tensor], tokens: Mapping[str, Tensor]) -> None:
    rows = rows_of(model)
    save(out, "kohya", [Piece((rows[name],), "diff", {"diff": delta}) for name, delta in deltas.items()], tokens)
