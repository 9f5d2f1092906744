"""The gate: what it flags on made timings, what memory and conformance say, what it writes."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fulldiff.harness.gate import report as gate_report
from fulldiff.harness.gate.baseline import accept, accepted_bytes
from fulldiff.harness.gate.launches import Figures, figure
from fulldiff.harness.gate.run import ORDER, Measure, Report, compare_stored, gate
from fulldiff.harness.gate.sides import GateError
from fulldiff.harness.gate.stats import BLOCKS, Block, Verdict, estimate, verdicts
from fulldiff.harness.protocol import Judgement, Outcome
from fulldiff.harness.results import Cell, Store

SESSIONS = 500
DRIFT = 0.03
CELLS = ("changed", "other", "third")


def machine(chance: random.Random, change: float, noise: float) -> Measure:
    """Launches on a machine that drifts slowly, each with a noise of its own; the head's first cell is ``change``
    slower. The drift is in the figure too, as if the bare layer took off none of it."""
    phase, launched = chance.random() * 6, [0]

    def measure(label: str, place: str, names: Sequence[str]) -> dict[str, Figures]:
        launched[0] += 1
        slow = 1.5 * (1 + DRIFT * math.sin(phase + 3 * launched[0] / (4 * BLOCKS)))
        heads = {"changed": 1 + change if place == "head" else 1.0}
        return {
            name: Figures("passed", "", 1e-3, slow * heads.get(name, 1.0) * math.exp(chance.gauss(0, noise)), 64)
            for name in names
        }

    return measure


def made(chance: random.Random, change: float, noise: float) -> list[Block]:
    """The blocks of one cell."""
    measure = machine(chance, change, noise)
    times = [[figure(measure("", place, ["changed"])["changed"]) for place in ORDER] for _ in range(BLOCKS)]
    return [(a, b, c, d) for a, b, c, d in times]


def session(chance: random.Random, change: float, noise: float) -> dict[str, Verdict]:
    """The verdicts of a whole gate on such a machine."""
    return gate(CELLS, machine(chance, change, noise)).verdicts


def shares(change: float, noise: float, sessions: int = SESSIONS) -> Counter[str]:
    """Verdicts on the changed cell, over many sessions."""
    chance = random.Random(f"{change} {noise}")
    return Counter(session(chance, change, noise)["changed"] for _ in range(sessions))


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02])
def test_the_same_code_is_hardly_ever_flagged(noise: float) -> None:
    chance = random.Random(7)
    flagged = sum("REGRESSED" in session(chance, 0.0, noise).values() for _ in range(SESSIONS))
    assert flagged <= 0.01 * SESSIONS


@pytest.mark.parametrize("noise", [0.005, 0.01])
def test_five_percent_slower_is_found(noise: float) -> None:
    assert shares(0.05, noise)["REGRESSED"] >= 0.95 * SESSIONS


def test_five_percent_slower_is_never_green_where_it_is_noisy() -> None:
    found = shares(0.05, 0.02)
    assert found["EQUIVALENT"] + found["IMPROVED"] == 0
    assert found["REGRESSED"] > 0


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02])
def test_ten_percent_slower_is_always_found(noise: float) -> None:
    assert shares(0.10, noise) == {"REGRESSED": SESSIONS}


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02])
def test_two_percent_is_within_the_margin(noise: float) -> None:
    assert shares(0.02, noise)["REGRESSED"] <= 0.05 * SESSIONS


def test_six_percent_faster_is_improved() -> None:
    assert shares(-0.06, 0.005)["IMPROVED"] >= 0.95 * SESSIONS


def test_a_noisy_machine_is_unfit() -> None:
    assert shares(0.0, 0.05, 50)["UNFIT"] == 50


def test_holm_asks_more_of_one_cell_among_many() -> None:
    chance = random.Random(3)
    alone = {"a": estimate(made(chance, 0.045, 0.01))}
    while verdicts(alone)["a"] != "REGRESSED" or alone["a"].p < 0.002:
        alone = {"a": estimate(made(chance, 0.045, 0.01))}
    others = {f"b{at}": estimate(made(chance, 0.0, 0.005)) for at in range(20)}
    assert verdicts(alone | others)["a"] == "INCONCLUSIVE"


def test_an_unconfirmed_regression_is_inconclusive() -> None:
    blocks = {"a": made(random.Random(1), 0.2, 0.005)}
    assert Report(blocks=blocks).verdicts == {"a": "REGRESSED"}
    report = Report(blocks=blocks, confirmed={"a": False})
    assert report.verdicts == {"a": "INCONCLUSIVE"}
    assert report.exit_code == 4


def _report(**more: object) -> Report:
    return Report(blocks={"a": made(random.Random(1), 0.0, 0.002)}, **more)  # type: ignore[arg-type]


def test_memory_gates_to_the_byte_unless_a_person_accepted_it(tmp_path: Path) -> None:
    grown = _report(peak_bytes={"a": (1000, 1001)})
    assert grown.exit_code == 3
    assert "1,000 bytes before, 1,001 now (+1)" in gate_report.markdown(grown)
    accept(tmp_path, "a", 1001, "a table of its own")
    assert _report(peak_bytes={"a": (1000, 1001)}, accepted=accepted_bytes(tmp_path)).exit_code == 0
    assert _report(peak_bytes={"a": (1000, 1002)}, accepted=accepted_bytes(tmp_path)).exit_code == 3
    assert _report(peak_bytes={"a": (1000, 999)}).exit_code == 4


def test_an_accepted_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "accepted.jsonl").write_text('{"cell": "a"}\n')
    with pytest.raises(GateError, match=r"accepted\.jsonl.*each line needs cell, peak_bytes and reason"):
        accepted_bytes(tmp_path)


def test_what_became_wrong_fails_before_all_else() -> None:
    report = _report(peak_bytes={"a": (1, 2)}, worse={"d1-low-rank": "passed before, wrong now"})
    assert report.exit_code == 1
    text = gate_report.markdown(report)
    assert "FAILED: conformance" in text
    assert "d1-low-rank: passed before, wrong now" in text


def test_a_comment_names_the_first_of_many_and_the_files_all() -> None:
    report = _report(peak_bytes={"a": (8, 8)}, worse={f"case {at}": "passed before, wrong now" for at in range(30)})
    text = gate_report.markdown(report)
    assert "case 19: passed" in text
    assert "case 20: passed" not in text
    assert "10 more" in text
    assert 'failures="30"' in gate_report.junit(report)


def test_junit_and_json_say_the_same() -> None:
    report = _report(peak_bytes={"a": (10, 20)}, worse={"case": "passed before, lost now"})
    suite = ElementTree.fromstring(gate_report.junit(report))
    assert suite.get("failures") == "2"
    assert [case.get("name") for case in suite] == ["a", "case"]
    found = json.loads(gate_report.text_of(report, "json"))
    assert found["exit_code"] == 1
    assert found["cells"]["a"]["verdict"] == "EQUIVALENT"


def test_stored_files_gate_on_bytes_and_lost_cells_only(tmp_path: Path) -> None:
    for name, count in (("base", 100), ("head", 150)):
        store = Store(tmp_path / f"{name}.jsonl")
        store.add(Cell("same", "cpu", {}, {"w": [1.0]}, {"w": count}, {"w": Judgement("passed")}))
        if name == "base":
            store.add(Cell("gone", "cpu", {}, {"w": [1.0]}, {"w": 1}, {}))
        store.close()
    report = compare_stored(tmp_path / "base.jsonl", tmp_path / "head.jsonl")
    assert report.changed_bytes == {"same w": (100, 150)}
    assert report.worse == {"gone w": "measured before, lost now"}
    assert not report.estimates


@pytest.mark.parametrize(
    ("base", "head", "code", "where", "words"),
    [
        ("passed", "crashed", 1, "worse", "passed before, crashed now"),
        ("passed", "out of memory", 1, "worse", "passed before, out of memory now"),
        ("passed", "unsupported", 1, "worse", "passed before, unsupported now"),
        ("raised", "raised", 1, "worse", "planned, but not measured: raised before, raised now"),
        ("unsupported", "unsupported", 4, "left_out", "unsupported before, unsupported now"),
        ("crashed", "passed", 4, "left_out", "crashed before, passed now"),
    ],
)
def test_a_planned_cell_that_was_not_measured_fails_unless_there_is_nothing_to_compare(
    base: Outcome, head: Outcome, code: int, where: str, words: str
) -> None:
    def measure(label: str, place: str, names: Sequence[str]) -> dict[str, Figures]:
        outcome = base if place == "base" else head
        return {name: Figures(outcome, "", float(outcome == "passed"), 1.0) for name in names}

    report = gate(["a"], measure)
    assert getattr(report, where) == {"a": words}
    assert report.exit_code == code
    assert words in gate_report.markdown(report)
    also = gate(["a", "b"], lambda *at: measure(*at) | {"b": Figures("passed", "", 1.0, 1.0)})
    assert also.exit_code == (1 if code == 1 else 0)
    assert set(also.blocks) == {"b"}


def test_that_both_sides_load_the_same_code_is_said() -> None:
    assert "load the same code" in gate_report.markdown(Report(cases=1, same_code=True))
    assert "load the same code" not in gate_report.markdown(Report(cases=1))


def test_a_wrong_output_in_the_timed_calls_fails() -> None:
    report = gate(["a"], lambda _, place, names: {"a": Figures("wrong" if place == "head" else "passed", "", 1.0, 1.0)})
    assert report.worse == {"a": "passed before, wrong now"}


def test_a_gate_without_cells_or_cases_is_not_ok() -> None:
    assert Report().exit_code == 4
