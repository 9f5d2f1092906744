"""Our subjects on the named cases, and what runtime-lokr promises beyond being right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulldiff.cases.catalogue import HEAVY, pinned
from fulldiff.harness.judge import judge
from fulldiff.harness.subjects import full_diff, runtime_lokr
from fulldiff.harness.subjects.base import Adapter
from fulldiff.harness.subjects.registry import SubjectError, subject


@pytest.mark.parametrize("name", sorted(set(pinned()) - HEAVY))
@pytest.mark.parametrize("subject_name", ["full-diff", "runtime-lokr"])
def test_named_cases_pass(subject_name: str, name: str) -> None:
    judgement = judge(pinned()[name], subject(subject_name), lambda stage: None)
    assert judgement.outcome == "passed", judgement


def test_fp16_intermediates_do_not_overflow_where_the_answer_does_not() -> None:
    module = nn.Linear(1280, 1280, bias=False, dtype=torch.float16)
    nn.init.zeros_(module.weight)
    tensors = {"lokr_w1": torch.full((8, 8), 1e-4).half(), "lokr_w2": torch.full((160, 160), 600.0).half()}
    subject("runtime-lokr").attach(module, [Adapter("lokr", tensors)])
    with torch.no_grad():
        y = module(torch.ones(2, 1280, dtype=torch.float16))
    assert torch.allclose(y.float(), torch.tensor(76.8), rtol=2e-3)


@pytest.mark.parametrize("tokens", [1, 4096, 4099])
def test_tokens_are_split_evenly_within_the_workspace(tokens: int) -> None:
    parts = runtime_lokr._even_parts(tokens, 5000)
    assert sum(parts) == tokens
    assert max(parts) - min(parts) <= 1
    assert max(parts) * 5000 <= runtime_lokr.WORKSPACE


def test_the_order_follows_cost_not_the_layer_s_proportions() -> None:
    from fulldiff.harness.subjects import contraction

    t = {"lokr_w1": torch.zeros(2, 16), "lokr_w2": torch.zeros(640, 80)}
    orders = contraction.orders(t, (1280, 1280), pointwise=True)
    best = contraction.best(orders, contraction.Shape(16, 80))
    assert [step.axis for step in best] == [1, 2]


def test_a_policy_that_nobody_knows_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_diff.FullDiff, "policy", "mine")
    with pytest.raises(SubjectError, match="policy 'mine' is unknown: use one of default, comfyui"):
        subject("full-diff")


def test_an_unknown_subject_is_a_clear_error() -> None:
    with pytest.raises(SubjectError, match="use one of"):
        subject("nonsense")
