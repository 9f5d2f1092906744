"""Adapters that peers get as files: one file per adapter, under a real layer's name, loaded and taken off by name.

All adapters on a layer share one `Session`: the layer inside a model of the peer.
"""

from __future__ import annotations

import copy
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

import msgspec
from torch import Tensor, nn

from fulldiff.cases.tables import TableRow, load_table
from fulldiff.harness.files.piece import Piece, UnspellableError
from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter, Detach, Refused, Subject, Unsupported, replace_forward

# The layers of Stable Diffusion 1.5's UNet whose names the files give to any linear layer and any convolution.
TABLE = "sd15"
# The file's own name where a peer leaves it open.
FILE = "adapter.safetensors"
LINEAR = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
CONV = "conv_in"


class Session(ABC):
    """One layer in a peer's model, and the strengths of its adapters by name."""

    def __init__(self, base: nn.Module) -> None:
        assert isinstance(base.weight, Tensor)
        self.base, self.weight = base, base.weight
        self.strengths: dict[str, float] = {}
        self.undo: Detach = lambda: None
        self._made = 0

    def add(self, adapter: Adapter) -> str:
        """Write the adapter's file and load it; its name."""
        name = f"a{self._made}"
        self._made += 1
        with TemporaryDirectory() as folder:
            try:
                self.load(Path(folder), name, adapter)
            except UnspellableError as error:
                raise Unsupported(str(error)) from error
            except (ValueError, TypeError, RuntimeError) as error:
                if not is_refusal(error):
                    raise
                raise Refused(f"{type(error).__name__}: {str(error)[:200]}") from error
        self.strengths[name] = adapter.strength
        return name

    @abstractmethod
    def load(self, folder: Path, name: str, adapter: Adapter) -> None:
        """Write the adapter to ``folder`` and load it from there under ``name``."""

    @abstractmethod
    def activate(self) -> None:
        """Make the layer compute with the adapters in ``strengths``, at least one."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Take one adapter off."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""


class FileSubject(Subject):
    """Each adapter by its file, into the layer's session."""

    def __init__(self) -> None:
        self.sessions: WeakKeyDictionary[nn.Module, Session] = WeakKeyDictionary()

    @abstractmethod
    def open(self, base: nn.Module, adapters: Sequence[Adapter]) -> Session:
        """A session for a copy of the layer."""

    @abstractmethod
    def check(self, module: nn.Module, adapter: Adapter) -> None:
        """Unsupported where the file has no place for the adapter."""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        for adapter in adapters:
            factors.check(adapter)
            self.check(module, adapter)
        if not adapters:
            return lambda: None
        session = self.sessions.get(module)
        if session is None:
            session = self.open(copied(module), adapters)
        names = [session.add(adapter) for adapter in adapters]
        session.activate()
        if module not in self.sessions:
            self.sessions[module] = session
            session.undo = replace_forward(module, session.forward)

        def detach() -> None:
            for name in names:
                del session.strengths[name]
            for name in names:
                session.delete(name)
            if session.strengths:
                session.activate()
            else:
                session.undo()
                del self.sessions[module]

        return detach


def is_refusal(error: Exception) -> bool:
    """Whether a loader's own ``raise`` made the error: not one that it ran into (None as a number, …)."""
    return (traceback.extract_tb(error.__traceback__)[-1].line or "").startswith("raise ")


def copied(module: nn.Module) -> nn.Module:
    """The bare layer, with weights of its own."""
    made = copy.deepcopy(module)
    made.__dict__.pop("forward", None)
    return made


def name_for(weight: Tensor) -> str:
    """The name that a layer of this weight has in files."""
    return LINEAR if weight.dim() == 2 else CONV


def row_for(weight: Tensor) -> TableRow:
    """The row of that name, with the layer's own sizes."""
    row = next(row for row in load_table(TABLE) if row.name == name_for(weight))
    return msgspec.structs.replace(row, out=weight.shape[0], inp=weight.shape[1], kernel=tuple(weight.shape[2:]))


def piece_of(weight: Tensor, adapter: Adapter) -> Piece[Tensor]:
    """The adapter as a file's piece."""
    return Piece((row_for(weight),), adapter.kind, dict(adapter.tensors))


def wide(piece: Piece[Tensor]) -> Piece[Tensor]:
    """The piece in f64: a scale that is multiplied into a factor must not be rounded by us."""
    return replace(piece, tensors={name: tensor.double() for name, tensor in piece.tensors.items()})


def model_of(name: str, layer: nn.Module) -> nn.Module:
    """A model that has the layer under a dotted name, and nothing else."""
    root = at = nn.Module()
    *parents, last = name.split(".")
    for parent in parents:
        child = nn.Module()
        at.add_module(parent, child)
        at = child
    at.add_module(last, layer)
    return root
