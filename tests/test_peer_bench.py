"""The peers' bench: every way on the same workloads, and a verdict that names where ours is slower or bigger."""

from __future__ import annotations

from fulldiff.cases.model import BenchCase, case_id
from fulldiff.harness.bench import numbers
from fulldiff.harness.peers import bench
from fulldiff.harness.results import Cell
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER, OURS, PEERS


def cell(name: str, times: dict[str, float], extra: dict[str, int]) -> Cell:
    """Four even samples of each way, in the bare layer's time, and the bytes beyond its own 1000."""
    ways = {NO_ADAPTER: 1.0, AGAIN: 1.0} | times
    seconds = {way: [t, t * 1.01, t * 0.99, t] for way, t in ways.items()}
    peaks = {way: 1000 + extra.get(way, 0) for way in ways}
    labels = {"layer": name, "tokens": 77, "dtype": "f32", "form": "rank 16"}
    return Cell(name, "cpu", labels, seconds, peaks, {}, dict.fromkeys(ways, 0))


def test_every_workload_has_ours_the_peers_and_the_bare_layer_twice() -> None:
    plan = list(bench.planned())
    assert len({case_id(workload.case) for workload in plan}) == len(plan) > 20
    for workload in plan:
        assert isinstance(workload.case.body, BenchCase)
        assert workload.case.body.ways == bench.WAYS
    assert {*bench.OURS, *bench.THEIRS} <= (OURS | PEERS).keys()
    assert {NO_ADAPTER, AGAIN} <= set(bench.WAYS)


def test_the_verdict_names_where_ours_is_slower_or_bigger() -> None:
    small = cell(
        "small", {"runtime-lokr": 1.5, "peft": 1.2, "lycoris": 3}, {"runtime-lokr": 5, "lycoris": 4, "peft": 9}
    )
    large = cell(
        "large", {"runtime-lokr": 1.1, "peft": 2.0, "lycoris": 3}, {"runtime-lokr": 5, "lycoris": 9, "peft": 9}
    )
    peft, lycoris, bypass = bench.verdict(numbers.frame([small, large])).splitlines()[-3:]
    assert "slower on 1 of 2 (small, 77 tokens, f32, rank 16); nowhere bigger" in peft
    assert "median ratio 1.300 against 1.600" in peft
    assert "nowhere slower; bigger on 1 of 2 (small" in lycoris
    assert bypass == "- lycoris-bypass: not measured."


def test_the_summary_has_a_row_per_form_dtype_and_way() -> None:
    found = [cell(name, {"runtime-lokr": t, "peft": 2}, {"peft": 2**20}) for name, t in (("a", 1.2), ("b", 1.4))]
    rows = [
        [part.strip() for part in line.split("|")[1:-1]] for line in bench.summary(numbers.frame(found)).splitlines()
    ]
    assert [row[2] for row in rows[2:]] == ["runtime-lokr", "peft"]
    assert rows[2][3:5] == ["1.300", "1.400"]
    assert rows[3][5:] == ["1.000", "1.000"]
