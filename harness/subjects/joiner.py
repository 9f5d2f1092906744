"""What a subject of the suite ``join`` is: it joins files, and toggles what it joined while the model runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import nn

from fulldiff.harness.files import stitching
from fulldiff.harness.files.container import FileError
from fulldiff.harness.files.joining import family_of, plan
from fulldiff.harness.subjects.base import Refused
from fulldiff.harness.subjects.joined_model import attach_layers


class Running(Protocol):
    """A joined adapter on layers."""

    def set_diagonal(self, numbers: Sequence[float]) -> None:
        """Weigh it: one number per file, or one per rank of all files."""

    def tune(self, scale: float) -> None:
        """Multiply it as a whole."""

    def realise(self, out: Path) -> None:
        """Write it as a file with diagonal and scale in its factors."""

    def detach(self) -> None:
        """Take it off its layers."""


class Joiner(ABC):
    """An implementation under test. ``model`` is a layer table's name; raise `Refused` or `Unsupported` with why."""

    @abstractmethod
    def join(self, files: Sequence[Path], weights: Sequence[float], model: str, out: Path) -> None:
        """Write one adapter file that does what the files do with these weights."""

    @abstractmethod
    def attach(self, file: Path, layers: Mapping[str, nn.Module], model: str) -> Running:
        """Put a joined file on these layers (``unet.conv_in`` → Linear or Conv); all its layers are given."""


class Ljl(Joiner):
    """Ours."""

    def join(self, files: Sequence[Path], weights: Sequence[float], model: str, out: Path) -> None:
        try:
            family = family_of(files, model)
            stitching.write(plan(files, weights, model, family), family, out)
        except FileError as error:
            raise Refused(str(error)) from error

    def attach(self, file: Path, layers: Mapping[str, nn.Module], model: str) -> Running:
        return attach_layers(layers, file, model)
