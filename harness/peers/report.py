"""The report on peers: what their conform runs found, by kind and layer, and why each wrong result is wrong.

A function of the result lines and the installed peer, which diagnosis runs again on its wrong cases.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd

from fulldiff.cases.model import SPATIAL_DIMS, RuntimeCase
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Diagnose, Diagnosis
from fulldiff.harness.results import Result, read
from fulldiff.harness.search import diagnosis as failure
from fulldiff.harness.search import size

PACKAGES = ("peft", "lycoris-lora", "torch")
WRONG = ("wrong", "not finite")
RIGHT, UNTAKEN = ("passed",), ("refused", "unsupported", "absent")
# Of each failure (outcome, forms, layer) so many results are diagnosed; more tell nothing new.
PER_FAILURE = 4

HEAD = """# Peers

What shipped implementations do with the cases of the runtime suite: y = (W + ΔW) x against the full diff in
float64. A cell says how many cases were right, wrong (the output differs by more than rounding explains),
failed (raised or crashed) and left out (no parameters or loader for that form). Wrong results are diagnosed:
every known fault of the reference, singly and in pairs, is run on the same case, and the one that gives the
peer's numbers is named. Written by `fulldiff peers` from the lines of `fulldiff conform --subject PEER`.

Versions: {versions}.

"""


@dataclass(frozen=True)
class Finding:
    """Results of one peer that one cause explains, and the smallest of them."""

    peer: str
    cause: str
    results: tuple[Result, ...]

    @property
    def smallest(self) -> Result:
        return min(self.results, key=lambda result: size(result.case))


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
        diagnosed[result.id] = (result, diagnosed_by(worker, peer, result, pairs=False))
        progress()
    raised: dict[str, list[Result]] = defaultdict(list)
    for result in bad:
        if result.judgement.outcome not in WRONG:
            raised[failure(result)].append(result)
    made = explained(peer, list(diagnosed.values()), lambda result: diagnosed_by(worker, peer, result, pairs=True))
    return made + [Finding(peer, cause, tuple(own)) for cause, own in raised.items()]


def sample(wrong: Sequence[Result]) -> list[Result]:
    """The smallest few results of each failure."""
    by_failure: dict[str, list[Result]] = defaultdict(list)
    for result in sorted(wrong, key=lambda result: size(result.case)):
        by_failure[failure(result)].append(result)
    return [result for own in by_failure.values() for result in own[:PER_FAILURE]]


def diagnosed_by(worker: Worker, peer: str, result: Result, pairs: bool) -> Diagnosis:
    """The diagnosis of one result; unknown where the peer does not compute it again."""
    answer = worker.ask(Diagnose(result.case, peer, pairs))
    return answer.diagnosis or Diagnosis(partly=answer.judgement.message if answer.judgement else "")


def explained(
    peer: str, diagnosed: list[tuple[Result, Diagnosis]], closer: Callable[[Result], Diagnosis]
) -> list[Finding]:
    """Group by cause; of the faults that equal a result, those that explain the most results are named.

    What no single fault explains is looked at ``closer``, on the smallest of its results.
    """
    made, left = [], diagnosed
    while counts := Counter(name for _, found in left for name in found.equals):
        cause, most = counts.most_common(1)[0]
        same = tuple(result for result, found in left if cause in found.equals)
        common = set.intersection(*(set(found.equals) for _, found in left if cause in found.equals))
        causes = " or ".join(name for name in counts if counts[name] == most and name in common)
        made.append(Finding(peer, f"equals: {causes}", same))
        left = [(result, found) for result, found in left if cause not in found.equals]
    unknown: dict[str, list[Result]] = defaultdict(list)
    for result, _ in left:
        unknown[failure(result)].append(result)
    for own in unknown.values():
        smallest = min(own, key=lambda result: size(result.case))
        made.append(Finding(peer, str(closer(smallest)), tuple(own)))
    return made


def markdown(runs: Mapping[str, Sequence[Result]], found: Mapping[str, Sequence[Finding]]) -> str:
    """The text of reports/peers.md."""
    parts = [HEAD.format(versions=", ".join(versions())), "## Matrix\n\n", matrix(runs), "\n\n## Findings\n\n"]
    return "".join(parts) + "\n".join(_section(peer, own) for peer, own in found.items())


def versions() -> list[str]:
    """The peers' packages and torch, with their versions."""
    return [f"{name} {_version(name)}" for name in PACKAGES]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def matrix(runs: Mapping[str, Sequence[Result]]) -> str:
    """Implementation and kind × layer; a case with adapters of several kinds is in none of the rows."""
    cells: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for peer, results in runs.items():
        for result in results:
            body = result.case.body
            kinds = {adapter.kind for adapter in body.adapters} if isinstance(body, RuntimeCase) else set()
            if isinstance(body, RuntimeCase) and len(kinds) == 1:
                cells[peer, kinds.pop(), body.layer.kind][_class(result)] += 1
    rows = dict.fromkeys((peer, kind) for peer, kind, _ in cells)
    frame = pd.DataFrame(
        {"implementation": peer, "kind": kind} | {layer: _cell(cells[peer, kind, layer]) for layer in SPATIAL_DIMS}
        for peer, kind in rows
    )
    return str(frame.to_markdown(index=False))


def _class(result: Result) -> str:
    outcome = result.judgement.outcome
    known = {"passed": "right"} | dict.fromkeys(WRONG, "wrong") | dict.fromkeys(UNTAKEN, "left out")
    return known.get(outcome, "failed")


def _cell(counts: Counter[str]) -> str:
    shown = [f"{counts[name]} {name}" for name in ("right", "wrong", "failed", "left out") if counts[name]]
    text = ", ".join(shown) or "–"
    return f"**{text}**" if counts["wrong"] or counts["failed"] else text


def _section(peer: str, own: Sequence[Finding]) -> str:
    if not own:
        return f"### {peer}\n\nNothing found.\n"
    frame = pd.DataFrame(_row(finding) for finding in own)
    return f"### {peer}\n\n{frame.to_markdown(index=False)}\n"


def _row(finding: Finding) -> dict[str, str]:
    smallest = finding.smallest
    judgement = smallest.judgement
    claim = judgement.claim
    numbers = f"{claim.want} / {claim.got}" if claim else judgement.message.replace("|", "/").replace("\n", " ")[:160]
    return {
        "cause": finding.cause,
        "diagnosed cases": str(len(finding.results)),
        "on": ", ".join(sorted({_where(result) for result in finding.results})),
        "smallest case": f"`{smallest.id}`",
        "expected / got": numbers,
    }


def _where(result: Result) -> str:
    body = result.case.body
    assert isinstance(body, RuntimeCase)
    return f"{'+'.join(sorted({adapter.kind for adapter in body.adapters}))} {body.layer.kind}"
