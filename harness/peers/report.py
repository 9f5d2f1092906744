"""The report on peers: what their conform runs found, by kind and layer, and why each wrong result is wrong.

A function of the result lines and the installed peers, which diagnosis and reproductions run again on wrong cases.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import pandas as pd

from fulldiff.cases.model import RuntimeCase, numel
from fulldiff.harness.manager import Worker
from fulldiff.harness.peers import bench, matrix, policies
from fulldiff.harness.peers.confirm import Reproduction, reproduce
from fulldiff.harness.peers.matrix import RIGHT, UNTAKEN, WRONG
from fulldiff.harness.protocol import Diagnose, Diagnosis
from fulldiff.harness.results import Result, read
from fulldiff.harness.search import diagnosis as failure
from fulldiff.harness.search import size

PACKAGES = ("peft", "lycoris-lora", "diffusers", "torch")
# Of each failure (outcome, forms, layer) so many results are diagnosed; more tell nothing new.
PER_FAILURE = 4
# So many numbers of input and weight a reader can still look through.
LEGIBLE = 2000

HEAD = """# Peers

What shipped implementations do with the cases of the runtime suite: y = (W + ΔW) x against the full diff in
float64. A cell says how many cases were right, wrong (the output differs by more than rounding explains),
failed (raised or crashed) and left out (no parameters or loader for that form). Wrong results are diagnosed:
every known fault of the reference, singly and in pairs, is run on the same case, and the one that gives the
peer's numbers is named; where none does, the factors that change nothing in the output (unread). Each finding has
a [script](reproductions.md) that needs the peer alone, run in a clean interpreter: what it does not confirm is no
finding. Written by `fulldiff peers` from the lines of `fulldiff conform --subject PEER`.

Versions: {versions}.

"""
PAGE = "reproductions.md"
PAGE_HEAD = """# Reproductions

One for each finding of [peers.md](peers.md), with the peer alone: save it to a file and run it with Python where the
peer is installed. Exit code 1: the peer still does this; 0: it is right. Written and run by `fulldiff peers`.
"""
POLICIES = """

## Policies

Where implementations agree to differ each is judged by its own rule; none of these is a finding.

"""


@dataclass(frozen=True)
class Finding:
    """Results of one peer that one cause explains, and the smallest of them."""

    peer: str
    cause: str
    results: tuple[Result, ...]
    reproduction: Reproduction | None = None
    name: str = ""

    @property
    def confirmed(self) -> bool:
        return self.reproduction is not None and self.reproduction.confirmed

    @property
    def smallest(self) -> Result:
        return min(self.results, key=readability)


def readability(result: Result) -> tuple[bool, tuple[int, int]]:
    """The order of the cases that a finding may be shown on: those first whose numbers a person can look through."""
    body = result.case.body
    assert isinstance(body, RuntimeCase)
    return numel(body.input.shape) + numel(body.layer.weight_shape) > LEGIBLE, size(result.case)


def load(folder: Path, peers: Iterable[str], seed: int) -> dict[str, list[Result]]:
    """The results of the peers' conform runs that are there."""
    paths = {peer: folder / f"conform-{peer}-{seed}.jsonl" for peer in peers}
    return {
        peer: [line for line in read(path) if isinstance(line, Result)] for peer, path in paths.items() if path.exists()
    }


def findings(
    peer: str, results: Sequence[Result], worker: Worker, progress: Callable[[], None] = lambda: None
) -> list[Finding]:
    """What is wrong with a peer, the widest cause first."""
    bad = [result for result in results if result.judgement.outcome not in RIGHT + UNTAKEN]
    diagnosed: dict[str, tuple[Result, Diagnosis]] = {}
    for result in sample([r for r in bad if r.judgement.outcome in WRONG]):
        diagnosed[result.id] = (result, diagnosed_by(worker, peer, result, closer=False))
        progress()
    raised: dict[str, list[Result]] = defaultdict(list)
    for result in bad:
        if result.judgement.outcome not in WRONG:
            raised[failure(result)].append(result)
    made = explained(peer, list(diagnosed.values()), lambda result: diagnosed_by(worker, peer, result, closer=True))
    return made + [Finding(peer, cause, tuple(own)) for cause, own in raised.items()]


def sample(wrong: Sequence[Result]) -> list[Result]:
    """The smallest few results of each failure."""
    by_failure: dict[str, list[Result]] = defaultdict(list)
    for result in sorted(wrong, key=readability):
        by_failure[failure(result)].append(result)
    return [result for own in by_failure.values() for result in own[:PER_FAILURE]]


def diagnosed_by(worker: Worker, peer: str, result: Result, closer: bool) -> Diagnosis:
    """The diagnosis of one result; unknown where the peer does not compute it again."""
    answer = worker.ask(Diagnose(result.case, peer, closer))
    return answer.diagnosis or Diagnosis(partly=answer.judgement.message if answer.judgement else "")


def explained(
    peer: str, diagnosed: list[tuple[Result, Diagnosis]], closer: Callable[[Result], Diagnosis]
) -> list[Finding]:
    """Group by cause; of the faults that equal a result, those that explain the most results are named.

    What no single fault explains is looked at ``closer``, on the smallest of its results; of several pairs those
    with the most faults that the peer has singly are named.
    """
    made, left = [], diagnosed
    single: set[str] = set()
    while counts := Counter(name for _, found in left for name in found.equals):
        cause, most = counts.most_common(1)[0]
        by_it = [(result, found) for result, found in left if cause in found.equals]
        same, common = tuple(result for result, _ in by_it), set.intersection(*(set(f.equals) for _, f in by_it))
        # The narrower of two faults is the later one in the reference's table.
        causes = " or ".join(n for n in reversed(by_it[0][1].equals) if counts[n] == most and n in common)
        made.append(Finding(peer, f"equals: {causes}", same))
        single |= set(causes.split(" or "))
        left = [(result, found) for result, found in left if cause not in found.equals]
    unknown: dict[str, list[Result]] = defaultdict(list)
    for result, _ in left:
        unknown[failure(result)].append(result)
    described: dict[str, list[Result]] = defaultdict(list)
    for own in unknown.values():
        described[str(_likeliest(closer(min(own, key=readability)), single))] += own
    return made + [Finding(peer, cause, tuple(own)) for cause, own in described.items()]


def _likeliest(found: Diagnosis, single: set[str]) -> Diagnosis:
    """Of the pairs that equal a result, those with the most faults out of ``single``."""
    shared = {pair: len(single.intersection(pair.split(" and "))) for pair in found.equals}
    return msgspec.structs.replace(
        found, equals=tuple(pair for pair, count in shared.items() if count == max(shared.values()))
    )


def confirmed(found: Sequence[Finding], worker: Worker, progress: Callable[[], None]) -> list[Finding]:
    """The findings with their reproductions, which are run, and names for them."""
    made: list[Finding] = []
    taken: Counter[str] = Counter()
    for finding in found:
        name, smallest = f"{finding.peer}-{slug(finding.cause)}", finding.smallest
        taken[name] += 1
        what = f"{finding.peer}: {finding.cause}"
        shown = reproduce(smallest.case, smallest.judgement, finding.peer, what, worker)
        number = f"-{taken[name]}" if taken[name] > 1 else ""
        made.append(replace(finding, reproduction=shown, name=name + number))
        progress()
    return made


def slug(cause: str) -> str:
    """A name that stays the same from run to run: the first fault's, what is unread or unknown, or where it raised."""
    first = cause.removeprefix("equals: ").replace("unread: ", "unread ").split(" or ")[0].split(": ")[0]
    first = first.split(" without effect")[0]
    if first.startswith(
        "unknown"
    ):  # "unknown (1.096 times the right delta, only output rows 1, 2)": without the numbers
        first = re.sub(r"\([\d, ]*\)|\b[\d.]+\b", "", first).split(",")[0]
    return re.sub("[^a-z0-9]+", "-", first.lower()).strip("-")


def write(runs: Mapping[str, Sequence[Result]], found: Mapping[str, Sequence[Finding]], out: Path) -> None:
    """Write peers.md, peers.png and the page of reproductions."""
    matrix.plot(runs, out / "peers.png")
    (out / "peers.md").write_text(markdown(runs, found) + bench.section(out / "runs"), encoding="utf-8")
    (out / PAGE).write_text(reproductions(found), encoding="utf-8")


def reproductions(found: Mapping[str, Sequence[Finding]]) -> str:
    """The page: a script for each finding that its script confirms."""
    parts = [PAGE_HEAD]
    for finding in (finding for own in found.values() for finding in own):
        if finding.reproduction is not None and finding.confirmed:
            parts.append(f"## {finding.name}\n\n```python\n{finding.reproduction.script}```\n")
    return "\n".join(parts)


def markdown(runs: Mapping[str, Sequence[Result]], found: Mapping[str, Sequence[Finding]]) -> str:
    """The text of reports/peers.md, but for the bench."""
    parts = [
        HEAD.format(versions=", ".join(versions())), "## Matrix\n\n", matrix.table(runs),
        "\n\n![The share of wrong cases](peers.png)", POLICIES, policies.table(policies.policies(runs)),
        "\n\n## Findings\n\n",
    ]  # fmt: skip
    return "".join(parts) + "\n".join(section(peer, own) for peer, own in found.items())


def versions() -> list[str]:
    """The peers' packages and torch, with their versions."""
    return [f"{name} {_version(name)}" for name in PACKAGES]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def section(peer: str, own: Sequence[Finding]) -> str:
    """One peer's findings: those confirmed as a table, then the others with what their scripts said."""
    shown = [finding for finding in own if finding.confirmed]
    table = pd.DataFrame(map(_row, shown)).to_markdown(index=False) if shown else "Nothing found."
    rest = "".join(_unconfirmed(finding) for finding in own if not finding.confirmed)
    return f"### {peer}\n\n{table}\n" + (f"\nNot confirmed, so not counted:\n\n{rest}" if rest else "")


def _unconfirmed(finding: Finding) -> str:
    said = finding.reproduction.said if finding.reproduction else "no script"
    return f"- {finding.cause}, `{finding.smallest.id}`: {said}\n"


def _row(finding: Finding) -> dict[str, str]:
    smallest = finding.smallest
    judgement = smallest.judgement
    claim = judgement.claim
    if claim is None:
        numbers = judgement.message.replace("|", "/").replace("\n", " ")[:160]
    elif claim.got:
        numbers = f"{claim.want} / {claim.got}"
    else:
        numbers = f"RMS error at most {claim.budget} / {claim.error}"
    return {
        "cause": finding.cause,
        "diagnosed cases": str(len(finding.results)),
        "on": ", ".join(sorted({_where(result) for result in finding.results})),
        "smallest case": f"`{smallest.id}`",
        "expected / got": numbers,
        "reproduction": f"[{finding.name}]({PAGE}#{finding.name})",
    }


def _where(result: Result) -> str:
    body = result.case.body
    assert isinstance(body, RuntimeCase)
    return f"{'+'.join(sorted({adapter.kind for adapter in body.adapters}))} {body.layer.kind}"
