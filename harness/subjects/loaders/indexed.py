"""Loader ``indexed``: an index of the model's names, made once per model, looked up by the file's own keys.

The cost grows with the file's tensors, not with the model's names: each key is split into a candidate name and a
suffix, the name is looked up, and only names that are there are taken apart. Keys seen before are remembered with
their place, so a file in the same family as an earlier one costs one lookup a tensor; what is remembered depends on
the model alone, and lives as long as its `Base`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fulldiff.harness.subjects.loaders import merging
from fulldiff.harness.subjects.loaders.base import Loader
from fulldiff.reference import load
from fulldiff.reference.key_maps import Base, Target, denoiser_names, text_names
from fulldiff.reference.load import BESIDE, GLORA, LOHA, LOKR, LORA, WHOLE, Fate, File, Found, Loaded, Part, Rejection

SUFFIXES = frozenset(
    (*(suffix for spelling in LORA for suffix in spelling if suffix), *(f".{name}" for name in (*LOHA, *GLORA)))
) | {suffix for _, suffix in (*BESIDE, *LOKR, *WHOLE)} | {".hada_t1", ".hada_t2"}  # fmt: skip
PLAIN: dict[frozenset[str], dict[str, str]] = {
    frozenset((up, down, *beside)): {up: "lora_up.weight", down: "lora_down.weight"} | {f".{n}": n for n in names}
    for up, down, _ in LORA
    for names in ((), ("alpha",), ("alpha", "dora_scale"), ("dora_scale",))
    for beside in (tuple(f".{name}" for name in names),)
}
Key = tuple[str, str]


class Entry(NamedTuple):
    """A candidate name's place in the maps' order, its target, its part, and whether the model has the weight."""

    position: int
    name: str
    target: Target
    part: Part
    present: bool


class Index:
    """A model's candidate names, and the keys of files already seen: entry and suffix."""

    def __init__(self, base: Base) -> None:
        self.weights = frozenset((*base.denoiser, *base.text))
        maps: tuple[tuple[Part, Mapping[str, Target]], ...]
        maps = (("text", text_names(base)), ("denoiser", denoiser_names(base)))
        first = {"text": len(maps[1][1]), "denoiser": 0}
        self.entries = {
            name: Entry(position, name, target, part, target.weight in self.weights)
            for part, names in maps
            for position, (name, target) in enumerate(names.items(), first[part])
        }
        self.seen: dict[str, tuple[Entry, str]] = {}

    def find(self, key: str) -> tuple[Entry, str] | None:
        """The entry and suffix of a key not seen before; None where it is no candidate's."""
        parts = split(key)
        entry = self.entries.get(parts[0]) if parts else None
        if entry is None or parts is None:
            return None
        self.seen[key] = found = (entry, parts[1])
        return found


def split(key: str) -> Key | None:
    """A key as candidate name and suffix; None where it has no suffix that a loader knows."""
    head, _, tail = key.rpartition(".")
    if tail != "weight":
        return (head, f".{tail}") if f".{tail}" in SUFFIXES else None
    name, _, side = head.rpartition(".")
    if (suffix := f".{side}.weight") in SUFFIXES:
        return name, suffix
    if name.endswith("_lora") and (suffix := f"_lora.{side}.weight") in SUFFIXES:
        return name.removesuffix("_lora"), suffix
    name, _, kind = name.rpartition(".")
    return (name, suffix) if (suffix := f".{kind}.{side}.weight") in SUFFIXES else None


class Indexed(load.Naive, Loader):
    """One lookup a tensor; modules are put into the candidates' order, so the later alias wins."""

    merge = staticmethod(merging.stacked)

    def __init__(self) -> None:
        self.indexes: WeakKeyDictionary[Base, Index] = WeakKeyDictionary()

    def load(self, base: Base, files: Sequence[File], rejection: Rejection) -> Loaded:
        if base not in self.indexes:
            self.indexes[base] = Index(base)
        return super().load(base, files, rejection)

    def fate(self, base: Base, file: File, rejection: Rejection, weights: frozenset[str]) -> Fate:
        index = self.indexes[base]
        modules, unmatched = self.grouped(index, file)
        parts: dict[Part, dict[Target, Found]] = {"denoiser": {}, "text": {}}
        skipped: list[Target] = []
        for entry in sorted(modules):
            tensors = modules[entry]
            plain = PLAIN.get(frozenset(tensors))
            if plain is None or not entry.present:
                unmatched += self.other(index, entry, tensors, file, parts, skipped)
            else:
                parts[entry.part][entry.target] = ("lora", {plain[suffix]: t for suffix, t in tensors.items()})
        if rejection.rejects(len(unmatched), len(file.tensors)):
            return Fate(file.name, True, tuple(unmatched))
        return Fate(file.name, False, tuple(unmatched), parts, tuple(dict.fromkeys(skipped)))

    def grouped(self, index: Index, file: File) -> tuple[dict[Entry, dict[str, Any]], list[str]]:
        """The file's tensors by entry and suffix, and the keys that are no candidate's."""
        modules: dict[Entry, dict[str, Any]] = {}
        unmatched = []
        seen = index.seen
        for key, tensor in file.tensors.items():
            place = seen.get(key) or index.find(key)
            if place is None:
                unmatched.append(key)
            elif (module := modules.get(place[0])) is None:
                modules[place[0]] = {place[1]: tensor}
            else:
                module[place[1]] = tensor
        self.names_tried += len(file.tensors)
        return modules, unmatched

    def other(
        self,
        index: Index,
        entry: Entry,
        tensors: Mapping[str, Any],
        file: File,
        parts: Mapping[Part, dict[Target, Found]],
        skipped: list[Target],
    ) -> list[str]:
        """A module that is more than a plain LoRA, or whose weight the model lacks; the keys that are left of it."""
        keys = {entry.name + suffix: tensor for suffix, tensor in tensors.items()}
        found: dict[Target, Found] = {}
        used: set[str] = set()
        self.module(entry.name, entry.target, keys, file, found, used)
        for target, module in found.items():
            if target.weight in index.weights:
                parts[entry.part][target] = module
            else:
                skipped.append(target)
        return [key for key in keys if key not in used]
