"""The suite ``join``: drawn joins pass, each wrong join is flagged, PEFT's joins are what the report says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import nn

from fulldiff.cases.joins import join_cases, named_joins
from fulldiff.cases.model import AdapterFile, Case, CaseError, JoinCase, Model, decode, encode
from fulldiff.harness.bench.join import PEERS, PEFT_JOIN, pair
from fulldiff.harness.join.effect import effect
from fulldiff.harness.join.judge import judge
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Effect, Judgement
from fulldiff.harness.subjects.base import Unsupported
from fulldiff.harness.subjects.joined_model import MARK
from fulldiff.harness.subjects.joiner import Joiner, Ljl, Running
from fulldiff.harness.subjects.registry import SubjectError, subject_of
from fulldiff.reference.faults.joins import JOIN_FAULTS

DRAWN = 14


@cache
def drawn(values: str, count: int) -> tuple[Case, ...]:
    found: list[Case] = []

    @seed(7)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(join_cases((values,)))  # type: ignore[arg-type]
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return tuple(found)


def judged(case: Case, joiner: Joiner) -> Judgement:
    return judge(case, joiner, lambda stage: None)


@pytest.mark.parametrize("values", ["exact", "normal"])
def test_drawn_joins_are_right(values: str) -> None:
    cases = drawn(values, DRAWN)
    outcomes = [judged(case, Ljl()) for case in cases]
    assert Counter(j.outcome for j in outcomes) == {"passed": len(cases)}
    if values == "exact":
        assert {j.used for j in outcomes} == {0.0}


def test_draws_are_of_many_kinds() -> None:
    bodies = [case.body for case in drawn("exact", 100)]
    seen: Counter[str] = Counter()
    for body in bodies:
        assert isinstance(body, JoinCase)
        seen.update({file.spelling for file in body.files})
        seen.update({"mid" for f in body.files for a in f.modules.values() if "lora_mid.weight" in a.factors})
        seen.update({"tokens only" for f in body.files if not f.modules})
        seen.update({"text" for f in body.files for name in f.modules if name.startswith("text")})
        seen.update({"per rank" for _ in body.files if body.diagonal and len(body.diagonal) != len(body.files)})
        seen.update({"negative" for weight in body.weights if weight < 0})
    wanted = {
        "kohya",
        "lycoris",
        "diffusers",
        "peft",
        "cloneofsimo",
        "mid",
        "tokens only",
        "text",
        "per rank",
        "negative",
    }
    assert wanted <= seen.keys()
    assert min(seen[kind] for kind in wanted) >= 3


@pytest.mark.parametrize("name", named_joins())
def test_named_joins_are_right(name: str) -> None:
    judgement = judged(named_joins()[name], Ljl())
    assert (judgement.outcome, judgement.message) == ("passed", "")


@pytest.mark.parametrize("name", JOIN_FAULTS)
def test_every_wrong_join_is_flagged_by_a_few_exact_cases(name: str) -> None:
    joiner = subject_of("join", f"fault:{name}")
    assert any(judged(case, joiner).outcome == "wrong" for case in drawn("exact", DRAWN))


@pytest.mark.parametrize("name", ["diagonal-of-missing-file", "scale-squared-on-realise", "linear-cross-terms"])
def test_a_wrong_join_is_flagged_with_normal_values_too(name: str) -> None:
    joiner = subject_of("join", f"fault:{name}")
    assert any(judged(case, joiner).outcome == "wrong" for case in drawn("normal", DRAWN))


class OnlyJoins(Ljl):
    """Joins, and cannot be attached."""

    def attach(self, file: Path, layers: object, model: str) -> Running:
        raise Unsupported("no diagonal")


class DropsTokens(Ljl):
    """Leaves the learned tokens out."""

    def join(self, files: Sequence[Path], weights: Sequence[float], model: str, out: Path) -> None:
        from safetensors.torch import load_file, save_file

        super().join(files, weights, model, out)
        save_file({n: t for n, t in load_file(out).items() if not n.startswith("<")}, out)


class Leaves(Ljl):
    """Its layers keep the adapter when it is taken off."""

    def attach(self, file: Path, layers: dict[str, nn.Module], model: str) -> Running:  # type: ignore[override]
        running = super().attach(file, layers, model)
        for module in layers.values():
            del module.__dict__[MARK]
        running.detach = lambda: None  # type: ignore[method-assign]
        return running


@pytest.mark.parametrize(
    ("joiner", "outcome", "says"),
    [
        (OnlyJoins(), "unsupported", "no diagonal"),
        (DropsTokens(), "wrong", "learned tokens are kept"),
        (Leaves(), "wrong", "the layers are as before"),
    ],
)
def test_what_a_joiner_leaves_undone_is_said(joiner: Joiner, outcome: str, says: str) -> None:
    judgement = judged(named_joins()["join/tokens-only"], joiner)
    assert judgement.outcome == outcome
    assert says in (judgement.message or (judgement.claim.name if judgement.claim else ""))


def test_a_worker_judges_joins_and_refuses_unknown_faults() -> None:
    with Worker() as worker:
        assert worker.judge(named_joins()["join/conv-diagonal"], "ljl").outcome == "passed"
        judgement = worker.judge(named_joins()["join/conv-diagonal"], "fault:weight-sign-lost")
    assert judgement.outcome == "passed"
    with pytest.raises(SubjectError, match="no join fault 'none'"):
        subject_of("join", "fault:none")


def test_a_join_case_says_what_is_wrong_with_it() -> None:
    case = named_joins()["join/conv-mid"]
    assert decode(encode(case)) == case
    with pytest.raises(CaseError, match=r"weights = \(1.0,\): 2 files need one each"):
        JoinCase(Model("sd15"), (AdapterFile(), AdapterFile()), (1.0,))
    with pytest.raises(CaseError, match=r"files.strength: a join case gives each file's strength in weights"):
        JoinCase(Model("sd15"), (AdapterFile(strength=0.5),), (1.0,))


def test_the_effect_of_joins_is_told_apart() -> None:
    with torch.no_grad():
        right = effect(Effect(pair(), "ljl"))
        twice = effect(Effect(pair(), "fault:weight-twice"))
    assert right["error"] < 1e-6
    assert right["realised"] < 1e-6
    assert right["multiples"] == pytest.approx([0.7, -0.3], abs=1e-6)
    assert twice["multiples"] == pytest.approx([0.49, 0.09], abs=1e-6)


@pytest.mark.parametrize("name", PEERS)
def test_what_pefts_joins_give(name: str) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    found = effect(Effect(pair(), f"{PEFT_JOIN}{PEERS[name]}"))
    exact = name == "PEFT cat"
    assert (found["error"] < 1e-6) == exact
    if name == "PEFT cat, rsLoRA files":
        assert found["multiples"] == pytest.approx([0.7 * 4, -0.3 * 4], rel=1e-5)
