"""A generated script shows a finding with the peer alone; a peer that is right is not accused."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from unittest.mock import ANY

import pytest
import torch
from literals import f64
from torch import Tensor

from fulldiff.cases.catalogue import CATALOGUE, pinned
from fulldiff.cases.model import DTYPES, Layout, RuntimeCase
from fulldiff.harness.peers import reproduction
from fulldiff.harness.peers.confirm import Reproduction, confirm, last_line
from fulldiff.harness.peers.diagnosis import Part
from fulldiff.harness.peers.file_templates import TEMPLATES
from fulldiff.harness.peers.reproduction import LAYOUTS, script
from fulldiff.harness.peers.templates import Template, literal
from fulldiff.harness.protocol import Judgement
from fulldiff.harness.realise import DTYPES as TORCH
from fulldiff.harness.realise import lay_out, realise
from fulldiff.harness.subjects.base import Adapter, Unsupported
from fulldiff.harness.subjects.faulty import Faulty
from fulldiff.harness.subjects.full_diff import FullDiff
from fulldiff.harness.subjects.registry import SubjectError, subject


def python(text: str) -> Tensor:
    value: Tensor = eval(text, {"torch": torch, "inf": inf, "nan": nan})
    return value


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_literal_holds_every_number_exactly(dtype: str) -> None:
    made = torch.randn(2, 3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(TORCH[dtype])
    infinite = torch.tensor([1.0, inf, -inf], dtype=TORCH[dtype])
    for tensor in (made, torch.ones(2, dtype=TORCH[dtype]), made[:0], made[0, 0, 0], infinite):
        again = python(literal(tensor))
        assert again.dtype == tensor.dtype
        assert torch.equal(again, tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_in_a_script_is_the_case_s(layout: Layout) -> None:
    x = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    made = python(literal(x) + LAYOUTS[layout].format(""))
    assert torch.equal(made, x)
    assert made.stride() == lay_out(x, layout).stride()


def lora_by_hand(scale: str) -> Template:
    """A peer of two lines: the base's weight plus a LoRA's delta times something."""

    def steps(adapters: Sequence[Adapter], weight: Tensor) -> list[str]:
        (only,) = adapters
        up, down = (literal(only.tensors[f"lora_{name}.weight"]) for name in ("up", "down"))
        alpha = f"{float(only.tensors['alpha'])} / {only.tensors['lora_down.weight'].shape[0]}"
        return [f"base.weight.data += ({alpha}) {scale} * {up} @ {down}", "return base(x)"]

    return Template("nothing else", "", steps)


@pytest.mark.parametrize(("scale", "confirmed", "said"), [("", False, "right"), ("** 2", True, "differs")])
def test_a_script_says_whether_the_peer_is_right(
    scale: str, confirmed: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "TEMPLATES", {"mine": lora_by_hand(scale)})
    text = script(CATALOGUE["d7-rank-1-lora"], "mine", Faulty("scale-twice"), "the scale twice")
    assert "fulldiff." not in text
    made = confirm(text)
    assert (made.confirmed, made.said) == (confirmed, said)


def test_not_a_number_where_one_is_right_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "TEMPLATES", {"mine": Template("", "", lambda *_: ["return base(x) * nan"])})
    text = script(CATALOGUE["d7-rank-1-lora"], "mine", Faulty("scale-twice"), "")
    assert confirm(text).confirmed


def test_a_script_that_cannot_run_confirms_nothing() -> None:
    made = confirm("import nothing_of_that_name\n")
    assert not made.confirmed
    assert "nothing_of_that_name" in made.said


def test_what_a_peer_raises_is_confirmed_by_that_exception_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "TEMPLATES", {"mine": Template("", "", lambda *_: ["raise KeyError(1)"])})
    text = script(CATALOGUE["d7-rank-1-lora"], "mine", Faulty("scale-twice"), "")
    raised = last_line(Judgement("raised", message="KeyError: 1"))
    assert confirm(text, raised).confirmed
    assert not confirm(text, last_line(Judgement("raised", message="ValueError: 1"))).confirmed
    assert not confirm(text, last_line(Judgement("wrong"))).confirmed


def test_the_base_is_shown_only_where_the_fault_needs_it() -> None:
    case = CATALOGUE["d7-rank-1-lora"]
    assert isinstance(case.body, RuntimeCase)
    alone, _ = reproduction.showing(case, case.body, Faulty("scale-twice"))
    assert not alone.weight.any()
    assert reproduction.showing(case, case.body, Faulty("delta-replaces-base"))[0].weight.any()


def script_of(part: Part, monkeypatch: pytest.MonkeyPatch) -> str:
    """The script of a peer that gives ``part``'s numbers."""
    case = CATALOGUE["d7-rank-1-lora"]
    assert isinstance(case.body, RuntimeCase)
    gives = Template("", "", lambda *_: [f"return {literal(part.got)}"])
    monkeypatch.setattr(reproduction, "TEMPLATES", {"mine": gives})
    monkeypatch.setattr(reproduction, "showing", lambda *_: (realise(case, case.body), part))
    return script(case, "mine", Faulty("scale-twice"), "")


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1)])
@pytest.mark.parametrize(("share", "confirmed"), [(0.5, False), (2.0, True)])
def test_an_error_is_held_to_its_own_element_s_budget(
    share: float, confirmed: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest budget of all would hide it; where nothing is asked nothing is compared."""
    allowed = f64([1e-3, 1e-6, 1e-3, 1e-3, 1e-3, 1e-3]).reshape(shape)
    want = f64([1, 1, 1, 1, 1, nan]).reshape(shape)
    got = want.nan_to_num() + share * f64([0, 1e-6, 0, 0, 0, 1]).reshape(shape)
    part = Part(*[None] * 2, got, want, allowed, 1.0, ("f64", ""))  # type: ignore[arg-type]
    assert part.right != confirmed
    assert confirm(script_of(part, monkeypatch)) == Reproduction(ANY, confirmed, "differs" if confirmed else "right")


@pytest.mark.parametrize(("allowed_rms", "confirmed"), [(2e-4, False), (0.9e-4, True)])
def test_the_errors_as_a_whole_are_held_to_theirs(
    allowed_rms: float, confirmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(*[None] * 2, f64([[1, 1 + 1.414e-4]]), f64([[1, 1]]), f64([[1e-3, 1e-3]]), allowed_rms, ("f64", ""))  # type: ignore[arg-type]
    assert part.right != confirmed
    assert confirm(script_of(part, monkeypatch)).confirmed == confirmed


def test_a_peer_without_a_template_is_named() -> None:
    with pytest.raises(Unsupported, match="no template of a reproduction for full-diff"):
        script(CATALOGUE["d7-rank-1-lora"], "full-diff", FullDiff(), "")


@pytest.mark.parametrize(
    ("peer", "label", "said"),
    [
        ("peft", "padding-circular", "differs"),
        ("peft", "d1-low-rank-square", "right"),
        ("peft-merged", "form-w1full-full-conv1d-f64-exact", "differs"),
        ("lycoris", "padding-circular", "differs"),
        ("lycoris", "d1-low-rank-square", "right"),
        ("lycoris-bypass", "groups-not-dividing-up", "differs"),
        ("lycoris-bypass", "empty-batch", "raised RuntimeError"),
        ("lycoris-merge", "d1-low-rank-square", "differs"),
        ("peft-file", "form-w1full-full-conv1d-f64-exact", "differs"),
        ("peft-unloaded", "form-dora-out-1d-linear-f64-normal", "right"),
        ("lycoris-bypass", "lokr-overflows-at-strength-0", "differs"),
        ("lycoris-file", "alpha-absent", "raised TypeError"),
        ("lycoris-functional", "d13-tucker-w1full", "differs"),
        ("diffusers", "form-w1factored-lowrank-linear-f32-exact", "differs"),
        ("diffusers-fused", "form-lora-linear-f64-exact", "right"),
    ],
)
def test_a_script_of_a_peer_shows_what_it_does(peer: str, label: str, said: str) -> None:
    try:
        made = subject(peer)
    except SubjectError as absent:
        pytest.skip(str(absent))
    assert peer in TEMPLATES
    assert confirm(script(pinned()[label], peer, made, label)).said == said
