"""Subjects ``fault:NAME`` of the suite ``load``: known wrong ways to load, run where a correct one should be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from fulldiff.harness.subjects.loaders import merging
from fulldiff.harness.subjects.loaders.base import Loader
from fulldiff.harness.subjects.loaders.scanning import Naive, Position, Referential
from fulldiff.harness.subjects.registry import SubjectError
from fulldiff.reference.key_maps import Base, Target, denoiser_names
from fulldiff.reference.load import Entered, Fate, File, Found, Loaded, LoadError, Part, Patch, Rejection

FAULTS: dict[str, type[Loader]] = {}


def make(name: str) -> Loader:
    """The faulty loader called ``name``; raises SubjectError."""
    if name not in FAULTS:
        raise SubjectError(f"no fault {name!r} of loading: use one of {', '.join(FAULTS)}")
    return FAULTS[name]()


def fault(name: str) -> Callable[[type[Loader]], type[Loader]]:
    """Register the decorated class under ``name``."""

    def register(kind: type[Loader]) -> type[Loader]:
        FAULTS[name] = kind
        return kind

    return register


@fault("known-set-kept-between-calls")
class KnownKept(Naive):
    """Names hit in earlier calls are tried first, with the targets that they had then."""

    def __init__(self) -> None:
        self.known: dict[str, Target] = {}

    def scan(
        self, names: Mapping[str, Target], tensors: Mapping[str, Any], file: File
    ) -> tuple[dict[Target, Found], dict[str, Any]]:
        merged = dict(names) | self.known
        found, left = super().scan(merged, tensors, file)
        heads = {key.rpartition(".lora_")[0] for key in tensors}
        self.known |= {name: target for name, target in names.items() if name in heads}
        return found, left


@fault("map-grown-across-models")
class MapGrown(Naive):
    """A mutable default: the key maps of all models loaded in the process are one."""

    grown: ClassVar[dict[str, Target]] = {}

    def denoiser_map(self, base: Base) -> Mapping[str, Target]:
        self.grown.update(denoiser_names(base))
        return self.grown


@fault("alias-winner-by-pass")
class AliasByPass(Referential):
    """Of two names for one target the one that was seen in the later pass wins, not the later in order."""

    def ordered(self, hits: list[tuple[Position, dict[Target, Found]]]) -> dict[Target, Found]:
        found: dict[Target, Found] = {}
        for _, module in hits:
            found |= module
        return found


@fault("first-alias-wins")
class FirstAliasWins(Referential):
    """Of two names for one target the earlier in order wins."""

    forced = True

    def ordered(self, hits: list[tuple[Position, dict[Target, Found]]]) -> dict[Target, Found]:
        return super().ordered([(-position, module) for position, module in hits])


@fault("threshold-after-first-map")
class ThresholdEarly(Naive):
    """What the denoiser's map leaves over is judged before the text encoders' map was tried."""

    def fate(self, base: Base, file: File, rejection: Rejection, weights: frozenset[str]) -> Fate:
        _, left = self.scan(denoiser_names(base), file.tensors, file)
        if rejection.rejects(len(left), len(file.tensors)):
            return Fate(file.name, True, tuple(left))
        return super().fate(base, file, rejection, weights)


@fault("threshold-off-by-one")
class ThresholdOffByOne(Naive):
    """As many unmatched tensors as the limit allows reject the file."""

    def fate(self, base: Base, file: File, rejection: Rejection, weights: frozenset[str]) -> Fate:
        fate = super().fate(base, file, rejection, weights)
        if rejection.tensors is not None and len(fate.unmatched) == rejection.tensors:
            return Fate(file.name, True, fate.unmatched)
        return fate


@fault("rejected-leaves-patches")
class RejectedLeavesPatches(Naive):
    """A rejected file is reported as such and applied as far as it matches."""

    def fate(self, base: Base, file: File, rejection: Rejection, weights: frozenset[str]) -> Fate:
        kept = super().fate(base, file, Rejection(), weights)
        rejected = rejection.rejects(len(kept.unmatched), len(file.tensors))
        return Fate(kept.file, rejected, kept.unmatched, kept.patches, kept.skipped)


@fault("last-strength-for-all")
class LastStrength(Naive):
    """Every file gets the strengths of the last one."""

    def load(self, base: Base, files: Sequence[File], rejection: Rejection) -> Loaded:
        last = files[-1]
        same = [File(file.name, file.tensors, last.strength, last.text_strength) for file in files]
        return super().load(base, same, rejection)


@fault("text-at-denoiser-strength")
class TextAtDenoiserStrength(Naive):
    """The text encoders get the denoiser's strength."""

    def strengths(self, file: File) -> tuple[tuple[Part, float], ...]:
        return (("denoiser", file.strength), ("text", file.strength))


@fault("duplicate-applied-twice")
class DuplicateTwice(Naive):
    """The same file at the same strength counts as often as it is given."""

    def load(self, base: Base, files: Sequence[File], rejection: Rejection) -> Loaded:
        own = [File(f"{place}:{f.name}", f.tensors, f.strength, f.text_strength) for place, f in enumerate(files)]
        return _renamed(super().load(base, own, rejection))


def _renamed(loaded: Loaded) -> Loaded:
    """The same with the files' own names."""
    fates = [Fate(f.file.partition(":")[2], f.rejected, f.unmatched, f.patches, f.skipped) for f in loaded.fates]
    patches = {
        weight: [patch._replace(file=patch.file.partition(":")[2]) for patch in own]
        for weight, own in loaded.patches.items()
    }
    return Loaded(patches, fates, loaded.names_tried)


@fault("same-file-once-whatever-strength")
class SameFileOnce(Naive):
    """The same file at another strength takes the place of the first."""

    def enter(self, entered: Entered, file: File, fate: Fate) -> None:
        for patches in entered.values():
            for key in [key for key in patches if key[0] == file.name]:
                del patches[key]
        super().enter(entered, file, fate)


@fault("last-file-first")
class LastFileFirst(Naive):
    """Each weight's patches in the reverse of the load order."""

    def listed(self, entered: Entered) -> dict[str, list[Patch]]:
        return {weight: patches[::-1] for weight, patches in super().listed(entered).items()}


@fault("skipped-counted-unmatched")
class SkippedUnmatched(Naive):
    """Tensors of a target that the model lacks count as unmatched."""

    def fate(self, base: Base, file: File, rejection: Rejection, weights: frozenset[str]) -> Fate:
        fate = super().fate(base, file, rejection, weights)
        return Fate(fate.file, fate.rejected, (*fate.unmatched, *(t.weight for t in fate.skipped)), fate.patches)


@fault("orphan-up-ignored")
class OrphanUpIgnored(Naive):
    """A factor without its partner is left out silently; its file loads."""

    def module(
        self, name: str, target: Target, tensors: Mapping[str, Any], file: File,
        found: dict[Target, Found], used: set[str],
    ) -> None:  # fmt: skip
        try:
            super().module(name, target, tensors, file, found, used)
        except LoadError:
            used.update(key for key in tensors if key.startswith(name))


@fault("orphan-alpha-unmatched")
class OrphanAlphaUnmatched(Naive):
    """An alpha that no factor needs is reported as unmatched."""

    def fate(self, base: Base, file: File, rejection: Rejection, weights: frozenset[str]) -> Fate:
        fate = super().fate(base, file, rejection, weights)
        return Fate(fate.file, fate.rejected, (*fate.unmatched, *_lone(file.tensors)), fate.patches, fate.skipped)


def _lone(tensors: Iterable[str]) -> list[str]:
    """The alphas beside which there is nothing."""
    names = [key.rpartition(".")[0] for key in tensors if key.endswith(".alpha")]
    return [f"{name}.alpha" for name in names if sum(key.startswith(name) for key in tensors) == 1]


@fault("cast-after-each-patch")
class CastAfterEach(Naive):
    """The sum is cast to the weight's dtype after every patch, not once."""

    def merge(self, weight: Tensor, patches: Sequence[Patch]) -> Tensor:
        for patch in patches:
            weight = merging.one_by_one(weight, [patch])
        return weight
