"""The gate: what it flags on made timings, what memory and conformance say, what it writes."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fulldiff.harness.gate import report as gate_report
from fulldiff.harness.gate.run import GateError, Launches, Report, accept, accepted_bytes, compare_stored, side_of
from fulldiff.harness.gate.stats import BLOCKS, Block, Verdict, estimate, verdicts
from fulldiff.harness.protocol import Judgement
from fulldiff.harness.results import Cell, Store

SESSIONS = 500


def made(chance: random.Random, change: float, noise: float, blocks: int = BLOCKS, drift: float = 0.03) -> list[Block]:
    """Launches of 1 ms with a slow drift over the session, each with its own noise; heads ``change`` slower."""
    total, found, phase = 4 * blocks, [], chance.random() * 6
    for block in range(blocks):
        times = []
        for place in range(4):
            slow = 1 + change if place in (1, 2) else 1.0
            slope = drift * math.sin(phase + 3 * (4 * block + place) / total)
            times.append(1e-3 * slow * (1 + slope) * math.exp(chance.gauss(0, noise)))
        found.append((times[0], times[1], times[2], times[3]))
    return found


def session(chance: random.Random, change: float, noise: float, cells: int = 3) -> list[Verdict]:
    """A whole gate on made timings: undecided cells doubled once, flagged cells confirmed; only cell 0 changes."""
    changes = {f"cell {at}": change if at == 0 else 0.0 for at in range(cells)}
    blocks = {name: made(chance, own, noise) for name, own in changes.items()}
    first = verdicts({name: estimate(own) for name, own in blocks.items()})
    for name, verdict in first.items():
        if verdict in ("INCONCLUSIVE", "UNFIT"):
            blocks[name] += made(chance, changes[name], noise)
    report = Report(blocks=blocks)
    again = [name for name, verdict in report.verdicts.items() if verdict == "REGRESSED"]
    report.confirmed = {name: estimate(made(chance, changes[name], noise)).slower for name in again}
    return list(report.verdicts.values())


def shares(change: float, noise: float, sessions: int = SESSIONS) -> Counter[str]:
    """Verdicts on the changed cell, over many sessions."""
    chance = random.Random(f"{change} {noise}")
    return Counter(session(chance, change, noise)[0] for _ in range(sessions))


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02])
def test_the_same_code_is_hardly_ever_flagged(noise: float) -> None:
    chance = random.Random(7)
    flagged = sum("REGRESSED" in session(chance, 0.0, noise) for _ in range(SESSIONS))
    assert flagged <= 0.01 * SESSIONS


@pytest.mark.parametrize("noise", [0.005, 0.01])
def test_five_percent_slower_is_found(noise: float) -> None:
    assert shares(0.05, noise)["REGRESSED"] >= 0.95 * SESSIONS


def test_five_percent_slower_is_never_green_where_it_is_noisy() -> None:
    found = shares(0.05, 0.02)
    assert found["EQUIVALENT"] + found["IMPROVED"] == 0
    assert found["REGRESSED"] > 0


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02])
def test_ten_percent_slower_is_always_found_or_the_machine_is_unfit(noise: float) -> None:
    found = shares(0.10, noise)
    assert found["REGRESSED"] + (found["UNFIT"] if noise > 0.01 else 0) == SESSIONS, found


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


def test_junit_and_json_say_the_same() -> None:
    report = _report(peak_bytes={"a": (10, 20)}, worse={"case": "passed before, lost now"})
    suite = ElementTree.fromstring(gate_report.junit(report))
    assert suite.get("failures") == "2"
    assert [case.get("name") for case in suite] == ["a", "case"]
    found = json.loads(gate_report.text_of(report, "json"))
    assert found["exit_code"] == 1
    assert found["cells"]["a"]["verdict"] == "EQUIVALENT"


def test_a_killed_gate_goes_on_and_measures_no_launch_twice(tmp_path: Path) -> None:
    path, ran = tmp_path / "gate.jsonl", []

    def launch(name: str) -> dict[str, float]:
        ran.append(name)
        return {"a": 1.0}

    first = Launches(path)
    first.get("one", lambda: launch("one"))
    path.write_text(path.read_text() + '{"launch": "torn')
    again = Launches(path)
    again.get("one", lambda: launch("one"))
    again.get("two", lambda: launch("two"))
    assert ran == ["one", "two"]
    again.finish()
    assert not path.exists()


def test_stored_files_gate_on_bytes_and_lost_cells_only(tmp_path: Path) -> None:
    for name, count in (("base", 100), ("head", 150)):
        store = Store(tmp_path / f"{name}.jsonl")
        store.add(Cell("same", "cpu", {}, {"w": [1.0]}, {"w": count}, {"w": Judgement("passed")}))
        if name == "base":
            store.add(Cell("gone", "cpu", {}, {"w": [1.0]}, {"w": 1}, {}))
        store.close()
    report = compare_stored(tmp_path / "base.jsonl", tmp_path / "head.jsonl", {})
    assert report.changed_bytes == {"same w": (100, 150)}
    assert report.worse == {"gone w": "measured before, lost now"}
    assert not report.estimates


def test_what_is_no_side_is_refused_by_name() -> None:
    with (
        pytest.raises(GateError, match="'no-such-revision' is no folder, subject or git revision"),
        side_of("no-such-revision", "runtime-lokr", "python"),
    ):
        pass
