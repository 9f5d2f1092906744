"""The truth of joining: several LoRAs as one of rank Σr, with a diagonal that weighs each rank while the model runs.

Of one layer, in float64: Σ weight · scale · ΔW over the files that adapt it. A file that does not is zero there.
The diagonal has a number per rank, those of the first file first; toggled, the sum is Σ_k v_k · (the k-th rank's
product). Written out (realised), the diagonal and the scale are in the factors, once: a file that is realised,
loaded and realised again stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fulldiff.reference.factors import FactorError, Factors
from fulldiff.reference.truth import Truth

UP, DOWN, MID = "lora_up.weight", "lora_down.weight", "lora_mid.weight"


@dataclass(frozen=True)
class Part:
    """What one file adapts of one layer: its LoRA, the file's ``weight`` in the join, and which file it is.

    ``text`` says that the layer is a text encoder's. The adapter's own strength is not looked at.
    """

    adapter: Factors
    weight: float
    file: int = 0
    text: bool = False

    @property
    def rank(self) -> int:
        """How many numbers of the diagonal are this part's; raises FactorError for what is no LoRA."""
        if self.adapter.kind != "lora" or DOWN not in self.adapter.tensors or "dora_scale" in self.adapter.tensors:
            raise FactorError(f"a {self.adapter.kind} of {', '.join(self.adapter.tensors)} has no place in a join")
        return self.adapter.tensors[DOWN].shape[0]


@dataclass(frozen=True)
class Setting:
    """What is set while the model runs: ``numbers``, one per file or per rank of all files, and the ``scale``.

    ``ranks`` are the files' ranks; where the numbers are per rank, a file has one rank in all its layers.
    """

    numbers: Sequence[float]
    ranks: Sequence[int]
    scale: float = 1.0


@dataclass(frozen=True)
class Join:
    """The steps of a join on one layer. A fault is a subclass that gets one of them wrong."""

    truth: Truth = field(default_factory=Truth)

    def joined(self, parts: Sequence[Part], shape: Sequence[int]) -> Tensor:
        """The joined delta, in the weight's ``shape`` (out, in / groups, *kernel)."""
        return sum((self.weighed(part, shape) for part in parts), start=_zeros(shape))

    def toggled(self, parts: Sequence[Part], diagonal: Sequence[float], shape: Sequence[int]) -> Tensor:
        """The joined delta with the diagonal's number for each rank."""
        if len(diagonal) != sum(part.rank for part in parts):
            raise FactorError(f"a diagonal of {len(diagonal)} for ranks {[part.rank for part in parts]}")
        ranks = (one for part in parts for one in ranks_of(part))
        return sum((v * self.weighed(one, shape) for v, one in zip(diagonal, ranks, strict=True)), start=_zeros(shape))

    def running(self, parts: Sequence[Part], setting: Setting, shape: Sequence[int]) -> Tensor:
        """The delta while the model runs with this diagonal and scale."""
        return setting.scale * self.toggled(parts, self.diagonal(parts, setting), shape)

    def realised(self, parts: Sequence[Part], setting: Setting, shape: Sequence[int]) -> Tensor:
        """The delta of the file that is written while the model runs so."""
        return self.running(parts, setting, shape)

    def diagonal(self, parts: Sequence[Part], setting: Setting) -> list[float]:
        """The layer's own diagonal. A file that does not adapt the layer has numbers that it does not use."""
        if len(setting.numbers) == len(setting.ranks):
            return [setting.numbers[part.file] for part in parts for _ in range(part.rank)]
        starts = [sum(setting.ranks[:file]) for file in range(len(setting.ranks))]
        return [setting.numbers[starts[part.file] + k] for part in parts for k in range(part.rank)]

    def weighed(self, part: Part, shape: Sequence[int]) -> Tensor:
        """weight · scale · ΔW of one part."""
        if part.weight == 0:
            return _zeros(shape)
        return self.weight(part) * self.scale(part) * self.truth.product(part.adapter, shape)

    def weight(self, part: Part) -> float:
        """The file's weight; any sign."""
        return part.weight

    def scale(self, part: Part) -> float:
        """The part's own alpha / rank."""
        return self.truth.scale(part.adapter)


def ranks_of(part: Part) -> Iterator[Part]:
    """The part as one part per rank, whose deltas sum to its own: a column of up, and the row that it meets.

    With a core in the middle the row is the core's, before down.
    """
    t, rank = part.adapter.tensors, part.rank
    inner = MID if MID in t else DOWN
    scale = torch.tensor(Truth().scale(part.adapter), dtype=torch.float64)
    for k in range(rank):
        own = {UP: t[UP][:, k : k + 1], DOWN: t[DOWN], inner: t[inner][k : k + 1], "scale": scale}
        yield replace(part, adapter=replace(part.adapter, tensors=own))


def _zeros(shape: Sequence[int]) -> Tensor:
    return torch.zeros(tuple(shape), dtype=torch.float64)
