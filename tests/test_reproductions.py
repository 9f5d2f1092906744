"""A generated script shows a finding with the peer alone; a peer that is right is not accused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.model import DTYPES, Layout, RuntimeCase
from fulldiff.harness.peers import reproduction
from fulldiff.harness.peers.confirm import confirm
from fulldiff.harness.peers.file_templates import TEMPLATES
from fulldiff.harness.peers.reproduction import LAYOUTS, literal, script
from fulldiff.harness.peers.templates import Literal, Template
from fulldiff.harness.realise import DTYPES as TORCH
from fulldiff.harness.realise import lay_out
from fulldiff.harness.subjects.base import Adapter, Unsupported
from fulldiff.harness.subjects.faulty import Faulty
from fulldiff.harness.subjects.full_diff import FullDiff
from fulldiff.harness.subjects.registry import SubjectError, subject


def python(text: str) -> Tensor:
    value: Tensor = eval(text, {"torch": torch})
    return value


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_literal_holds_every_number_exactly(dtype: str) -> None:
    made = torch.randn(2, 3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(TORCH[dtype])
    for tensor in (made, torch.ones(2, dtype=TORCH[dtype]), made[:0], made[0, 0, 0]):
        again = python(literal(tensor, dtype))
        assert again.dtype == tensor.dtype
        assert torch.equal(again, tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_in_a_script_is_the_case_s(layout: Layout) -> None:
    x = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    made = python(literal(x, "f32") + LAYOUTS[layout].format(""))
    assert torch.equal(made, x)
    assert made.stride() == lay_out(x, layout).stride()


def lora_by_hand(scale: str) -> Template:
    """A peer of two lines: the base's weight plus a LoRA's delta times something."""

    def steps(adapters: Sequence[Adapter], weight: Tensor, literal: Literal) -> list[str]:
        (only,) = adapters
        up, down = (literal(only.tensors[f"lora_{name}.weight"]) for name in ("up", "down"))
        alpha = f"{float(only.tensors['alpha'])} / {only.tensors['lora_down.weight'].shape[0]}"
        return [f"base.weight.data += ({alpha}) {scale} * {up} @ {down}", "return base(x)"]

    return Template("nothing else", "", steps)


@pytest.mark.parametrize(("scale", "confirmed", "said"), [("", False, "right"), ("** 2", True, "differs")])
def test_a_script_says_whether_the_peer_is_right(
    scale: str, confirmed: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "TEMPLATES", {"mine": lora_by_hand(scale)})
    path = tmp_path / "mine-1.py"
    path.write_text(script(CATALOGUE["d7-rank-1-lora"], "mine", Faulty("scale-twice"), "the scale twice"))
    assert "fulldiff." not in path.read_text()
    made = confirm(path)
    assert (made.confirmed, made.said) == (confirmed, said)


def test_a_script_that_cannot_run_confirms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine-1.py"
    path.write_text("import nothing_of_that_name\n")
    made = confirm(path)
    assert not made.confirmed
    assert "nothing_of_that_name" in made.said


def test_the_base_is_shown_only_where_the_fault_needs_it() -> None:
    case = CATALOGUE["d7-rank-1-lora"]
    assert isinstance(case.body, RuntimeCase)
    alone = reproduction.showing(case, case.body, Faulty("scale-twice"))
    assert not alone.weight.any()
    assert reproduction.showing(case, case.body, Faulty("delta-replaces-base")).weight.any()


def test_a_peer_without_a_template_is_named() -> None:
    with pytest.raises(Unsupported, match="no template of a reproduction for full-diff"):
        script(CATALOGUE["d7-rank-1-lora"], "full-diff", FullDiff(), "")


@pytest.mark.parametrize(
    ("peer", "label", "confirmed"),
    [
        ("peft", "padding-circular", True),
        ("peft", "d1-low-rank-square", False),
        ("peft-merged", "form-w1full-full-conv1d-f64-exact", True),
        ("lycoris", "padding-circular", True),
        ("lycoris", "d1-low-rank-square", False),
        ("lycoris-bypass", "groups-not-dividing-up", True),
        ("lycoris-bypass", "empty-batch", True),
        ("lycoris-merge", "d1-low-rank-square", True),
        ("peft-file", "form-w1full-full-conv1d-f64-exact", True),
        ("peft-unloaded", "form-dora-out-1d-linear-f64-normal", False),
        ("lycoris-file", "alpha-absent", True),
        ("lycoris-functional", "d13-tucker-w1full", True),
        ("diffusers", "form-w1factored-lowrank-linear-f32-exact", True),
        ("diffusers-fused", "form-lora-linear-f64-exact", False),
    ],
)
def test_a_peer_s_finding_is_confirmed(peer: str, label: str, confirmed: bool, tmp_path: Path) -> None:
    try:
        made = subject(peer)
    except SubjectError as absent:
        pytest.skip(str(absent))
    assert peer in TEMPLATES
    path = tmp_path / f"{peer}-1.py"
    path.write_text(script(CATALOGUE[label], peer, made, label))
    assert confirm(path).confirmed == confirmed
