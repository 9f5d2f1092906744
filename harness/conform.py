"""The conform run: named cases, then a search; findings saved, an exit code, a summary."""

from __future__ import annotations

import fnmatch
import hashlib
import platform
import re
import tomllib
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fulldiff.cases.model import Case, CaseError, case_id, decode
from fulldiff.harness.manager import BackendAbsent, Worker
from fulldiff.harness.protocol import Judgement, LoadCode
from fulldiff.harness.results import Environment, Planned, Result, Store
from fulldiff.harness.search import FINE, Engine, Search, save
from fulldiff.harness.shards import WHOLE, Shard, has, suffix
from fulldiff.harness.suites import SUITES, Suite


@dataclass(frozen=True)
class Profile:
    """How much to run: generated cases, seconds at most, and whether heavy named cases are in."""

    examples: int
    seconds: float
    heavy: bool


PROFILES = {
    "quick": Profile(700, 45, False),
    "ci": Profile(5_000, 600, True),
    "soak": Profile(1_000_000, 8 * 3600, True),
}


@dataclass(frozen=True)
class Expectation:
    """A known failure: cases whose id or name matches ``pattern`` end as ``outcome``, and why.

    ``pinned`` is the example that shows it: a named case, or a case's JSON file. ``message``, if there is one, is a
    part of what the failure must say, or of the claim that it breaks. An ``outcome`` may be either of two: "wrong or
    not finite", where numbers are left over in memory.
    """

    pattern: str
    outcome: str
    reason: str
    pinned: str = ""
    link: str = ""
    message: str = ""

    def matches(self, result: Result) -> bool:
        named = (result.id, result.name)
        return any(fnmatch.fnmatchcase(name, self.pattern) for name in named)

    def excuses(self, result: Result) -> bool:
        return self.matches(result) and self.met_by(result.judgement)

    def met_by(self, judgement: Judgement) -> bool:
        said = judgement.message + (judgement.claim.name if judgement.claim else "")
        return judgement.outcome in self.outcome.split(" or ") and self.message in said


class ExpectationError(ValueError):
    """An expectations file that cannot be read; the message names the file."""


@dataclass
class Outcome:
    """What a conform run found."""

    counts: Counter[str]
    findings: dict[str, Result]
    paths: dict[str, Path]
    stale: list[str]
    excused: Counter[Expectation]

    @property
    def ok(self) -> bool:
        return not self.findings and not self.stale and not self.nothing_computed

    @property
    def nothing_computed(self) -> bool:
        """Cases were run and none passed; a small enough shard has no case to run."""
        return bool(self.counts) and not self.counts["passed"]


def expectations(subject: str, path: Path | None = None) -> list[Expectation]:
    """What is expected of the subject: ``path``, else cases/expectations/<subject>.toml, else nothing.

    Of a subject ``name@backend`` also what <name>.toml says of every backend.
    """
    if path is not None:
        return _read(path)
    folder = files("fulldiff.cases") / "expectations"
    own = [folder / f"{name}.toml" for name in dict.fromkeys((subject.partition("@")[0], subject))]
    return [entry for source in own if source.is_file() for entry in _read(source)]


def _read(source: Path | Traversable) -> list[Expectation]:
    try:
        entries = tomllib.loads(source.read_text(encoding="utf-8"))["expect"]
        return [Expectation(**entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExpectationError(f"{source}: {error}; each [[expect]] needs pattern, outcome, reason") from error


def conform(
    subject: str,
    profile: Profile,
    seed: int,
    folder: Path,
    python: str,
    console: Console,
    known: Sequence[Expectation] = (),
    suite: str = "runtime",
    shard: Shard = WHOLE,
) -> Outcome:
    """Run the suite's named and generated cases on ``subject``; result lines go to ``folder``, and resume there."""
    chosen = SUITES[suite]
    named = named_cases(chosen, profile) | {e.pinned: named_case(e.pinned) for e in known if e.pinned}
    with Worker(python) as worker, Progress(console=console, disable=not console.is_terminal) as progress:
        store = Store.begin(folder / file_name(subject, seed, suite, shard), environment(worker, subject, suite))
        ids = {label: case_id(case) for label, case in named.items()}
        store.plan(Planned(suite, subject, seed, shard, ids, profile.examples))
        task = progress.add_task(f"conform {subject}", total=(len(named) + profile.examples) // shard[1])
        engine = Engine(store, worker, subject, on_result=lambda _: progress.advance(task))
        results = [engine.observe(case, label) for label, case in named.items() if has(shard, ids[label])]
        expected = partial(excused, known=known)
        bad = {f"named case {r.name}": r for r in results if r.judgement.outcome not in FINE and not expected(r)}
        search = Search(engine, profile.examples, profile.seconds, expected=expected, shard=shard)
        found = bad | dict(search.run(chosen.generated(), seed))
    everything = [result for result in store.results() if result.subject == subject]
    store.finish()
    paths = save(found, folder / "findings")
    # What matches no case of one shard may match one of another: `fulldiff report` sees all.
    wrong = stale(known, everything) + (unmatched(known, everything) if shard == WHOLE else [])
    counts: Counter[str] = Counter(r.judgement.outcome for r in everything)
    reasons = Counter(entry for r in everything for entry in known if entry.excuses(r))
    return Outcome(counts, found, paths, wrong, reasons)


def file_name(subject: str, seed: int, suite: str, shard: Shard) -> str:
    """The file of a run's result lines."""
    first = "" if suite == "runtime" else f"{suite}-"
    # A subject may be a whole command.
    return f"conform-{first}{re.sub('[^A-Za-z0-9_.@-]', '-', subject)}-{seed}{suffix(shard)}.jsonl"


def excused(result: Result, known: Sequence[Expectation]) -> bool:
    """Whether the result is a known failure."""
    return any(entry.excuses(result) for entry in known)


def stale(known: Sequence[Expectation], results: Sequence[Result]) -> list[str]:
    """Expectations whose pinned example no longer ends as expected."""
    ends = {result.name: result.judgement for result in results if result.name}
    return [
        f"{entry.pattern}: its pinned example {entry.pinned} is {_with(now.outcome, now.message)}, "
        f"not {_with(entry.outcome, entry.message)}: correct the entry or remove it"
        for entry in known
        if (now := ends.get(entry.pinned)) and not entry.met_by(now)
    ]


def _with(outcome: str, message: str) -> str:
    return f"{outcome} ({message})" if message else outcome


def unmatched(known: Sequence[Expectation], results: Sequence[Result]) -> list[str]:
    """Expectations that match no case."""
    return [f"{e.pattern}: matches no case" for e in known if not any(e.matches(result) for result in results)]


def show(outcome: Outcome, subject: str, console: Console) -> None:
    """Print the counts, what was expected, and each finding with the claim broken and the command to replay it."""
    table = Table("outcome", "cases", title=f"conform {subject}")
    table.columns[1].justify = "right"
    for name, count in outcome.counts.most_common():
        table.add_row(name, str(count))
    console.print(table)
    for entry, count in outcome.excused.items():
        console.print(f"expected: {count:5} {entry.outcome}: {entry.reason}", markup=False, highlight=False)
    for diagnosis, result in outcome.findings.items():
        console.print(f"[bold red]FAILED[/] {diagnosis}", highlight=False)
        console.print(describe(result), markup=False, highlight=False)
        console.print(f"  replay: fulldiff replay {outcome.paths[diagnosis]} --subject {subject}", soft_wrap=True)
    for line in outcome.stale:
        console.print(f"[bold red]STALE[/] expectation {line}", highlight=False)
    if outcome.nothing_computed:
        console.print(f"[bold red]FAILED[/] not one case passed: {subject} has computed nothing", highlight=False)
    console.print("ok" if outcome.ok else f"{len(outcome.findings)} findings, {len(outcome.stale)} stale expectations")


def describe(result: Result) -> str:
    """A judgement in words: the claim, the worst element, the budget used."""
    judgement, claim = result.judgement, result.judgement.claim
    lines = [f"  case:   {result.id}", f"  outcome: {judgement.outcome} {judgement.message}".rstrip()]
    if claim is not None:
        lines.append(f"  claim:  {claim.name}" + (f" at {claim.index}" if claim.index else ""))
        if claim.got:
            lines.append(f"  got {claim.got}, expected {claim.want}")
        if claim.error:
            used = "" if claim.budget == "0" else f" ({claim.used:,.0%} used)"
            lines.append(f"  error {claim.error}, budget {claim.budget}{used}")
    return "\n".join(lines)


def named_case(name: str) -> Case:
    """A named case, or one read from its JSON file; raises CaseError."""
    for suite in SUITES.values():
        if (case := suite.named().get(name)) is not None:
            return case
    try:
        return decode(Path(name).read_bytes())
    except OSError as error:
        raise CaseError(f"{name}: {error.strerror}; give a case's JSON file or a name from `fulldiff list`") from error


def named_cases(suite: Suite, profile: Profile) -> dict[str, Case]:
    """The suite's named cases that the profile has."""
    return {name: case for name, case in suite.named().items() if profile.heavy or name not in suite.heavy}


def environment(worker: Worker, subject: str, suite: str = "runtime") -> Environment:
    """What the worker runs on, and the code that the suite's subject loads there.

    Raises:
        BackendAbsent: the subject cannot be made; nothing could be said of any case.
    """
    hello, loaded = worker.start(), worker.ask(LoadCode(subject, suite))
    if reason := loaded.judgement:
        told = (
            reason.message if reason.outcome == "absent" else f"subject {subject!r} {reason.outcome}: {reason.message}"
        )
        raise BackendAbsent(f"{told} ({reason.where})" if reason.where else told)
    machine = hashlib.blake2b(uuid.getnode().to_bytes(8, "little"), digest_size=4).hexdigest()
    return Environment(hello.versions, hello.device, hello.threads, platform.platform(), machine, loaded.code)
