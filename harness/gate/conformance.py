"""What a change made wrong: outcomes of base and head case by case, lost cases, stale expectations."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fulldiff.harness.conform import PROFILES, Expectation, excused, named_case, named_cases, stale
from fulldiff.harness.gate.sides import Side
from fulldiff.harness.results import Result, Store
from fulldiff.harness.search import RANKS, Engine
from fulldiff.harness.suites import SUITES

SUITE = "runtime"


def conformance(base: Side, head: Side, known: Sequence[Expectation] = ()) -> tuple[int, dict[str, str]]:
    """The named cases of the runtime suite on both sides: how many, and what became worse, by case, and how.

    ``known`` are the head's expectations: what they name is no failure, and they may be stale.
    """
    found = lost(base.named_cases(), head.named_cases())
    before, after = ({r.id: r for r in results(side, known)} for side in (base, head))
    found |= worse(before, after, known)
    return len(before), found | {f"expectation {line}": "stale" for line in stale(known, list(after.values()))}


def worse(
    before: Mapping[str, Result], after: Mapping[str, Result], known: Sequence[Expectation] = ()
) -> dict[str, str]:
    """By case: an outcome that is worse than before, a new failure, a case that is no longer there."""
    found = {}
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if new is None:
            assert old is not None
            found[_name(key, old)] = f"{old.judgement.outcome} before, lost now"
        elif RANKS[new.judgement.outcome] > _rank(old) and not excused(new, known):
            was = f"{old.judgement.outcome} before" if old else "not there before"
            found[_name(key, new)] = f"{was}, {new.judgement.outcome} now {new.judgement.message}".rstrip()
    return found


def lost(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Named cases (name → id) that are gone under both their name and their id: a renamed one is not lost."""
    ids = set(after.values())
    gone = [name for name, own in before.items() if name not in after and own not in ids]
    return dict.fromkeys(gone, "a named case of the base, lost now")


def results(side: Side, known: Iterable[Expectation]) -> list[Result]:
    """What comes of the named cases, and of the expectations' pinned examples."""
    pinned = {entry.pinned: named_case(entry.pinned) for entry in known if entry.pinned}
    cases = named_cases(SUITES[SUITE], PROFILES["quick"]) | pinned
    with side.worker(1, timed=False) as worker, tempfile.TemporaryDirectory() as scratch:
        store = Store(Path(scratch) / "results.jsonl")
        engine = Engine(store, worker, side.subject)
        found = [engine.observe(case, name) for name, case in cases.items()]
        store.close()
    return found


def _rank(result: Result | None) -> int:
    """A new case may be unsupported, but must not fail."""
    return RANKS["unsupported" if result is None else result.judgement.outcome]


def _name(key: str, result: Result) -> str:
    return f"{result.subject} {result.name}" if result.name else key
