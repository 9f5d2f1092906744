"""The naive loader against sets worked out by hand, its key maps against known counts, merges against literals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fulldiff.cases.load_names import base_names
from fulldiff.cases.model import Model
from fulldiff.cases.state_dicts import state_dict
from fulldiff.cases.tables import LDM_PREFIX, aliases, load_table, underscored
from fulldiff.harness.subjects.base import Refused
from fulldiff.harness.subjects.loaders import merging
from fulldiff.reference import merge
from fulldiff.reference.key_maps import Base, Target, denoiser_names, text_names
from fulldiff.reference.load import REJECTIONS, File, Loaded, LoadError, Naive, Patch
from fulldiff.reference.truth import Truth

W, B, CLIP = "diffusion_model.out.0.weight", "diffusion_model.out.0.bias", "clip_l.transformer.text_projection.weight"
MID, GONE = "diffusion_model.mid.weight", "diffusion_model.gone.weight"
BASE = Base(
    "by hand",
    "unet",
    (W, B, MID),
    (("last.to_out.0", Target(W)), ("mid", Target(MID)), ("gone", Target(GONE))),
    (CLIP,),
)


def load(*files: File, rejection: str = "12-tensors") -> Loaded:
    return Naive().load(BASE, files, REJECTIONS[rejection])


def file(*keys: str, name: str = "a", strength: float = 1.0, text: float = 1.0) -> File:
    """A file whose tensors are their own names, so that what was found can be read off."""
    return File(name, {key: key for key in keys}, strength, text)


def lora(name: str) -> tuple[str, str]:
    return f"{name}.lora_up.weight", f"{name}.lora_down.weight"


def nothing(count: int) -> list[str]:
    return [f"nothing.{n}" for n in range(count)]


# Key maps


@pytest.mark.parametrize(
    ("model", "unet", "unet_targets", "text", "text_targets"),
    [("sdxl", 6970, 1688, 603, 266), ("sd15", 2697, 698, 217, 73)],
)
def test_key_maps_have_as_many_names_and_targets_as_the_lineage_s(
    model: str, unet: int, unet_targets: int, text: int, text_targets: int
) -> None:
    base = base_names(Model(model))
    names, encoders = denoiser_names(base), text_names(base)
    assert (len(names), len(set(names.values()))) == (unet, unet_targets)
    assert (len(encoders), len(set(encoders.values()))) == (text, text_targets)
    assert not names.keys() & encoders.keys()


@pytest.mark.parametrize("model", ["sdxl", "sd15"])
def test_every_layer_of_the_table_has_its_six_names_in_the_map(model: str) -> None:
    names = denoiser_names(base_names(Model(model)))
    for row in load_table(model):
        if row.part == "unet":
            ldm = row.original.path.removeprefix(LDM_PREFIX)
            target = Target(f"diffusion_model.{ldm}.weight")
            own = [f"lora_unet_{underscored(ldm)}", f"diffusion_model.{ldm}"]
            own += [name for name in aliases(row) if not name.endswith(("to_q", "to_k", "to_v", "to_out.0"))]
            assert {names[name] for name in own} == {target}
            assert sum(found == target for found in names.values()) >= 6


def test_candidates_are_tried_in_the_order_of_the_maps() -> None:
    assert list(denoiser_names(BASE)) == [
        "lora_unet_out_0", "diffusion_model.out.0", B, "lora_unet_mid", "diffusion_model.mid",
        "lora_unet_last_to_out_0", "lycoris_last_to_out_0", "last.processor.to_out", "unet.last.processor.to_out",
        "lycoris_mid", "mid", "unet.mid", "lora_unet_gone", "lycoris_gone", "gone", "unet.gone",
    ]  # fmt: skip


def test_a_state_dict_holds_the_normalisation_layers_and_the_biases() -> None:
    shapes = state_dict(Model("sdxl")).shapes
    assert len(state_dict(Model("sdxl")).denoiser) == 1680
    assert shapes["diffusion_model.input_blocks.4.1.transformer_blocks.0.norm2.bias"] == (640,)
    assert shapes["diffusion_model.out.0.weight"] == (320,)


def test_rows_of_a_fused_weight_are_the_table_s() -> None:
    targets = set(denoiser_names(base_names(Model("flux"))).values())
    qkv = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    assert {target.rows for target in targets if target.weight == qkv} == {None, (0, 3072), (3072, 6144), (6144, 9216)}


# What is found


def test_patches_come_in_load_order_with_the_part_s_own_strength() -> None:
    one = file(*lora("lora_unet_out_0"), "lora_unet_out_0.alpha", *lora("lora_te1_text_projection"), text=0.5)
    two = file(*lora("lycoris_last_to_out_0"), name="b", strength=-2.0)
    loaded = load(one, two)
    assert [(p.file, p.strength, p.kind) for p in loaded.patches[W]] == [("a", 1.0, "lora"), ("b", -2.0, "lora")]
    assert loaded.patches[W][0].tensors == {
        "lora_up.weight": "lora_unet_out_0.lora_up.weight",
        "lora_down.weight": "lora_unet_out_0.lora_down.weight",
        "alpha": "lora_unet_out_0.alpha",
    }
    assert [(p.file, p.strength) for p in loaded.patches[CLIP]] == [("a", 0.5)]


def test_the_later_candidate_wins_whatever_the_order_in_the_file() -> None:
    for keys in ((*lora("mid"), *lora("lora_unet_mid")), (*lora("lora_unet_mid"), *lora("mid"))):
        loaded = load(file(*keys))
        assert [p.tensors["lora_up.weight"] for p in loaded.patches[MID]] == ["mid.lora_up.weight"]
        assert loaded.fates[0].unmatched == ()


@pytest.mark.parametrize(
    ("suffixes", "kind", "unmatched"),
    [
        (("_lora.up.weight", "_lora.down.weight"), "lora", ()),
        ((".lora_B.weight", ".lora_A.weight"), "lora", ()),
        ((".lora.up.weight", ".lora.down.weight"), "lora", ()),
        ((".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight"), "lora", ()),
        ((".lora_up.weight", ".lora_down.weight", ".lora_B.weight"), "lora", (".lora_B.weight",)),
        ((".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b"), "loha", ()),
        ((".lokr_w1", ".lokr_w2_a", ".lokr_w2_b"), "lokr", ()),
        ((".a1.weight", ".a2.weight", ".b1.weight", ".b2.weight"), "glora", ()),
        ((".lora_up.weight", ".lora_down.weight", ".diff"), "diff", ()),
        ((".set_weight", ".dora_scale"), "set_weight", ()),
    ],
)
def test_kinds_and_spellings(suffixes: tuple[str, ...], kind: str, unmatched: tuple[str, ...]) -> None:
    loaded = load(file(*("mid" + suffix for suffix in suffixes)))
    assert [p.kind for p in loaded.patches[MID]] == [kind]
    assert loaded.fates[0].unmatched == tuple("mid" + suffix for suffix in unmatched)


def test_norms_and_bias_deltas_go_to_the_bias_beside() -> None:
    loaded = load(file("lora_unet_out_0.w_norm", "lora_unet_out_0.b_norm"), file(f"{B}.diff", name="b"))
    assert {weight: [(p.file, p.tensors["diff"]) for p in patches] for weight, patches in loaded.patches.items()} == {
        W: [("a", "lora_unet_out_0.w_norm")],
        B: [("a", "lora_unet_out_0.b_norm"), ("b", f"{B}.diff")],
    }


# What is left over


@pytest.mark.parametrize(
    ("policy", "unmatched", "rejected"),
    [("12-tensors", 12, False), ("12-tensors", 13, True), ("half", 2, False), ("half", 3, True), ("never", 50, False)],
)
def test_a_file_is_rejected_by_the_policy_and_then_does_nothing(policy: str, unmatched: int, rejected: bool) -> None:
    loaded = load(file(*lora("mid"), *nothing(unmatched)), rejection=policy)
    assert loaded.fates[0].rejected == rejected
    assert len(loaded.fates[0].unmatched) == unmatched
    assert bool(loaded.patches) != rejected


def test_the_policy_judges_what_both_maps_left_over() -> None:
    names = ("lora_te1_text_projection",)
    keys = [f"{name}{suffix}" for name in names for suffix in (".lora_up.weight", ".lora_down.weight", ".alpha")]
    loaded = Naive().load(BASE, [file(*keys, *nothing(11))], REJECTIONS["12-tensors"])
    assert not loaded.fates[0].rejected
    assert list(loaded.patches) == [CLIP]


def test_a_target_without_a_weight_is_skipped_not_unmatched() -> None:
    fate = load(file(*lora("gone"), *lora("mid"))).fates[0]
    assert (fate.unmatched, fate.skipped) == ((), (Target(GONE),))


def test_orphans() -> None:
    fate = load(file("mid.alpha", "lora_unet_mid.dora_scale", "gone.lora_down.weight")).fates[0]
    assert fate.unmatched == ("gone.lora_down.weight",)
    with pytest.raises(LoadError, match=r"a: mid.lora_up.weight has no mid.lora_down.weight beside it; mend"):
        load(file("mid.lora_up.weight"))
    with pytest.raises(LoadError, match=r"a: mid has lokr_w1_a but neither lokr_w1 nor both"):
        load(file("mid.lokr_w1_a"))


def test_the_same_file_counts_once_at_a_strength_and_again_at_another() -> None:
    keys = (*lora("mid"), *lora("lora_te1_text_projection"))
    loaded = load(file(*keys, text=1.0), file(*keys, text=0.5), file(*keys, text=1.0))
    assert [p.strength for p in loaded.patches[MID]] == [1.0]
    assert [p.strength for p in loaded.patches[CLIP]] == [1.0, 0.5]


# Merged weights


def patch(strength: float = 1.0, rows: tuple[int, int] | None = None, **tensors: Any) -> Patch:
    """A LoRA from literals: ``up``, ``down``, ``alpha``."""
    named = {
        name if name == "alpha" else f"lora_{name}.weight": torch.tensor(values, dtype=torch.float32)
        for name, values in tensors.items()
    }
    return Patch("lora", named, strength, rows, "a")


HALF = patch(0.5, up=[[1.0, 0.0], [0.0, 1.0]], down=[[2.0, 0.0], [0.0, 4.0]], alpha=1.0)  # alpha / rank = 1/2
LOWER = patch(-1.0, (1, 2), up=[[3.0]], down=[[1.0, 1.0]])  # no alpha: scale 1
NAN = patch(0.0, up=[[math.nan], [1.0]], down=[[1.0, math.nan]])
MERGED = [[10.5, 10.0], [7.0, 8.0]]


@pytest.mark.parametrize("merger", [merging.one_by_one, merging.stacked])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merging_literals(merger: Any, dtype: torch.dtype) -> None:
    weight = torch.full((2, 2), 10.0, dtype=dtype)
    got = merger(weight, [HALF, LOWER, NAN])
    assert got.dtype == dtype
    assert got.tolist() == MERGED
    assert weight.tolist() == [[10.0, 10.0], [10.0, 10.0]]


def test_the_reference_merges_the_same_literals() -> None:
    weight = torch.full((2, 2), 10.0, dtype=torch.float64)
    assert merge.merged(Truth(), weight, [HALF, LOWER, NAN]).tolist() == MERGED


@pytest.mark.parametrize("merger", [merging.one_by_one, merging.stacked])
def test_many_small_patches_are_cast_once(merger: Any) -> None:
    """Each adds less than half a unit of bf16 at 1.0: cast after each, they would all be lost."""
    small = patch(up=[[1.0]], down=[[2.0**-10]])
    assert merger(torch.ones(1, 1, dtype=torch.bfloat16), [small] * 16).tolist() == [[1 + 16 * 2.0**-10]]


def test_a_merge_s_budget_is_one_rounding_not_one_a_patch() -> None:
    small = patch(up=[[1.0]], down=[[2.0**-10]])
    allowed = merge.budget(Truth(), torch.ones(1, 1, dtype=torch.float64), [small] * 16, "bf16")
    assert 2.0**-8 < allowed.item() < 1.1 * 2.0**-8


@pytest.mark.parametrize("merger", [merging.one_by_one, merging.stacked])
def test_what_has_no_delta_is_refused_by_name(merger: Any) -> None:
    weight: Tensor = torch.zeros(2, 2)
    with pytest.raises(LoadError, match="a: GLoRA has no delta to merge; remove the layer"):
        merger(weight, [Patch("glora", {}, 1.0, None, "a")])
    with pytest.raises(Refused, match=r"a: its factors do not fit a weight \(2, 2\)"):
        merger(weight, [patch(up=[[1.0], [1.0]], down=[[1.0, 1.0, 1.0]])])
    # Put together, the ranks of these two fit.
    high = patch(up=[[1.0, 1.0], [1.0, 1.0]], down=[[1.0, 1.0]])
    low = patch(up=[[1.0], [1.0]], down=[[1.0, 1.0], [1.0, 1.0]])
    with pytest.raises(Refused, match=r"a: its factors do not fit a weight \(2, 2\)"):
        merger(weight, [high, low])
