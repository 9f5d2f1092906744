"""The subject ``program:COMMAND``: a program of any language is judged, found wrong, and may die."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.factors import lokr, lora
from fulldiff.cases.model import Alpha, Case, Input, Layer, RuntimeCase
from fulldiff.cases.restores import named_restores
from fulldiff.harness.manager import Worker

HERE = Path(__file__).parent
LINEAR = Layer("linear", 12, 6)
LORA = lora(12, 6, 2, alpha=Alpha("0d", 1.0), strength=0.5)
SCALED = Case(RuntimeCase(LINEAR, (LORA, LORA), Input((3, 6)), "f32"), 1)


def program(wrong: str = "", script: Path = HERE / "lora_program.py") -> str:
    return f"program:{shlex.join([sys.executable, str(script), *filter(None, [wrong])])}"


@pytest.fixture(scope="module")
def worker():  # type: ignore[no-untyped-def]
    with Worker() as running:
        yield running


def test_a_program_is_judged_by_what_it_writes(worker: Worker) -> None:
    assert worker.judge(SCALED, program()).outcome == "passed"
    found = worker.judge(SCALED, program("unscaled"))
    assert found.outcome == "wrong"
    assert found.claim is not None


def test_a_program_says_what_it_does_not_do(worker: Worker) -> None:
    found = worker.judge(Case(RuntimeCase(LINEAR, (lokr((3, 2), (4, 3)),), Input((3, 6)), "f32"), 1), program())
    assert (found.outcome, found.message) == ("unsupported", "only LoRA on Linear")


def test_a_program_that_dies_is_a_crash_with_its_signal_and_the_run_goes_on() -> None:
    with Worker() as running:
        found = running.judge(SCALED, program("dies"))
        assert found.outcome == "crashed"
        assert "SIGSEGV" in found.message
        assert running.judge(SCALED, program()).outcome == "passed"


def test_every_named_case_of_a_program_ends(worker: Worker) -> None:
    names = [name for name in CATALOGUE if ("lora" in name and "f32" in name) or name.startswith("d7")]
    outcomes = {worker.judge(CATALOGUE[name], program()).outcome for name in names}
    assert outcomes == {"passed", "unsupported"}


def test_a_program_leaves_the_base_as_it_was(worker: Worker) -> None:
    case = named_restores()["restore-loras-first-first-f32"]
    assert worker.judge(case, program()).outcome == "passed"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("print('hello')", "one JSON object a line"),
        ("print('{}')", "its first line is not"),
        ("", "ended at once"),
        ('print(\'{"fulldiff": 1, "policy": "mine"}\')', "policy 'mine' is unknown: use one of default, comfyui"),
    ],
)
def test_what_is_no_such_program_is_absent_and_says_why(worker: Worker, tmp_path: Path, text: str, says: str) -> None:
    script = tmp_path / "other.py"
    script.write_text(text)
    found = worker.judge(SCALED, program(script=script))
    assert found.outcome == "absent"
    assert says in found.message


def test_a_command_that_is_not_there_is_absent(worker: Worker) -> None:
    found = worker.judge(SCALED, "program:no-such-command")
    assert found.outcome == "absent"
    assert "no-such-command" in found.message


def test_a_program_built_anew_is_another_subject(worker: Worker, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text((HERE / "lora_program.py").read_text())
    before = worker.code(program(script=script))
    script.write_text(script.read_text() + "# built anew\n")
    with Worker() as other:
        assert before != other.code(program(script=script))
