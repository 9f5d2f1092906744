"""Each fault is diagnosed with its own name; what no fault gives is described."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor, nn

from fulldiff.cases.catalogue import CATALOGUE, pinned
from fulldiff.cases.factors import lokr, lora
from fulldiff.cases.model import Alpha, Case, Input, Layer, RuntimeCase, numel
from fulldiff.harness.peers.diagnosis import ALONE, diagnose, forward, parts_of
from fulldiff.harness.realise import realise
from fulldiff.harness.subjects import full_diff
from fulldiff.harness.subjects.base import Adapter, Detach, Subject, replace_forward
from fulldiff.harness.subjects.faulty import Faulty
from fulldiff.harness.subjects.registry import SubjectError, subject
from fulldiff.reference.faults import FAULTS
from fulldiff.reference.truth import Truth

NAMED = pinned()
SMALL = "d1-low-rank-square"
# Larger named cases (elements of the input times the weight's) would make the search for a showing case slow.
LARGEST = 2_000_000


def differ(case: Case, name: str) -> bool:
    """Whether the fault gives other numbers than the truth on the case, by more than its dtype's rounding."""
    body = case.body
    assert isinstance(body, RuntimeCase)
    material = realise(case, body)
    right, wrong = (forward(way, body, material) for way in (Truth(), FAULTS[name]))
    rtol = 1e-10 if body.dtype == "f64" else 1e-5
    if right is None or wrong is None or right.shape != wrong.shape:
        return False
    return not torch.allclose(right, wrong, rtol=rtol, atol=1e-3 * rtol)


def small(case: Case) -> bool:
    body = case.body
    return isinstance(body, RuntimeCase) and numel(body.input.shape) * numel(body.layer.weight_shape) <= LARGEST


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_diagnosed_with_its_own_name_on_a_named_case(fault: str) -> None:
    """On the first named case that shows it; a new fault that none shows needs one in the catalogue."""
    showing = (label for label, case in NAMED.items() if small(case) and differ(case, fault))
    label = next(showing, None)
    assert label is not None, f"no named case shows {fault}: add one to cases/catalogue.py"
    assert fault in diagnose(NAMED[label], Faulty(fault), closer=False).equals, label


@pytest.mark.parametrize("label", [SMALL, "d10-diff-and-lora-with-biases", "d12-dora-out", "padding-circular"])
def test_what_is_right_is_not_accused(label: str) -> None:
    found = diagnose(CATALOGUE[label], full_diff.FullDiff())
    assert found.right and not found.equals


class Third(Subject):
    """A delta of a third, which no fault gives."""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        scaled = [Adapter(a.kind, a.tensors, a.strength / 3, a.rows) for a in adapters]
        return full_diff.FullDiff().attach(module, scaled)


def test_what_gives_nan_where_a_number_is_right_explains_nothing() -> None:
    adapter = lokr((2, 3), (4, 5), alpha=Alpha("0d", 1e10, "f16"))  # infinite in f16; of two whole factors not used
    case = Case(RuntimeCase(Layer("linear", 8, 15), (adapter,), Input((3, 15)), values="exact"), 1)
    material = realise(case, case.body)  # type: ignore[arg-type]
    gives = forward(FAULTS["both-full-scaled"], case.body, material)  # type: ignore[arg-type]
    assert gives is not None and gives.isnan().all()
    assert not diagnose(case, Third(), closer=False).equals


class By(Faulty):
    """Any way of computing."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth


class OneMore(Subject):
    """An output of one dimension more."""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        detach = full_diff.FullDiff().attach(module, adapters)
        changed = module.forward
        undo = replace_forward(module, lambda x: changed(x)[None])
        return lambda: (undo(), detach())[1]


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


class Unloaded(Subject):
    """w2_a never read: it stays what it was made with, a constant or (``drawn``) random numbers."""

    def __init__(self, drawn: bool) -> None:
        self.drawn = drawn

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        return full_diff.FullDiff().attach(module, [self.unloaded(adapter) for adapter in adapters])

    def unloaded(self, adapter: Adapter) -> Adapter:
        factor = adapter.tensors["lokr_w2_a"]
        made = torch.randn_like(factor) if self.drawn else torch.full_like(factor, 3)
        return Adapter(adapter.kind, {**adapter.tensors, "lokr_w2_a": made}, adapter.strength)


def test_an_unknown_one_is_described() -> None:
    assert str(diagnose(CATALOGUE[SMALL], Third())) == "unknown (0.3333 times the right delta)"
    assert "only output rows 2, 3, 5, 6, 7 of 8" in str(diagnose(CATALOGUE[SMALL], FirstRowsOnly()))


@pytest.mark.parametrize("drawn", [False, True])
def test_a_factor_that_is_not_read_is_named(drawn: bool) -> None:
    more = ", other numbers each time" if drawn else ""
    assert str(diagnose(CATALOGUE[SMALL], Unloaded(drawn))) == f"unread: lokr_w2_a without effect{more}"


def test_a_pair_that_spoils_one_branch_is_named() -> None:
    """Both change the layer of the delta's branch."""
    layer = Layer("conv2d", 24, 12, (3, 3), (1, 1), (1, 1), (1, 1), groups=2, padding_mode="circular")
    case = Case(RuntimeCase(layer, (lokr((3, 2), (8, 3), (3, 3), w2_rank=2),), Input((1, 12, 4, 4))), 3)
    pair = type("Pair", (type(FAULTS["delta-padding-mode-zeros"]), type(FAULTS["kron-groups-in-w2"])), {})()
    found = diagnose(case, By(pair))
    assert found.equals == ("delta-padding-mode-zeros and kron-groups-in-w2",)


def test_what_overflows_in_f16_is_diagnosed_in_f32() -> None:
    """alpha / rank is 2048, and the square of that 2²²: more than f16 holds."""
    adapter = lora(4, 4, 1, alpha=Alpha("0d", 2048))
    case = Case(RuntimeCase(Layer("linear", 4, 4), (adapter,), Input((3, 4)), dtype="f16"), 1)
    found = diagnose(case, By(FAULTS["scale-twice"]), closer=False)
    assert parts_of(case, case.body, By(FAULTS["scale-twice"]))[ALONE].got.isinf().any()  # type: ignore[arg-type]
    assert found.equals[0] == "scale-twice"


def test_an_f16_output_of_another_shape_is_described() -> None:
    case = CATALOGUE["single-vector-dora"]
    narrow = msgspec.structs.replace(case, body=msgspec.structs.replace(case.body, dtype="f16"))
    assert "the right numbers in shape (1, 8) for (8,)" in str(diagnose(narrow, OneMore()))


def test_rows_are_told_of_an_output_of_one_dimension() -> None:
    case = CATALOGUE[SMALL]
    assert isinstance(case.body, RuntimeCase)
    single = msgspec.structs.replace(case, body=msgspec.structs.replace(case.body, input=Input((12,))))
    assert "of 8" in str(diagnose(single, FirstRowsOnly()))


def test_an_output_that_is_broadcast_is_diagnosed() -> None:
    layer = Layer("conv2d", 2, 2, (2, 1), (1, 1), (0, 0), (2, 1))
    case = Case(RuntimeCase(layer, (lora(2, 2, 1, (2, 1)),), Input((1, 2, 3, 1))), 3)
    assert "delta-dilation-ignored" in diagnose(case, Faulty("delta-dilation-ignored"), closer=False).equals


@pytest.mark.parametrize(
    ("peer", "label", "words"),
    [
        ("peft", "form-w1full-full-conv1d-f64-exact", "kron-not-unsqueezed"),
        ("lycoris-merge", "d1-low-rank", "scale-twice-but-lora"),
        ("lycoris-bypass", "groups-not-dividing-up", "equals: kron-groups-in-w2"),
        ("lycoris-bypass", "lora-dilated-to-one-position", "lora-dilation-ignored"),
        ("peft", "lora-dilated-to-one-position", "lora-dilation-ignored"),
        ("lycoris-file", "strength-0-dora", "dora-strength-on-magnitude"),
        ("lycoris-file", "d10-lora-and-diff", "last-adapter-only"),
        ("lycoris-file", "padding-circular-diff", "padding-mode-zeros"),
        ("lycoris-merge", "lokr-scale-squared-overflows", "scale-twice-but-lora"),
        ("lycoris-bypass", "lokr-overflows-at-strength-0", "not finite in f16, right in f32"),
        ("peft-file", "single-vector-dora", "the right numbers in shape"),
        ("peft-file", "dora-behind-lora", "right: within the budget"),
        ("peft-unloaded", "dora-behind-lora", "right: within the budget"),
        ("diffusers", "form-w1factored-lowrank-linear-f64-exact", "unread: other numbers each time"),
        ("diffusers", "dora-behind-lora", "dora-magnitude-ignored"),
        ("diffusers-fused", "dora-behind-lokr", "dora-of-current"),
    ],
)
def test_a_peer_is_diagnosed(peer: str, label: str, words: str) -> None:
    try:
        made = subject(peer)
    except SubjectError as absent:
        pytest.skip(str(absent))
    assert words in str(diagnose(NAMED[label], made))
