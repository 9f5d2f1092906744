"""Shards and machines put together: the same report as one run, and what is missing, by name."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.model import CaseError, case_id
from fulldiff.harness import conform as conforming
from fulldiff.harness import together
from fulldiff.harness.bench import run as bench
from fulldiff.harness.bench.plan import Workload
from fulldiff.harness.cli.main import app
from fulldiff.harness.protocol import Judgement
from fulldiff.harness.results import Cell, Environment, Result, Store, read
from fulldiff.harness.shards import Shard, has, shard_of

KNOWN_BUGS = sorted(name for name in CATALOGUE if name.startswith("d"))
# Of each of three shards some.
NAMES = [name for i in (1, 2, 3) for name in [n for n in KNOWN_BUGS if has((i, 3), case_id(CATALOGUE[n]))][:3]]
PROFILE, ONLY_NAMED = conforming.Profile(40, 60, False), conforming.Profile(0, 60, False)
MACHINE = Environment({"torch": "2.13.0"}, "CPU", 2, "Linux")
WAYS = ("no adapter", "no adapter (A/A)", "full-diff", "streamed", "runtime-lokr", "planned")


@pytest.fixture
def few_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conforming, "named_cases", lambda *_: {name: CATALOGUE[name] for name in NAMES})


def _conform(folder: Path, shard: Shard, subject: str = "full-diff", profile: conforming.Profile = PROFILE) -> Path:
    conforming.conform(subject, profile, 1, folder, sys.executable, Console(quiet=True), shard=shard)
    return folder / conforming.file_name(subject, 1, "runtime", shard)


def _results(path: Path) -> list[Result]:
    return [line for line in read(path) if isinstance(line, Result)]


def test_three_shards_run_every_case_once_and_report_as_one_run_does(tmp_path: Path, few_named: None) -> None:
    whole, parts = _conform(tmp_path, (1, 1)), [_conform(tmp_path, (i, 3)) for i in (1, 2, 3)]
    ids = [result.id for path in parts for result in _results(path)]
    assert len(ids) == len(set(ids))
    assert set(ids) == {result.id for result in _results(whole)}
    assert {case_id(CATALOGUE[name]) for name in NAMES} <= set(ids)
    assert all(len(_results(path)) > 5 for path in parts)
    one = together.report([whole], None, tmp_path / "one")
    three = together.report(parts[::-1], None, tmp_path / "three")
    assert not three.failed + three.missing + one.failed + one.missing
    assert (tmp_path / "one" / "conform.md").read_text() == (tmp_path / "three" / "conform.md").read_text()


def test_a_missing_shard_and_its_named_cases_are_named(tmp_path: Path, few_named: None) -> None:
    first, third = (_conform(tmp_path, (i, 3), profile=ONLY_NAMED) for i in (1, 3))
    third.write_bytes(third.read_bytes().replace(b'{"type":"end"}\n', b""))
    found = together.report([first, third], None, tmp_path)
    title = "runtime, full-diff, seed 1: MISSING "
    ran = {result.name for path in (first, third) for result in _results(path)}
    shards = [f"{title}shard {i}/3 is not here or did not end" for i in (2, 3)]
    assert found.missing == shards + [f"{title}named case {name} was not run" for name in NAMES if name not in ran]
    assert 0 < len(found.missing) - len(shards) < len(NAMES)
    assert "MISSING shard 2/3" in (tmp_path / "conform.md").read_text()
    done = CliRunner().invoke(app, ["report", str(first), str(third), "--out", str(tmp_path)])
    assert done.exit_code == 4
    assert found.missing[-1] in done.output


def test_failures_of_any_shard_fail_the_report_unless_they_are_expected(tmp_path: Path, few_named: None) -> None:
    parts = [_conform(tmp_path, (i, 2), "fault:kron-swapped", ONLY_NAMED) for i in (1, 2)]
    bad = [r for path in parts for r in _results(path) if r.judgement.outcome == "wrong"]
    found = together.report(parts, None, tmp_path)
    assert len([line for line in found.failed if "FAILED" in line]) == min(len(bad), together.SHOWN + 1)
    expect = tmp_path / "known.toml"
    entry = '[[expect]]\npattern = "{}"\noutcome = "{}"\nreason = "r"\n'
    expect.write_text(entry.format("runtime/*", "wrong") + entry.format("none-*", "wrong"))
    found = together.report(parts, expect, tmp_path)
    assert found.failed == ["runtime, fault:kron-swapped, seed 1: STALE expectation none-*: matches no case"]


def test_of_two_machines_the_worse_result_counts(tmp_path: Path, few_named: None) -> None:
    path = _conform(tmp_path, (1, 1), profile=ONLY_NAMED)
    lines = list(read(path))
    at = next(i for i, line in enumerate(lines) if isinstance(line, Result))
    lines[at] = structs.replace(lines[at], judgement=Judgement("crashed", message="here"))
    other = Store(tmp_path / "other.jsonl")
    for line in lines:
        other.add(line)
    other.close()
    for order in ([path, other.path], [other.path, path]):
        (failed,) = together.report(order, None, tmp_path).failed
        assert "crashed here" in failed


def _cell(workload: Workload) -> Cell:
    """The workload as if measured: its numbers follow from its id, whichever machine has it."""
    name = case_id(workload.case)
    chance = random.Random(name)
    labels = workload.labels
    if labels["workload"] == "merge":
        return Cell(name, "cpu", labels, {}, {}, {}, {}, {"along": chance.random(), "noise": chance.random()})
    seconds = {way: [1 + chance.random() for _ in range(6)] for way in WAYS}
    sizes = {way: chance.randrange(1 << 20) for way in WAYS}
    return Cell(name, "cpu", labels, seconds, sizes, {"planned": Judgement("passed")}, sizes, {"flop_floor": 1.1})


def _measured(path: Path, plan: Iterator[Workload]) -> Path:
    store = Store.begin(path, MACHINE)
    for workload in plan:
        store.add(_cell(workload))
    store.finish()
    return path


def test_two_halves_of_a_bench_give_the_report_of_one_run(tmp_path: Path) -> None:
    plan = list(bench.planned(bench.Options(), None).values())
    whole = _measured(tmp_path / "whole.jsonl", iter(plan))
    halves = [_measured(tmp_path / f"{i}.jsonl", iter(plan[i::2])) for i in (1, 0)]
    for folder, files in (("one", [whole]), ("two", halves)):
        assert not together.report(files, None, tmp_path / folder).missing
    for name in ("cpu.md", "cpu.csv"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()
    half = together.report(halves[:1], None, tmp_path / "half")
    assert half.missing == [f"bench cpu: {case_id(w.case)} was not measured" for w in plan[::2]]


def test_what_is_missing_is_judged_by_the_full_plan_only_where_a_cell_is_of_it(tmp_path: Path) -> None:
    quick, full = ([*bench.planned(bench.Options(full=full), None).values()] for full in (False, True))
    own = {case_id(w.case) for w in quick}
    extra = next(w for w in full if case_id(w.case) not in own and w.labels["workload"] == "layer")
    path = _measured(tmp_path / "some.jsonl", iter([*quick, extra]))
    missing = together.report([path], None, tmp_path).missing
    assert len(missing) == len({case_id(w.case) for w in full}) - len(quick) - 1
    done = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path)])
    assert done.exit_code == 4
    assert f"and {len(missing) - 30:,} more are missing" in done.output and missing[30] not in done.output
    assert "- `runtime-lokr`, generated and named cases: none run\n" in (tmp_path / "cpu.md").read_text()
    renamed = structs.replace(_cell(quick[0]), id="of another version")
    store = Store(tmp_path / "other.jsonl")
    store.add(MACHINE)
    for cell in (renamed, *map(_cell, quick[1:])):
        store.add(cell)
    store.close()
    missing = together.report([store.path], None, tmp_path).missing
    assert missing == [f"bench cpu: {case_id(quick[0].case)} was not measured"]


def test_of_token_counts_that_the_user_gave_nothing_is_missing(tmp_path: Path) -> None:
    plan = list(bench.planned(bench.Options(tokens=(77, 100)), None).values())
    halves = [_measured(tmp_path / f"{i}.jsonl", iter(plan[i::2])) for i in (1, 0)]
    assert not together.report(halves, None, tmp_path).missing
    text = (tmp_path / "cpu.md").read_text()
    assert "4 layer shapes of sdxl" in text and "as often as each occurs" not in text


def test_files_with_nothing_to_report_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    with pytest.raises(CaseError, match=r"empty\.jsonl: neither a conform run nor cells of a bench"):
        together.report([path], None, tmp_path)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(CaseError, match="write i/n"):
        shard_of(text)
