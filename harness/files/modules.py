"""A file's tensors, grouped into modules: what one prefix, family and adapter name hold together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fulldiff.harness.files.container import Header
from fulldiff.harness.files.names import Family, TensorName, family, kind_of, split


@dataclass(frozen=True)
class Module:
    """One module: its name as in the file and without wrappers, and tensor names by canonical factor.

    ``fault`` says what is wrong with the tensors before any layer is looked at, empty if nothing is.
    """

    prefix: str
    name: str
    family: Family
    tensors: Mapping[str, str]
    everything: tuple[str, ...]
    fault: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The adapter kinds whose factors are here, in the file's order."""
        return tuple(dict.fromkeys(kind for factor in self.tensors if (kind := kind_of(factor))))


def grouped(header: Header) -> tuple[list[Module], list[str]]:
    """The file's modules, and the tensors whose names no family spells."""
    parts = {name: split(name) for name in header.tensors}
    by_prefix: dict[str, dict[str, TensorName]] = {}
    for name, part in parts.items():
        if part:
            by_prefix.setdefault(part.prefix, {})[name] = part
    modules = [module for named in by_prefix.values() for module in _modules(named)]
    return modules, [name for name, part in parts.items() if not part]


def _modules(named: Mapping[str, TensorName]) -> list[Module]:
    """The modules of one prefix: one per style and adapter name; alpha and the like belong to the only one."""
    if kinds := dict.fromkeys(part.refused for part in named.values() if part.refused):
        return [_module(named, f"{' and '.join(kinds)}: a kind that is not supported")]
    keys = dict.fromkeys((part.style, part.adapter) for part in named.values() if part.style != "any")
    if len(keys) <= 1:
        return [_module(named)]
    if common := [name for name, part in named.items() if part.style == "any"]:
        return [_module(named, f"{', '.join(common)} could belong to any of {len(keys)} adapters of this module")]
    return [_module({n: p for n, p in named.items() if (p.style, p.adapter) == key}) for key in keys]


def _module(named: Mapping[str, TensorName], fault: str = "") -> Module:
    tensors: dict[str, str] = {}
    for name, part in named.items():
        if part.factor in tensors and not fault:
            fault = f"{tensors[part.factor]} and {name} are the same factor"
        tensors[part.factor] = name
    first = next((part for part in named.values() if part.style != "any"), next(iter(named.values())))
    return Module(first.prefix, first.module, family(first), tensors, tuple(named), fault)
