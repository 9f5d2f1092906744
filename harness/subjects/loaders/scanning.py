"""Loaders that test candidate names one by one: ``naive``, ``hoisted``, ``referential``, ``referential-forced``.

``hoisted`` and ``referential`` are the two changes of the pull request "Proposed lora loading optimizations": the
key maps are made once per load call; and with more than one file the names that earlier files had are tried first,
the whole map only if the file has keys left over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add
from typing import Any

from torch import Tensor

from fulldiff.harness.subjects.loaders import merging
from fulldiff.harness.subjects.loaders.base import Loader
from fulldiff.reference import load
from fulldiff.reference.key_maps import Base, Target, denoiser_names, text_names
from fulldiff.reference.load import Fate, File, Found, Loaded, Patch, Rejection

Position = int


class Naive(load.Naive, Loader):
    """The reference's loader, merging as its lineage does."""

    def merge(self, weight: Tensor, patches: Sequence[Patch]) -> Tensor:
        return merging.one_by_one(weight, patches)


class Concatenating(Naive):
    """Naive with names made by concatenation: what is gained by no other change than that."""

    spell = staticmethod(add)


class Hoisted(Naive):
    """Both key maps are made once per load call, not once per file."""

    def load(self, base: Base, files: Sequence[File], rejection: Rejection) -> Loaded:
        self.denoiser, self.text = denoiser_names(base), text_names(base)
        return super().load(base, files, rejection)

    def denoiser_map(self, base: Base) -> Mapping[str, Target]:
        return self.denoiser

    def text_map(self, base: Base) -> Mapping[str, Target]:
        return self.text


class KnownFirst(dict[str, Target]):
    """A key map that remembers the names already hit, with their places in its order."""

    def __init__(self, names: Mapping[str, Target]) -> None:
        super().__init__(names)
        self.known: dict[str, Position] = {}


class Referential(Hoisted):
    """Names already hit in this call first; the rest of the map only if keys are left over.

    What both passes find is put into the map's own order, so that of two names for one target the later one wins,
    whichever pass saw it first.
    """

    forced = False

    def load(self, base: Base, files: Sequence[File], rejection: Rejection) -> Loaded:
        self.several = self.forced or len(files) > 1
        return super().load(base, files, rejection)

    def fate(self, base: Base, file: File, rejection: Rejection, weights: frozenset[str]) -> Fate:
        if self.several and not isinstance(self.denoiser, KnownFirst):
            self.denoiser, self.text = KnownFirst(self.denoiser), KnownFirst(self.text)
        return super().fate(base, file, rejection, weights)

    def scan(
        self, names: Mapping[str, Target], tensors: Mapping[str, Any], file: File
    ) -> tuple[dict[Target, Found], dict[str, Any]]:
        if not isinstance(names, KnownFirst):
            return super().scan(names, tensors, file)
        used: set[str] = set()
        hits = self.first_pass(names, tensors, file, used)
        if len(used) < len(tensors):
            hits += self.second_pass(names, tensors, file, used)
        return self.ordered(hits), {name: tensor for name, tensor in tensors.items() if name not in used}

    def first_pass(
        self, names: KnownFirst, tensors: Mapping[str, Any], file: File, used: set[str]
    ) -> list[tuple[Position, dict[Target, Found]]]:
        """What the names already hit find."""
        if not tensors:
            return []
        hits = []
        for name, position in names.known.items():
            found: dict[Target, Found] = {}
            self.module(name, names[name], tensors, file, found, used)
            hits.append((position, found))
        self.names_tried += len(names.known)
        return hits

    def second_pass(
        self, names: KnownFirst, tensors: Mapping[str, Any], file: File, used: set[str]
    ) -> list[tuple[Position, dict[Target, Found]]]:
        """What all other names find; those are known from then on."""
        hits, known = [], names.known
        self.names_tried += len(names) - len(known)
        found: dict[Target, Found] = {}
        seen = set(known)
        for position, (name, target) in enumerate(names.items()):
            if name in seen:
                continue
            self.module(name, target, tensors, file, found, used)
            if found:
                hits.append((position, found))
                known[name] = position
                found = {}
        return hits

    def ordered(self, hits: list[tuple[Position, dict[Target, Found]]]) -> dict[Target, Found]:
        """What was found, a later candidate's in place of an earlier one's."""
        found: dict[Target, Found] = {}
        for _, module in sorted(hits, key=lambda hit: hit[0]):
            found |= module
        return found


class ReferentialForced(Referential):
    """Referential also where there is one file: what its bookkeeping costs."""

    forced = True
