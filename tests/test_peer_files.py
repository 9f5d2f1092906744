"""Peers that get adapters as files: what they load is right, what they leave out is seen, all comes off again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.factors import lokr, lora
from fulldiff.cases.model import Adapter, Case, Input, Layer, RestoreCase, RuntimeCase
from fulldiff.cases.spec import Alpha
from fulldiff.harness import judge as runtime
from fulldiff.harness import restore_judge
from fulldiff.harness.protocol import Judgement
from fulldiff.harness.subjects.base import Adapter as Loaded
from fulldiff.harness.subjects.base import Unsupported
from fulldiff.harness.subjects.peers.files import is_refusal
from fulldiff.harness.subjects.registry import SubjectError, subject

ROOM = "fulldiff.harness.subjects.peers"
# Saved by the peer itself and loaded from there: the same adapter.
SAVED = (f"{ROOM}.peft_file:PeftSaved", f"{ROOM}.lycoris_file:LycorisSaved", f"{ROOM}.diffusers:DiffusersSaved")
FILE_PEERS = ("peft-file", "peft-unloaded", "lycoris-file", "diffusers", "diffusers-fused", *SAVED)
ALPHA = Alpha("0d", 2.0, "f32")
LINEAR, CONV = Layer("linear", 12, 20), Layer("conv2d", 12, 20, (3, 3), (1, 1), (1, 1), (1, 1))


def peer(name: str) -> Any:
    try:
        return subject(name)
    except SubjectError as absent:
        pytest.skip(str(absent))


def judged(name: str, layer: Layer, adapters: Iterable[Adapter]) -> Judgement:
    shape = (3, 20) if layer.kind == "linear" else (2, 20, 4, 5)
    case = Case(RuntimeCase(layer, tuple(adapters), Input(shape), values="exact"), 7)
    return runtime.judge(case, peer(name), lambda stage: None)


@pytest.mark.parametrize("name", FILE_PEERS)
@pytest.mark.parametrize("layer", [LINEAR, CONV], ids=["linear", "conv2d"])
def test_two_loras_from_files_at_their_strengths(name: str, layer: Layer) -> None:
    adapters = [lora(12, 20, rank, layer.kernel, alpha=ALPHA, strength=s) for rank, s in ((4, 1.0), (2, -0.5))]
    found = judged(name, layer, adapters)
    assert found.outcome == "passed", found


@pytest.mark.parametrize("name", FILE_PEERS)
def test_a_lokr_from_a_file_in_a_form_that_every_peer_writes(name: str) -> None:
    found = judged(name, LINEAR, [lokr((3, 4), (4, 5), w2_rank=2, alpha=ALPHA, strength=0.5)])
    assert found.outcome == "passed", found


def test_diffusers_leaves_a_lokr_of_two_low_rank_factors_unloaded() -> None:
    """PEFT makes whole factors at the rank that diffusers infers: the file's have no place, and a warning is logged."""
    case = CATALOGUE["form-w1factored-lowrank-linear-f32-exact"]
    assert runtime.judge(case, peer("diffusers"), lambda stage: None).outcome == "wrong"


def test_lycoris_cannot_load_its_own_lokr_with_a_tucker_core() -> None:
    """The rank is read from the wrong axis of w2_a, (rank, vp) beside a core: the module is made without one."""
    with pytest.raises(AttributeError, match="lokr_w2_a"):
        runtime.judge(CATALOGUE["as-trained-low-tucker-conv2d"], peer("lycoris-file"), lambda stage: None)


@pytest.mark.parametrize(("scale", "taken"), [(0.0, False), (0.5, True)])
def test_a_scale_of_0_is_not_written_as_an_alpha_that_lycoris_reads_as_none(scale: float, taken: bool) -> None:
    lycoris, layer = peer("lycoris-file"), nn.Linear(3, 2)
    tensors = {"lora_up.weight": torch.ones(2, 1), "lora_down.weight": torch.ones(1, 3), "scale": torch.tensor(scale)}
    if taken:
        lycoris.attach(layer, [Loaded("lora", tensors)])
    else:
        with pytest.raises(Unsupported, match="a scale of 0"):
            lycoris.attach(layer, [Loaded("lora", tensors)])


def test_lycoris_at_strength_0_keeps_the_delta_of_a_dora() -> None:
    """Its multiplier scales the magnitude's part alone: W' = (W + ΔW) · (1 + multiplier · (m / norm − 1))."""
    lycoris = peer("lycoris-file")
    layer, tensors = nn.Linear(3, 2, bias=False), {"alpha": torch.tensor(1.0), "dora_scale": torch.ones(2, 1)}
    base = layer(torch.eye(3))
    tensors |= {"lora_up.weight": torch.ones(2, 1), "lora_down.weight": torch.ones(1, 3)}
    lycoris.attach(layer, [Loaded("lora", tensors, 0.0)])
    torch.testing.assert_close(layer(torch.eye(3)), base + 1)


def test_peft_s_unload_after_merge_leaves_the_delta() -> None:
    """`unload` promises the base model "without merging"."""
    peft = pytest.importorskip("peft")
    holder = nn.Module()
    holder.add_module("layer", nn.Linear(4, 3))
    before = holder.get_parameter("layer.weight").detach().clone()
    config = peft.LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False)
    model = peft.get_peft_model(holder, config)
    model.merge_adapter()
    assert (model.unload().get_parameter("layer.weight") - before).abs().max() > 0.01


@pytest.mark.parametrize("name", ["peft-file", "lycoris-file", "diffusers", "diffusers-fused"])
@pytest.mark.parametrize("order", [(1, 2, -1, -2), (2, 1, -1, -2)])
def test_files_come_off_in_any_order(name: str, order: tuple[int, ...]) -> None:
    pair = (lora(12, 20, 4, alpha=ALPHA, strength=0.5), lora(12, 20, 2, alpha=ALPHA, strength=-1.0))
    case = Case(RestoreCase(RuntimeCase(LINEAR, pair, Input((3, 20)), values="exact"), order), 3)
    found = restore_judge.judge(case, peer(name), lambda stage: None)
    assert found.outcome == "passed", found


@pytest.mark.parametrize("name", ["peft-file", "diffusers"])
def test_a_failed_load_leaves_nothing_behind(name: str) -> None:
    made, layer = peer(name), nn.Linear(20, 12)
    tensors = {"lora_up.weight": torch.ones(12, 3), "lora_down.weight": torch.ones(2, 20)}
    with pytest.raises(Exception, match=r"size mismatch|multiplied"):
        made.attach(layer, [Loaded("lora", tensors)])
        layer(torch.ones(1, 20))
    made.attach(layer, [Loaded("lora", tensors | {"lora_up.weight": torch.ones(12, 2)})])
    assert layer(torch.ones(1, 20)).shape == (1, 12)


def test_a_refusal_is_what_a_library_raises_itself() -> None:
    def met() -> None:
        float(None)  # type: ignore[arg-type]

    def refused() -> None:
        raise ValueError("no such kind")

    for call, expected in ((met, False), (refused, True)):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert is_refusal(caught.value) is expected
