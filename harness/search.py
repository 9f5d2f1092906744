"""The search for failures: named cases first, then cases that hypothesis draws and shrinks.

Everything runs through `Engine.observe`, which looks a case up before it runs it, so a search that was
killed is resumed by starting it again: hypothesis draws the same cases from the same seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.strategies import SearchStrategy

from fulldiff.cases.model import Case, RuntimeCase, case_id, encode
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Outcome
from fulldiff.harness.results import Result, Store
from fulldiff.harness.shards import WHOLE, Shard, has

FINE = ("passed", "unsupported", "refused")
# The higher, the worse.
RANKS: dict[Outcome, int] = {
    "passed": 0,
    "unsupported": 1, "refused": 1,
    "wrong": 2, "not finite": 2, "raised": 2,
    "crashed": 3, "timed out": 3, "out of memory": 3, "absent": 3,
}  # fmt: skip
Expected = Callable[[Result], bool]


class Finding(AssertionError):
    """Base of the exception classes, one per diagnosis, by which hypothesis tells failures apart."""


class SearchOver(BaseException):
    """Raised through hypothesis when the time for a search or for shrinking is used up."""


@dataclass
class Engine:
    """Runs cases on one subject and writes each result line at once."""

    store: Store
    worker: Worker
    subject: str
    backend: str = "cpu"
    on_result: Callable[[Result], None] = lambda result: None

    def observe(self, case: Case, name: str = "") -> Result:
        """The result of a case: from the file if it is there, else run now and appended."""
        known = self.store.find(self.subject, self.backend, case)
        if known is not None:
            self.on_result(known)
            return known
        judgement = self.worker.judge(case, self.subject)
        result = Result(case_id(case), self.subject, self.backend, case, judgement, name)
        self.store.add(result)
        self.on_result(result)
        return result


@dataclass
class Search:
    """One subject's search: how many cases, how long, and what it has found (diagnosis → smallest case).

    Every shard draws the same cases, and runs its own.
    """

    engine: Engine
    examples: int
    seconds: float
    shrink_seconds: float = 20.0
    expected: Expected = lambda result: False
    first_only: bool = False
    first_after: int = 0
    shard: Shard = WHOLE
    found: dict[str, Result] = field(default_factory=dict)
    _classes: dict[str, type[Finding]] = field(default_factory=dict)
    _ran: int = 0
    _closed: set[str] = field(default_factory=set)
    _shrinking_since: float | None = None

    def run(self, strategy: SearchStrategy[Case], first_seed: int) -> Mapping[str, Result]:
        """Search until the examples or the time run out; after each finding go on without it."""
        end = time.monotonic() + self.seconds
        turn = 0
        while self._ran < self.examples and time.monotonic() < end:
            before = self._ran
            self._round(strategy, first_seed + turn, end)
            turn += 1
            if self._ran == before or (self.first_only and self.found):
                break
        return self.found

    def _round(self, strategy: SearchStrategy[Case], round_seed: int, end: float) -> None:
        self._shrinking_since = None
        chosen = settings(
            max_examples=self.examples - self._ran, deadline=None, database=None, verbosity=Verbosity.quiet,
            phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck), print_blob=False,
        )  # fmt: skip

        @seed(round_seed)
        @chosen
        @given(strategy)
        def check(case: Case) -> None:
            self._check(case, end)

        try:
            check()
        except (SearchOver, Finding):
            pass
        except BaseExceptionGroup as group:
            if group.split(Finding)[1] is not None:
                raise
        self._closed |= set(self.found)

    def _check(self, case: Case, end: float) -> None:
        now = time.monotonic()
        if self._shrinking_since is None:
            if now > end or self._ran >= self.examples:
                raise SearchOver
            self._ran += 1
            if not has(self.shard, case_id(case)):
                return
        elif now - self._shrinking_since > self.shrink_seconds:
            raise SearchOver
        result = self.engine.observe(case)
        if result.judgement.outcome in FINE or self.expected(result):
            return
        name = diagnosis(result)
        if name in self._closed:
            return
        if name not in self.found or size(case) < size(self.found[name].case):
            self.found[name] = result
        self._shrinking_since = self._shrinking_since or now
        self.first_after = self.first_after or self._ran
        raise self._class(name)

    def _class(self, name: str) -> type[Finding]:
        return self._classes.setdefault(name, type(f"Finding{len(self._classes)}", (Finding,), {"__doc__": name}))


def diagnosis(result: Result) -> str:
    """What tells one failure from another: the outcome, and where or in which claim and form it shows."""
    judgement, body = result.judgement, result.case.body
    if judgement.outcome in ("raised", "crashed", "timed out", "out of memory"):
        return f"{judgement.outcome} at {judgement.where}: {judgement.message.split(':')[0]}"
    forms = ""
    if isinstance(body, RuntimeCase):
        names = sorted({_form(adapter.kind, adapter.factors) for adapter in body.adapters})
        forms = f"{' & '.join(names)} on {body.layer.kind}"
    elif judgement.claim is not None:
        forms = judgement.claim.name
    return f"{judgement.outcome}: {forms}"


def _form(kind: str, factors: Mapping[str, object]) -> str:
    return f"{kind}({', '.join(name.removeprefix(f'{kind}_').split('.')[0] for name in factors)})"


def size(case: Case) -> tuple[int, int]:
    """The order in which findings count as smaller."""
    text = encode(case)
    digits = sum(int(part) for part in "".join(c if c.isdigit() else " " for c in text.decode()).split())
    return (len(text), digits)


def save(findings: Mapping[str, Result], folder: Path) -> dict[str, Path]:
    """Write each minimal case as JSON; diagnosis → file."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, result in findings.items():
        path = folder / f"{result.subject.replace(':', '-').replace('/', '-')}-{result.id.rsplit('/', 1)[1]}.json"
        path.write_bytes(encode(result.case) + b"\n")
        paths[name] = path
    return paths
