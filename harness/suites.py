"""The suites: for each, where its cases come from, what judges them, and what a subject of it is.

A new suite is one entry in `SUITES`. Nothing here imports torch: judges and subjects are named as
``module:attribute`` and imported where they run, in a worker, by `imported`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hypothesis.strategies import SearchStrategy

from fulldiff.cases.catalogue import HEAVY, pinned
from fulldiff.cases.joins import join_cases, named_joins
from fulldiff.cases.load_sets import HEAVY_LOADS, named_load_cases
from fulldiff.cases.load_strategies import load_cases
from fulldiff.cases.model import Case
from fulldiff.cases.restores import named_restores, restore_cases
from fulldiff.cases.strategies import runtime_cases
from fulldiff.harness.subjects.loaders.names import LOADERS
from fulldiff.harness.subjects.names import OURS, PEERS

SUBJECTS = "fulldiff.harness.subjects"


@dataclass(frozen=True)
class Suite:
    """One promise. ``judge`` is a function (case, subject, stage) → Judgement, where ``stage`` is told what is
    about to run; ``base`` the class that a subject subclasses; ``fault`` a class that makes a subject of a
    known fault's name; ``heavy`` the named cases that the quick profile leaves out."""

    promise: str
    subjects: Mapping[str, str]
    generated: Callable[[], SearchStrategy[Case]]
    named: Callable[[], Mapping[str, Case]]
    judge: str
    base: str
    fault: str
    heavy: frozenset[str] = frozenset()


SUITES: dict[str, Suite] = {
    "runtime": Suite(
        "y = (W + ΔW) x",
        {**OURS, **PEERS},
        runtime_cases,
        pinned,
        judge="fulldiff.harness.judge:judge",
        base=f"{SUBJECTS}.base:Subject",
        fault=f"{SUBJECTS}.faulty:Faulty",
        heavy=frozenset(HEAVY),
    ),
    "restore": Suite(
        "adapters come off in any order and leave the base bit for bit",
        {**OURS, **PEERS},
        restore_cases,
        named_restores,
        judge="fulldiff.harness.restore_judge:judge",
        base=f"{SUBJECTS}.base:Subject",
        fault=f"{SUBJECTS}.faulty:Faulty",
    ),
    "load": Suite(
        "several files onto one model: the naive loader's patches, whatever finds them",
        LOADERS,
        load_cases,
        named_load_cases,
        judge="fulldiff.harness.load.judge:judge",
        base=f"{SUBJECTS}.loaders.base:Loader",
        fault=f"{SUBJECTS}.loaders.faults:make",
        heavy=HEAVY_LOADS,
    ),
    "join": Suite(
        "one file of rank Σr = the weighted sum of several, toggled while the model runs",
        {"ljl": f"{SUBJECTS}.joiner:Ljl"},
        join_cases,
        named_joins,
        judge="fulldiff.harness.join.judge:judge",
        base=f"{SUBJECTS}.joiner:Joiner",
        fault=f"{SUBJECTS}.faulty_joiner:FaultyJoiner",
    ),
}


def imported(target: str) -> Any:
    """What ``module:attribute`` names; raises ImportError or AttributeError."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
