"""Loaders under test: ours agree with the naive one, known wrong ones are flagged, what they do is counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from typer.testing import CliRunner

from fulldiff.cases.load_names import base_names
from fulldiff.cases.load_sets import HEAVY_LOADS, SETS, lora_file, named_load_cases, rows_of, set_case
from fulldiff.cases.load_strategies import load_cases
from fulldiff.cases.model import Case, CaseError, LoadCase, Model, decode, encode
from fulldiff.harness.bench import load as bench_load
from fulldiff.harness.cli.main import app
from fulldiff.harness.load import worker as load_worker
from fulldiff.harness.load.judge import judge
from fulldiff.harness.manager import Worker
from fulldiff.harness.subjects.loaders.faults import FAULTS, MapGrown
from fulldiff.harness.subjects.loaders.indexed import SUFFIXES, Indexed, split
from fulldiff.harness.subjects.loaders.names import LOADERS
from fulldiff.harness.subjects.loaders.scanning import Naive
from fulldiff.harness.subjects.registry import SubjectError, subject_of
from fulldiff.reference.load import REJECTIONS, File

LIGHT = {name: case for name, case in named_load_cases().items() if name not in HEAVY_LOADS}


def outcome(case: Case, loader: Any) -> Any:
    return judge(case, loader, lambda stage: None)


def search(check: Callable[[Case], None], examples: int) -> None:
    """Run ``check`` on drawn cases, the same in every run."""
    chosen = settings(
        max_examples=examples, deadline=None, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    seed(3)(chosen(given(load_cases())(check)))()


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("loader", LOADERS)
def test_named_cases_pass(loader: str, name: str) -> None:
    judgement = outcome(LIGHT[name], subject_of("load", loader))
    assert judgement.outcome == "passed", judgement


@pytest.mark.parametrize("loader", ["hoisted", "referential", "referential-forced", "indexed"])
def test_drawn_sets_pass(loader: str) -> None:
    chosen = subject_of("load", loader)

    def check(case: Case) -> None:
        judgement = outcome(case, chosen)
        assert judgement.outcome == "passed", judgement

    search(check, 40)


class Flagged(Exception):
    pass


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_flagged_by_one_case_alone(fault: str) -> None:
    """A new loader for every case: what it remembers must show within the case, or no replay would show it."""

    def check(case: Case) -> None:
        MapGrown.grown.clear()
        if outcome(case, subject_of("load", f"fault:{fault}")).outcome != "passed":
            raise Flagged

    with pytest.raises(Flagged):
        for case in LIGHT.values():
            check(case)
        search(check, 300)


def test_drawn_sets_hold_what_loaders_get_wrong() -> None:
    seen: set[str] = set()

    def check(case: Case) -> None:
        assert isinstance(case.body, LoadCase)
        assert decode(encode(case)) == case
        files = case.body.files
        seen.add(f"{len(files)} files")
        seen.update(f"strength {file.strength:g}" for file in files)
        seen.update(adapter.kind for file in files for adapter in file.modules.values())
        seen.update(adapter.spelling for file in files for adapter in file.modules.values())
        seen.add("again") if len({(f.spelling, encode_modules(f)) for f in files}) < len(files) else None

    def encode_modules(file: Any) -> str:
        return str(sorted(file.modules))

    search(check, 1000)
    assert {"1 files", "8 files", "again", "strength 0", "strength -0.5", "lokr", "glora", "w_norm", "peft"} <= seen


def test_an_unknown_rejection_policy_is_a_clear_error() -> None:
    case = Case(LoadCase(Model("sdxl", layers=("unet.conv_out",), shrink=160), (), "sometimes"))
    with pytest.raises(CaseError, match="rejection = 'sometimes': use one of 12-tensors, half, never"):
        outcome(case, Naive())


# Operations


def test_the_naive_loader_tries_every_name_with_every_suffix() -> None:
    """Two suffixes fewer for each module of the file: the first of five spellings is there, down and mid follow."""
    counted = counters(8, "naive")
    assert counted == {"names": 6970 + 603, "lookups": 21 * (6970 + 603) - 2 * 986}


def test_what_each_change_saves() -> None:
    assert counters(4, "naive") == counters(4, "hoisted")
    # The whole UNet map and the encoders' once; then the 788 names that are known, twice.
    assert counters(4, "referential")["names"] == 6970 + 2 * 788
    # Text-encoder keys are left over after every UNet pass, so its map is tried whole for each file.
    assert counters(6, "referential")["names"] == 2 * 6970 + 788 + 603
    # One key of the file, one look into the index.
    assert counters(8, "indexed") == {"names": 2958, "lookups": 0}
    assert counters(8, "referential") == counters(8, "naive")


def counters(number: int, loader: str) -> dict[str, int]:
    body = set_case(number).body
    assert isinstance(body, LoadCase)
    return load_worker._counted(body, subject_of("load", loader))


def test_the_sets_have_the_seed_s_counts() -> None:
    modules = {kind: len(rows_of(kind)) for files in SETS.values() for kind in files}
    assert modules == {"DMD2": 788, "unet": 788, "tiny": 4, "SD1.5": 264, "full": 722 + 264}


@pytest.mark.parametrize("name", ["lora_unet_a_b", "unet.a.lora", "a.b_lora", "diffusion_model.a.weight", ""])
def test_a_key_is_split_into_the_name_and_suffix_it_was_made_of(name: str) -> None:
    for suffix in SUFFIXES:
        found = split(name + suffix)
        assert found is not None
        assert found[0] + found[1] == name + suffix
        assert found[1] in SUFFIXES
    assert split(f"{name}.weight") is None
    assert split("") is None


def test_an_index_lives_as_long_as_its_base() -> None:
    loader, base = Indexed(), base_names(Model("sdxl", layers=("unet.conv_out",)))
    loader.load(base, [File("a", {"conv_out.diff": 1})], REJECTIONS["never"])
    assert list(loader.indexes[base].seen) == ["conv_out.diff"]
    del base
    assert not loader.indexes


# From outside, from the command line


class Lazy(Naive):
    """Someone's loader that forgets every second file."""

    def load(self, base: Any, files: Any, rejection: Any) -> Any:
        return super().load(base, files[::2], rejection)


def test_a_loader_from_outside_is_judged_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with Worker() as worker:
        judgement = worker.judge(LIGHT["load-strengths"], "test_loaders:Lazy")
        assert judgement.outcome == "wrong"
        assert judgement.claim is not None
        assert judgement.claim.name == "another model: one fate a file"
        assert worker.judge(LIGHT["load-one-file"], "test_loaders:Lazy").outcome == "passed"
        assert worker.judge(LIGHT["load-one-file"], "full-diff").outcome == "absent"


def test_a_runtime_subject_is_no_loader() -> None:
    with pytest.raises(SubjectError, match="FullDiff is not a fulldiff Loader"):
        subject_of("load", "fulldiff.harness.subjects.full_diff:FullDiff")
    with pytest.raises(SubjectError, match="no fault 'none' of loading: use one of known-set"):
        subject_of("load", "fault:none")


def test_load_says_what_each_file_did(tmp_path: Path) -> None:
    rows = [row for row in rows_of("full") if row.name.endswith("layers.0.self_attn.q_proj")]
    right = bench_load.write(tmp_path / "right.safetensors", lora_file(rows, False, rank=2))
    wrong = bench_load.write(tmp_path / "wrong.safetensors", lora_file(rows_of("SD1.5")[:9], False, rank=1))
    run = CliRunner().invoke(app, ["load", str(right), "--model", "sdxl", "--strength", "0.5", "--threads", "1"])
    assert run.exit_code == 0, run.output
    lines = [line.split() for line in run.output.splitlines()]
    assert ["right.safetensors", "text_encoder", "3", "1", "lora", "0.5"] in lines
    assert ["right.safetensors", "text_encoder_2", "3", "1", "lora", "0.5"] in lines
    run = CliRunner().invoke(app, ["load", str(right), str(wrong), "--model", "sdxl", "--threads", "1"])
    assert run.exit_code == 2
    assert f"REJECTED {wrong}: 27 of 27 tensors match nothing of sdxl" in run.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "sdxxl"], "no such layer table"),
        (["--model", "sdxl", *["--strength", "1"] * 2], "2 strengths for 1"),
    ],
)
def test_load_refuses_bad_input_by_name(options: list[str], says: str, tmp_path: Path) -> None:
    path = bench_load.write(tmp_path / "a.safetensors", lora_file(rows_of("tiny"), False))
    command = [sys.executable, "-m", "fulldiff.harness.cli.main", "load", str(path), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert says in run.stdout


def test_the_manager_s_side_needs_no_torch() -> None:
    names = ("suites", "bench.load", "load.files", "bench.load_report")
    code = (
        "; ".join(f"import fulldiff.harness.{name}" for name in names)
        + "; import sys; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
