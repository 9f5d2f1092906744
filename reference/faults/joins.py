"""Known wrong ways to join LoRAs: what other tools give for the same files and weights.

`JOIN_FAULTS` maps a name to an instance of a `Join` with one step wrong. Most were seen in shipped tools.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fulldiff.reference.join import DOWN, MID, UP, Join, Part, Setting

JOIN_FAULTS: dict[str, Join] = {}


def fault(name: str) -> Callable[[type[Join]], type[Join]]:
    """Put an instance of the class into the table."""

    def register(kind: type[Join]) -> type[Join]:
        JOIN_FAULTS[name] = kind()
        return kind

    return register


class _Crossed(Join):
    """Factors combined apart: (Σ a_i up_i) · (Σ b_i down_i), with cross terms; ranks padded with zeros."""

    def factors(self, part: Part) -> tuple[float, float]:
        """What up and down are multiplied with."""
        raise NotImplementedError

    def joined(self, parts: Sequence[Part], shape: Sequence[int]) -> Tensor:
        return self.toggled(parts, [1.0] * sum(part.rank for part in parts), shape)

    def toggled(self, parts: Sequence[Part], diagonal: Sequence[float], shape: Sequence[int]) -> Tensor:
        rank, at = max((part.rank for part in parts), default=0), 0
        up, down = torch.zeros(shape[0], rank).double(), torch.zeros(rank, math.prod(shape[1:])).double()
        for part in parts:
            (a, b), v = self.factors(part), torch.tensor(diagonal[at : at + part.rank]).double()
            one, two = plain(part, shape)
            up[:, : part.rank] += a * v * one
            down[: part.rank] += b * two
            at += part.rank
        return (up @ down).reshape(tuple(shape))


def plain(part: Part, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """up (out, r) and down (r, in·∏kernel), a core in the middle multiplied into down."""
    t = part.adapter.tensors
    down = t[DOWN].flatten(1)
    if MID in t:
        down = torch.einsum("mn...,ni->mi...", t[MID], down)
    return t[UP].flatten(1), down.reshape(part.rank, math.prod(shape[1:]))


@fault("linear-cross-terms")
class LinearCrossTerms(_Crossed):
    """√(w·scale) into both factors, which are then summed apart (PEFT's linear, kohya's sum)."""

    def factors(self, part: Part) -> tuple[float, float]:
        whole = part.weight * self.scale(part)
        return math.sqrt(abs(whole)), math.copysign(math.sqrt(abs(whole)), whole)


@fault("lpl-average")
class LplAverage(_Crossed):
    """Both factors averaged with the weights (cloneofsimo's lpl merge)."""

    def factors(self, part: Part) -> tuple[float, float]:
        return part.weight * self.scale(part), part.weight


@fault("concat-squared-ratios")
class ConcatSquaredRatios(Join):
    """The ratio in both factors and alpha of one file: w² · r / Σr (kohya's --concat)."""

    def joined(self, parts: Sequence[Part], shape: Sequence[int]) -> Tensor:
        return super().joined(_over_whole_rank(parts), shape)

    def toggled(self, parts: Sequence[Part], diagonal: Sequence[float], shape: Sequence[int]) -> Tensor:
        return super().toggled(_over_whole_rank(parts), diagonal, shape)


def _over_whole_rank(parts: Sequence[Part]) -> list[Part]:
    whole = sum(part.rank for part in parts)
    return [replace(part, weight=math.copysign(part.weight**2 * part.rank / whole, part.weight)) for part in parts]


@fault("rslora-root-again")
class RsloraRootAgain(Join):
    """√Σr too much: rsLoRA's root applied to what has it already (PEFT's cat and svd)."""

    def joined(self, parts: Sequence[Part], shape: Sequence[int]) -> Tensor:
        return math.sqrt(sum(part.rank for part in parts)) * super().joined(parts, shape)

    def toggled(self, parts: Sequence[Part], diagonal: Sequence[float], shape: Sequence[int]) -> Tensor:
        return math.sqrt(len(diagonal)) * super().toggled(parts, diagonal, shape)


@fault("weight-twice")
class WeightTwice(Join):
    """The weight applied when joining and again when loading: 0.7 gives 0.49 (diffusers' fuse_lora, twice)."""

    def weight(self, part: Part) -> float:
        return part.weight**2


@fault("weight-sign-lost")
class WeightSignLost(Join):
    """A negative weight taken as positive."""

    def weight(self, part: Part) -> float:
        return abs(part.weight)


@fault("alpha-dropped")
class AlphaDropped(Join):
    """No alpha folded (the original join knows none)."""

    def scale(self, part: Part) -> float:
        return 1.0


@fault("alpha-in-both-factors")
class AlphaInBothFactors(Join):
    """alpha / rank multiplied into up and into down."""

    def scale(self, part: Part) -> float:
        return super().scale(part) ** 2


@fault("alpha-of-part-over-whole-rank")
class AlphaOfPartOverWholeRank(Join):
    """Each file's alpha kept and read against Σr: alpha / Σr for alpha / r."""

    def joined(self, parts: Sequence[Part], shape: Sequence[int]) -> Tensor:
        return super().joined(_diluted(parts), shape)

    def toggled(self, parts: Sequence[Part], diagonal: Sequence[float], shape: Sequence[int]) -> Tensor:
        return super().toggled(_diluted(parts), diagonal, shape)


def _diluted(parts: Sequence[Part]) -> list[Part]:
    whole = sum(part.rank for part in parts)
    return [replace(part, weight=part.weight * part.rank / whole) for part in parts]


@fault("svd-to-largest-rank")
class SvdToLargestRank(Join):
    """The sum cut to the largest of the ranks by a singular value decomposition (PEFT's svd, as it is set)."""

    def joined(self, parts: Sequence[Part], shape: Sequence[int]) -> Tensor:
        whole = super().joined(parts, shape)
        rank = max((part.rank for part in parts), default=0)
        u, s, v = torch.linalg.svd(whole.flatten(1), full_matrices=False)
        cut: Tensor = u[:, :rank] * s[:rank] @ v[:rank]
        return cut.reshape(whole.shape)


@fault("last-file-only")
class LastFileOnly(Join):
    """A layer that several files adapt gets only the last one's factors (keys overwritten)."""

    def joined(self, parts: Sequence[Part], shape: Sequence[int]) -> Tensor:
        return super().joined(parts[-1:], shape)


@fault("diagonal-of-missing-file")
class DiagonalOfMissingFile(Join):
    """A layer's blocks counted from the first file that adapts it: the diagonal of a missing file is used."""

    def diagonal(self, parts: Sequence[Part], setting: Setting) -> list[float]:
        moved = [replace(part, file=at) for at, part in enumerate(parts)]
        ranks = [part.rank for part in parts] + [0] * (len(setting.ranks) - len(parts))
        known = ranks if len(setting.numbers) != len(setting.ranks) else setting.ranks
        return super().diagonal(moved, replace(setting, ranks=known))


@fault("diagonal-as-integers")
class DiagonalAsIntegers(Join):
    """The diagonal cut to whole numbers."""

    def toggled(self, parts: Sequence[Part], diagonal: Sequence[float], shape: Sequence[int]) -> Tensor:
        return super().toggled(parts, [float(int(v)) for v in diagonal], shape)


@fault("diagonal-squared")
class DiagonalSquared(Join):
    """The diagonal multiplied into both factors."""

    def toggled(self, parts: Sequence[Part], diagonal: Sequence[float], shape: Sequence[int]) -> Tensor:
        return super().toggled(parts, [v * abs(v) for v in diagonal], shape)


@fault("text-encoder-not-toggled")
class TextEncoderNotToggled(Join):
    """Only the UNet's diagonal is set; the text encoder keeps the whole sum (the original's tune)."""

    def running(self, parts: Sequence[Part], setting: Setting, shape: Sequence[int]) -> Tensor:
        return self.joined(parts, shape) if any(p.text for p in parts) else super().running(parts, setting, shape)


@fault("scale-squared-on-realise")
class ScaleSquaredOnRealise(Join):
    """The scale written into the factors and kept beside them: s² (the original, tuned again after loading)."""

    def realised(self, parts: Sequence[Part], setting: Setting, shape: Sequence[int]) -> Tensor:
        return setting.scale * super().realised(parts, setting, shape)


@fault("diagonal-ignored-on-realise")
class DiagonalIgnoredOnRealise(Join):
    """The whole sum written, whatever the diagonal (the original's collapse and realise)."""

    def realised(self, parts: Sequence[Part], setting: Setting, shape: Sequence[int]) -> Tensor:
        ones = [1.0] * len(setting.numbers)
        return super().realised(parts, replace(setting, numbers=ones), shape)


@fault("scale-ignored-on-realise")
class ScaleIgnoredOnRealise(Join):
    """The sum written without the scale that the model ran with."""

    def realised(self, parts: Sequence[Part], setting: Setting, shape: Sequence[int]) -> Tensor:
        return super().realised(parts, replace(setting, scale=1.0), shape)
