"""An adapter file's header matched to a base model: what it adapts, and what of it cannot be applied and why.

Every tensor of the file is accounted for exactly once: matched, unmatched, skipped (with a note) or refused
(with a reason). A module is matched whole or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fulldiff.cases.model import Adapter, Layer
from fulldiff.cases.tables import TableRow, models
from fulldiff.harness.files.adapters import AlphaSource, Refusal, adapters, check_positions
from fulldiff.harness.files.base import Base, Place, table
from fulldiff.harness.files.container import FileError, Header, read_header
from fulldiff.harness.files.metadata import Declared, declared
from fulldiff.harness.files.modules import Module, grouped
from fulldiff.harness.files.names import component, is_embedding

Fate = Literal["matched", "unmatched", "skipped", "refused"]
SHOWN = 4


@dataclass(frozen=True)
class Target:
    """One adapter on one layer. ``rows`` are the table's rows that the layer is; ``module`` is its name in
    the file; ``alpha`` says where its scale comes from (assumed: there is none, so it is 1); ``weights``
    are the checkpoint's tensors, in row order, empty for a table."""

    name: str
    rows: tuple[TableRow, ...]
    layer: Layer
    adapter: Adapter
    module: str
    alpha: AlphaSource
    weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A tensor that is rightly not applied, and why."""

    tensor: str
    reason: str


@dataclass(frozen=True)
class Refused:
    """A module that is not applied although it should be: its tensors, and why."""

    module: str
    tensors: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Match:
    """What became of every tensor of a file. ``counts`` are tensors by part of the model and fate."""

    path: Path
    base: str
    targets: tuple[Target, ...] = ()
    unmatched: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    refused: tuple[Refused, ...] = ()
    counts: Mapping[str, Counter[Fate]] = field(default_factory=dict)

    @property
    def alphas(self) -> Counter[AlphaSource]:
        """How many targets have their alpha from where."""
        return Counter(target.alpha for target in self.targets)

    def describe(self) -> str:
        """The counts in one line per part, and every refusal and skip reason with a tensor's name."""
        lines = [
            f"{part}: " + ", ".join(f"{count} {fate}" for fate, count in fates.items())
            for part, fates in self.counts.items()
        ]
        alphas = ", ".join(f"{source} {count}" for source, count in self.alphas.items())
        lines += [f"alpha: {alphas}"] if alphas else []
        lines += [f"refused {refused.tensors[0]}: {refused.reason}" for refused in self.refused]
        lines += [f"skipped {skipped.tensor}: {skipped.reason}" for skipped in self.skipped]
        return "\n".join([*lines, *(f"unmatched {name}" for name in self.unmatched)])


class MatchError(FileError):
    """A file that nothing of can be applied to the base; ``match`` says what became of each tensor."""

    def __init__(self, message: str, match: Match) -> None:
        super().__init__(message)
        self.match = match


def read(path: Path, model: str) -> Match:
    """The file at ``path`` matched to the layer table ``model``.

    Raises:
        FileError: the file cannot be read, or nothing of it fits (as for `match`).
        TableError: there is no such table.
    """
    return match(read_header(path), table(model))


def match(header: Header, base: Base) -> Match:
    """What the file adapts in ``base``.

    Raises:
        MatchError: nothing of it fits, or another model's layers fit better.
    """
    found = matched(header, base)
    if not found.targets or found.unmatched or found.refused:
        check_family(header, base, found)
    return found


def matched(header: Header, base: Base) -> Match:
    """`match` without its errors: what became of each tensor, also where nothing fits."""
    sorting = Sorting(header, base, declared(header))
    modules, strangers = grouped(header)
    for module in modules:
        sorting.place(module)
    for name in strangers:
        sorting.strange(name)
    return sorting.result()


@dataclass
class Sorting:
    """One file's modules on their way into a `Match`."""

    header: Header
    base: Base
    declared: Declared
    targets: list[Target] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    counts: dict[str, Counter[Fate]] = field(default_factory=dict)

    def result(self) -> Match:
        """What has become of everything placed so far."""
        lists = (tuple(self.targets), tuple(self.unmatched), tuple(self.skipped), tuple(self.refused))
        return Match(self.header.path, self.base.name, *lists, self.counts)

    def strange(self, name: str) -> None:
        """A tensor whose name no family spells."""
        if is_embedding(name) or self.header.metadata.get(name) == "<embed>":
            self.skip((name,), "a learned token's embedding, which adapts no layer", component(name))
        else:
            self.unmatch((name,), component(name))

    def place(self, module: Module) -> None:
        """Match one module, or say why not."""
        places = self.base.find(module.name)
        part = places[0].part if places else component(module.name)
        if module.fault:
            self.refuse(module, module.fault, part)
        elif set(module.tensors) == {"alpha"}:
            self.skip(module.everything, "an orphan alpha: the module has no factors", part)
        elif len(places) == 1:
            self.fit(module, places[0])
        else:
            self.misplaced(module, places, part)

    def misplaced(self, module: Module, places: tuple[Place, ...], part: str) -> None:
        """A module whose name means no layer, or several."""
        layers = tuple(place.name for place in places) or self.base.inside(module.name)
        if layers:
            self.refuse(module, f"its name means {len(layers)} layers, not one: {', '.join(layers[:SHOWN])}", part)
        elif part.startswith("text_encoder") and part not in self.base.parts:
            self.skip(module.everything, f"{self.base.name} has no layers of its {part}", part)
        else:
            self.unmatch(module.everything, part)

    def fit(self, module: Module, place: Place) -> None:
        """A module whose layer is known: all its adapters, or a refusal."""
        try:
            if module.family == "cloneofsimo":
                check_positions(module, self.header)
            if place.refusal:
                raise Refusal(place.refusal)
            made = list(adapters(module, place, self.header, self.declared))
        except Refusal as refusal:
            self.refuse(module, str(refusal), place.part)
            return
        self.targets += [
            Target(place.name, place.rows, place.layer, adapter, module.prefix, source, place.tensors)
            for adapter, source in made
        ]
        self.count(place.part, "matched", len(module.everything))

    def refuse(self, module: Module, reason: str, part: str) -> None:
        """Account for a module that should be applied and cannot."""
        self.refused.append(Refused(module.prefix, module.everything, reason))
        self.count(part, "refused", len(module.everything))

    def skip(self, tensors: tuple[str, ...], reason: str, part: str) -> None:
        """Account for tensors that are rightly left."""
        self.skipped += [Skipped(tensor, reason) for tensor in tensors]
        self.count(part, "skipped", len(tensors))

    def unmatch(self, tensors: tuple[str, ...], part: str) -> None:
        """Account for tensors of an unknown layer or name."""
        self.unmatched += tensors
        self.count(part, "unmatched", len(tensors))

    def count(self, part: str, fate: Fate, tensors: int) -> None:
        """Add to the counts of one part of the model."""
        self.counts.setdefault(part, Counter())[fate] += tensors


def check_family(header: Header, base: Base, found: Match) -> None:
    """Refuse a file that nothing of fits, or that another table fits better."""
    others = {model: table(model) for model in models() if model != base.model}
    fits = {model: _common_targets(matched(header, other), base) for model, other in others.items()}
    best = max(fits, key=lambda model: fits[model], default="")
    if fits.get(best, 0) > len(found.targets):
        guess = f"it was made for {best} (or a model with its layers), which {fits[best]} of its modules fit"
    elif not found.targets:
        guess = _guess_by_names(header, base)
    else:
        return
    first = next((f"; {r.tensors[0]}: {r.reason}" for r in found.refused), "")
    raise MatchError(
        f"{found.path}: {len(found.targets)} of its modules fit {base.name}, from {len(header.tensors)} tensors: "
        f"{guess}{first}",
        found,
    )


def _common_targets(found: Match, base: Base) -> int:
    """Targets, without those in text encoders where the base has none."""
    text = any(part.startswith("text_encoder") for part in base.parts)
    return sum(text or not target.rows[0].part.startswith("text_encoder") for target in found.targets)


def _guess_by_names(header: Header, base: Base) -> str:
    modules = {module.name for module in grouped(header)[0]}
    bases = {base.name: base} | {model: table(model) for model in models()}
    known = {name: sum(bool(b.find(module)) for module in modules) for name, b in bases.items()}
    best = max(known, key=lambda name: known[name])
    if not known[best]:
        return "no known model has layers of these names; give a file of adapters for a known model"
    return f"the names of {known[best]} of its {len(modules)} modules are those of {best}, but none of them fits"
