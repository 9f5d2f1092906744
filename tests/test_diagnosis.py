"""Each fault is diagnosed with its own name; what no fault gives is described."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor, nn

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.model import Input, RuntimeCase
from fulldiff.harness.peers.diagnosis import diagnose
from fulldiff.harness.subjects import full_diff
from fulldiff.harness.subjects.base import Adapter, Detach, Subject, replace_forward
from fulldiff.harness.subjects.faulty import Faulty
from fulldiff.harness.subjects.registry import SubjectError, subject

SMALL = "d1-low-rank-square"
# A case of the catalogue on which the fault differs from the truth, and the faults that are equal on it.
SHOWN = {
    SMALL: ("bias-twice", "first-batch-only", "kron-swapped", "w2-transposed", "w2-a-then-b", "scale-twice"),
    "d1-low-rank": ("scale-ignored", "alpha-not-divided", "delta-replaces-base"),
    "d3-conv-batch": ("kernel-flipped", "kernel-axes-swapped"),
    "d7-rank-1": ("rank-from-in-features", "rank-one-unscaled"),
    "d8-locon-mid-stride-2": ("stride-before-kernel", "tucker-core-ignored", "tucker-core-transposed"),
    "d9-qkv-k": ("fused-rows-packed", "fused-part-after-gap-dropped"),
    "d9-qkv-qv": ("first-adapter-only",),
    "d10-diff-and-lora": ("strength-ignored", "strength-squared", "last-strength-for-all", "first-kind-only"),
    "d10-diff-and-lora-with-biases": ("missing-alpha-is-one", "bias-delta-ignored", "bias-delta-needs-bias"),
    "d12-dora-out": ("dora-magnitude-ignored", "dora-wrong-axis", "dora-norm-of-base", "dora-base-not-removed"),
    "d12-dora-lokr-out": ("dora-strength-inside", "dora-strength-ignored", "strength-unsigned", "both-full-scaled"),
    "d13-tucker-w1full": ("tucker-a-not-transposed",),
    "padding-circular": ("delta-padding-mode-zeros",),
    "form-w1full-full-conv1d-f64-exact": ("kron-not-unsqueezed",),
}


@pytest.mark.parametrize(("label", "fault"), [(label, fault) for label, own in SHOWN.items() for fault in own])
def test_a_fault_is_diagnosed_with_its_own_name(label: str, fault: str) -> None:
    assert fault in diagnose(CATALOGUE[label], Faulty(fault), pairs=False).equals


@pytest.mark.parametrize("label", SHOWN)
def test_what_is_right_is_not_accused(label: str) -> None:
    found = diagnose(CATALOGUE[label], full_diff.FullDiff())
    assert found.right and not found.equals


class Third(Subject):
    """A delta of a third, which no fault gives."""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        scaled = [Adapter(a.kind, a.tensors, a.strength / 3, a.rows) for a in adapters]
        return full_diff.FullDiff().attach(module, scaled)


class FirstRowsOnly(Subject):
    """An output whose rows but the first two are those of the bare layer."""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        bare = module.forward
        detach = full_diff.FullDiff().attach(module, adapters)
        changed = module.forward

        def forward(x: Tensor) -> Tensor:
            return torch.cat([changed(x)[..., :2], bare(x)[..., 2:]], -1)

        undo = replace_forward(module, forward)
        return lambda: (undo(), detach())[1]


def test_an_unknown_one_is_described() -> None:
    assert str(diagnose(CATALOGUE[SMALL], Third(), pairs=False)) == "unknown (0.3333 times the right delta)"
    assert "only output rows 2, 3, 5, 6, 7 of 8" in str(diagnose(CATALOGUE[SMALL], FirstRowsOnly(), pairs=False))


def test_rows_are_told_of_an_output_of_one_dimension() -> None:
    case = CATALOGUE[SMALL]
    assert isinstance(case.body, RuntimeCase)
    single = msgspec.structs.replace(case, body=msgspec.structs.replace(case.body, input=Input((12,))))
    assert "of 8" in str(diagnose(single, FirstRowsOnly(), pairs=False))


@pytest.mark.parametrize(
    ("peer", "label", "words"),
    [
        ("peft", "form-w1full-full-conv1d-f64-exact", "kron-not-unsqueezed"),
        ("lycoris-merge", "d1-low-rank", "equals: scale-twice"),
        ("lycoris-bypass", "groups-not-dividing-up", "right with groups = 1"),
    ],
)
def test_a_peer_is_diagnosed(peer: str, label: str, words: str) -> None:
    try:
        made = subject(peer)
    except SubjectError as absent:
        pytest.skip(str(absent))
    assert words in str(diagnose(CATALOGUE[label], made, pairs=False))
