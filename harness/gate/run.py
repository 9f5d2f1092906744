"""`fulldiff gate`: did this change make it wrong, bigger or slower? Base and head side by side in one go.

Launches alternate base head head base; `gate.stats` compares their times. Bytes are compared exactly, unless
an accepted line names the new number; outcomes case by case. What is decided follows from the launches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fulldiff.cases.model import Case
from fulldiff.harness.conform import expectations, stale
from fulldiff.harness.gate.cells import cells
from fulldiff.harness.gate.conformance import conformance, worse
from fulldiff.harness.gate.launches import Figures, Launches, Measured, figure, launch
from fulldiff.harness.gate.sides import Side, digest
from fulldiff.harness.gate.stats import BLOCKS, Block, Estimate, Verdict, estimate, verdicts
from fulldiff.harness.manager import Worker
from fulldiff.harness.results import Cell, Result, pooled, read
from fulldiff.harness.search import RANKS

Place = Literal["base", "head"]
ORDER: tuple[Place, Place, Place, Place] = ("base", "head", "head", "base")
# (label, which side, cells) → what the launch measured.
Measure = Callable[[str, Place, Sequence[str]], Measured]
UNDECIDED = ("INCONCLUSIVE", "UNFIT")


@dataclass
class Report:
    """What the gate found, cell by cell: bytes as (base, head); what became worse, by case or cell, and how; cells
    ``left_out`` because there is nothing to compare, and why; how many ``cases`` were compared; whether
    both sides load the ``same_code``."""

    blocks: dict[str, list[Block]] = field(default_factory=dict)
    peak_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    worse: dict[str, str] = field(default_factory=dict)
    confirmed: dict[str, bool] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    cases: int = 0
    same_code: bool = False

    @property
    def estimates(self) -> dict[str, Estimate]:
        return {name: estimate(blocks) for name, blocks in self.blocks.items() if len(blocks) > 1}

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The times' verdicts; a regression that its second run did not confirm is inconclusive."""
        found = verdicts(self.estimates)
        for name, again in self.confirmed.items():
            if found[name] == "REGRESSED" and not again:
                found[name] = "INCONCLUSIVE"
        return found

    @property
    def changed_bytes(self) -> dict[str, tuple[int, int]]:
        """Cells whose peak changed and is not accepted."""
        return {n: (a, b) for n, (a, b) in self.peak_bytes.items() if a != b and self.accepted.get(n) != b}

    @property
    def exit_code(self) -> int:
        """The design's table: 1 conformance, 3 regression, 4 unfit, inconclusive or nothing compared, 0 ok."""
        found = set(self.verdicts.values())
        grown = any(head > base for base, head in self.changed_bytes.values())
        if self.worse:
            return 1
        if "REGRESSED" in found or grown:
            return 3
        compared = self.blocks or self.peak_bytes or self.cases
        return 4 if found.intersection(UNDECIDED) or self.changed_bytes or not compared else 0


def gate(names: Sequence[str], measure: Measure, advance: Callable[[], None] = lambda: None) -> Report:
    """Ten blocks, as many again of what is then undecided, and as many of what is flagged, to confirm it."""
    report = Report()
    run(report, names, "run", range(BLOCKS), measure, advance)
    undecided = [name for name, verdict in report.verdicts.items() if verdict in UNDECIDED]
    run(report, undecided, "run", range(BLOCKS, 2 * BLOCKS), measure, advance)
    flagged = [name for name, verdict in report.verdicts.items() if verdict == "REGRESSED"]
    again = Report()
    run(again, flagged, "confirm", range(BLOCKS), measure, advance)
    report.confirmed = {name: name in again.estimates and again.estimates[name].slower for name in flagged}
    report.worse |= again.worse
    return report


def run(
    report: Report, names: Sequence[str], label: str, turns: range, measure: Measure, advance: Callable[[], None]
) -> None:
    """So many A B B A blocks; a launch measures all cells, but for those that failed in an earlier block."""
    for turn in turns:
        left = [name for name in names if name not in report.worse and name not in report.left_out]
        if left:
            four = [measure(f"{label} {turn} place {place}", side, left) for place, side in enumerate(ORDER)]
            for name in left:
                _note(report, name, *(launched[name] for launched in four))
        advance()


def _note(report: Report, name: str, one: Figures, two: Figures, three: Figures, four: Figures) -> None:
    """A block's outcomes and bytes, and its times where all four launches have some."""
    base, head = _worst(one, four), _worst(two, three)
    text = f"{base.outcome} before, {head.outcome} now {head.message or base.message}".rstrip()
    if RANKS[head.outcome] > RANKS[base.outcome]:
        report.worse[name] = text
    elif base.seconds and head.seconds:
        before, now = report.peak_bytes.get(name, (0, 0))
        report.peak_bytes[name] = (max(before, base.peak_bytes), max(now, head.peak_bytes))
        report.blocks.setdefault(name, []).append((figure(one), figure(two), figure(three), figure(four)))
    elif RANKS[head.outcome] <= RANKS["unsupported"]:
        report.left_out[name] = text
    else:
        report.worse[name] = f"planned, but not measured: {text}"


def _worst(one: Figures, other: Figures) -> Figures:
    """Of two launches of the same code the one with the worse outcome, then the larger peak."""
    return max(one, other, key=lambda each: (RANKS[each.outcome], each.peak_bytes))


def compare(
    base: Side, head: Side, most: int, threads: int, expect: Path | None, folder: Path, advance: Callable[[], None]
) -> Report:
    """Both sides on this machine: up to ``most`` cells, then the named cases. A killed one goes on in ``folder``.

    ``expect`` holds the head's known failures, None: those that come with the subject.
    """
    known = expectations(head.subject, expect)
    wanted = cells(head.subject, most)
    codes = base.code(), head.code()
    launches = Launches(folder / f"gate-{digest(base, head, *codes, most, threads)}.jsonl")
    with base.worker(threads) as one, head.worker(threads) as other:

        def next_block() -> None:
            # What one worker forks is alike. (Seen with one a side and the same code: 1.022 [1.015, 1.030].)
            one.stop()
            other.stop()
            advance()

        sides: Mapping[Place, tuple[Side, Worker]] = {"base": (base, one), "head": (head, other)}
        report = gate(list(wanted), measuring(sides, wanted, launches), next_block)
    report.same_code = codes[0] == codes[1] and (base.subject, base.python) == (head.subject, head.python)
    report.cases, worse = conformance(base, head, known)
    report.worse |= worse
    launches.finish()
    return report


def measuring(sides: Mapping[Place, tuple[Side, Worker]], wanted: Mapping[str, Case], launches: Launches) -> Measure:
    """Real launches of the two sides, each written down."""

    def measure(label: str, place: Place, names: Sequence[str]) -> Measured:
        own = {name: wanted[name] for name in names}
        return launches.get(label, names, lambda: launch(*sides[place], own))

    return measure


def compare_stored(base: Path, head: Path, expect: Path | None = None) -> Report:
    """Two stored result files: bytes and outcomes only; times of two runs cannot gate."""
    (before, old), (after, new) = _stored(base), _stored(head)
    subjects = {result.subject for result in after.values()}
    known = [entry for subject in sorted(subjects) for entry in expectations(subject, expect)]
    found = worse(before, after, known) | {name: "measured before, lost now" for name in old if name not in new}
    found |= {f"expectation {line}": "stale" for line in stale(known, list(after.values()))}
    peaks = {name: (old[name], new[name]) for name in old if name in new}
    return Report(peak_bytes=peaks, worse=found, cases=len(before))


def _stored(path: Path) -> tuple[dict[str, Result], dict[str, int]]:
    """Results by subject, backend and case, and peak bytes by cell and way, of a stored result file."""
    lines = list(read(path))
    results = {" ".join(line.key): line for line in lines if isinstance(line, Result)}
    cells = pooled(line for line in lines if isinstance(line, Cell)).values()
    return results, {f"{cell.id} {way}": n for cell in cells for way, n in cell.peak_bytes.items()}
