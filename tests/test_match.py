"""Adapter files matched to models: real listings whole, every spelling, fused layers."""

from __future__ import annotations

import json

import pytest
from headers import BLOCK, DOWN, LAYER, RANK, account, header, listing, only_refusal, pair, totals
from shared_files import shared

from fulldiff.cases.model import Shape
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import read_header
from fulldiff.harness.files.match import MatchError, match

# Real listings.


@pytest.mark.parametrize(
    ("name", "model", "targets", "family"),
    [
        ("invokeai__flux_lora_kohya_format", "flux", 304, "kohya"),
        ("invokeai__flux_lora_kohya_with_te1_format", "flux", 376, "kohya"),
        ("invokeai__flux_lora_diffusers_format", "flux", 494, "diffusers"),
        ("invokeai__flux_lora_diffusers_v2_format", "flux", 190, "diffusers"),
        ("invokeai__flux_lora_diffusers_base_model_format", "flux", 381, "peft"),
        ("invokeai__flux_lora_aitoolkit_format", "flux", 228, "comfyui"),
        ("invokeai__flux_lora_diffusers_dora_format", "flux", 266, "kohya"),
        ("invokeai__flux_lora_xlabs_format", "flux", 12, "xlabs"),
        ("lora_inspector__sdxl_lokr_names", "sdxl", 1052, "kohya"),
        ("cloneofsimo__analog_svd_rank4", "sd15", 192, "cloneofsimo"),
        ("cloneofsimo__lora_disney", "sd15", 192, "cloneofsimo"),
    ],
)
def test_a_real_listing_is_matched_whole(name: str, model: str, targets: int, family: str) -> None:
    head = listing(name, model)
    found = match(head, table(model))
    account(found, head.tensors)
    assert (len(found.targets), found.unmatched, found.refused) == (targets, (), ())
    assert {target.adapter.spelling for target in found.targets} == {family}
    assert len({target.name for target in found.targets}) == targets


@pytest.mark.parametrize(
    ("name", "model", "modules"),
    [("sdxl_kohya_module_names", "sdxl", 722), ("sd15_kohya_boo_module_names", "sd15", 264)],
)
def test_a_listing_of_modules_is_matched_with_factors_of_true_shapes(name: str, model: str, modules: int) -> None:
    names = json.loads(shared("state_dicts", f"lora_inspector__{name}.json").read_text())
    shapes: dict[str, Shape] = {}
    for module in names:
        (place,) = table(model).find(module)
        shapes |= pair(module, place.layer.out, place.layer.inp)
    found = match(header(shapes), table(model))
    account(found, shapes)
    assert len(found.targets) == modules


def test_alphas_alone_are_orphans_and_nothing_is_matched() -> None:
    head = listing("lora_inspector__sd15_kohya_boo_alpha_names", "sd15")
    with pytest.raises(MatchError, match="264 of its 264 modules are those of sd15") as error:
        match(head, table("sd15"))
    account(error.value.match, head.tensors)
    assert totals(error.value.match) == {"skipped": 264}


def test_a_flux_lokr_of_other_sizes_is_refused_by_name() -> None:
    head = listing("invokeai__flux_lokr_bfl_format", "flux")
    with pytest.raises(MatchError, match=r"names of 6 of its 6 modules are those of flux.*\(1024, 3072\)") as error:
        match(head, table("flux"))
    account(error.value.match, head.tensors)
    assert totals(error.value.match) == {"refused": 18}


def test_a_name_of_a_whole_embedder_is_refused_with_its_layers() -> None:
    head = listing("lora_inspector__flux_kohya_with_io_layers_names", "flux")
    found = match(head, table("flux"))
    account(found, head.tensors)
    reasons = {refused.module: refused.reason for refused in found.refused}
    assert set(reasons) == {f"lora_unet_{name}_in" for name in ("guidance", "time", "vector")}
    first, second = (f"time_text_embed.timestep_embedder.linear_{n}" for n in (1, 2))
    assert reasons["lora_unet_time_in"] == f"its name means 2 layers, not one: {first}, {second}"
    assert len(found.targets) == 119 - 3


@pytest.mark.parametrize(
    ("name", "model", "base"),
    [
        ("invokeai__flux_lora_kohya_format", "flux", "sdxl"),
        ("invokeai__flux_lora_kohya_with_te1_format", "flux", "sdxl"),
        ("invokeai__flux_lora_diffusers_format", "flux", "sd15"),
        ("lora_inspector__sdxl_lokr_names", "sdxl", "flux"),
        ("lora_inspector__sdxl_lokr_names", "sdxl", "sd15"),
        ("cloneofsimo__lora_disney", "sd15", "sdxl"),
        ("invokeai__flux_lora_aitoolkit_format", "flux", "zimage"),
    ],
)
def test_a_file_of_another_model_is_refused_with_a_guess(name: str, model: str, base: str) -> None:
    with pytest.raises(MatchError, match=rf"{base}, .*it was made for {model} "):
        match(listing(name, model), table(base))


@pytest.mark.parametrize("name", ["analog_svd_rank4", "lora_disney"])
def test_a_real_adapters_shapes_fit_position_by_position(name: str) -> None:
    head = read_header(shared("adapters", f"{name}.safetensors"))
    found = match(head, table("sd15"))
    account(found, head.tensors)
    counts = {part: dict(fates) for part, fates in found.counts.items()}
    embeddings = {"other": {"skipped": 2}} if name == "lora_disney" else {}
    assert counts == {"unet": {"matched": 288}, "text_encoder": {"matched": 96}} | embeddings
    assert [s.tensor for s in found.skipped] == (["<s1>", "<s2>"] if embeddings else [])
    assert {target.adapter.dtype for target in found.targets} == {"f32" if embeddings else "f16"}


def test_the_text_encoders_order_is_the_one_the_deltas_sizes_show() -> None:
    """Training moves q and k alike, and v and out alike: the file's sizes pair up so under the order used."""
    import torch

    from fulldiff.harness.realise import read

    found = match(read_header(shared("adapters", "analog_svd_rank4.safetensors")), table("sd15"))
    sizes: dict[str, float] = {}
    for target in found.targets:
        if target.rows[0].part == "text_encoder" and target.adapter.source:
            t = {name: tensor.double() for name, tensor in read(target.adapter.source).items()}
            sizes[target.name] = float(torch.linalg.norm(t["lora_up.weight"] @ t["lora_down.weight"]))

    def gap(one: str, two: str) -> float:
        layers = [f"text_encoder.text_model.encoder.layers.{n}.self_attn" for n in range(12)]
        return sum(abs(sizes[f"{at}.{one}_proj"] - sizes[f"{at}.{two}_proj"]) for at in layers)

    assert max(gap("q", "k"), gap("v", "out")) * 3 < min(gap("q", "v"), gap("q", "out"), gap("k", "v"), gap("k", "out"))


# One layer, every spelling.

SPELLINGS: dict[str, tuple[str, str, str]] = {
    "kohya": (LAYER, "lora_up.weight", "lora_down.weight"),
    "kohya ldm": ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", "lora_up.weight", "lora_down.weight"),
    "lycoris": (LAYER.replace("lora_unet", "lycoris"), "lora_up.weight", "lora_down.weight"),
    "diffusers": (f"unet.{DOWN}attn1.to_q", "lora.up.weight", "lora.down.weight"),
    "linear layer": (f"unet.{DOWN}attn1.to_q", "lora_linear_layer.up.weight", "lora_linear_layer.down.weight"),
    "processor": (f"unet.{DOWN}attn1.processor", "to_q_lora.up.weight", "to_q_lora.down.weight"),
    "peft": (f"base_model.model.{DOWN}attn1.to_q", "lora_B.weight", "lora_A.weight"),
    "peft named": (f"base_model.model.{DOWN}attn1.to_q", "lora_B.default.weight", "lora_A.default.weight"),
    "peft bare": (f"{DOWN}attn1.to_q", "lora_B", "lora_A"),
    "double prefix": (f"unet.base_model.model.{DOWN}attn1.to_q", "lora_B.weight", "lora_A.weight"),
    "comfyui": (
        "diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q", "lora_up.weight", "lora_down.weight"
    ),
    "checkpoint": (
        "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q", "lora_B.weight", "lora_A.weight"
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_means_the_same_layer_and_factors(spelling: str) -> None:
    module, up, down = SPELLINGS[spelling]
    found = match(header({f"{module}.{up}": (640, RANK), f"{module}.{down}": (RANK, 640)}), table("sdxl"))
    (target,) = found.targets
    assert target.name == f"{DOWN}attn1.to_q"
    assert dict(target.adapter.factors) == {"lora_up.weight": (640, RANK), "lora_down.weight": (RANK, 640)}
    assert target.adapter.source
    assert dict(target.adapter.source.tensors) == {
        "lora_up.weight": f"{module}.{up}",
        "lora_down.weight": f"{module}.{down}",
    }
    assert (target.alpha, target.adapter.dtype) == ("assumed", "bf16")


def test_several_spellings_in_one_file_are_several_adapters_that_sum() -> None:
    shapes: dict[str, Shape] = {}
    for rank, (module, up, down) in enumerate(SPELLINGS.values(), start=1):
        shapes |= {f"{module}.{up}": (640, rank), f"{module}.{down}": (rank, 640)}
    found = match(header(shapes), table("sdxl"))
    account(found, shapes)
    assert len(found.targets) == len(shapes) // 2
    assert {target.name for target in found.targets} == {f"{DOWN}attn1.to_q"}


def test_text_encoders_of_sdxl_are_told_apart() -> None:
    path = "text_model_encoder_layers_0_self_attn_q_proj"
    shapes = pair(f"lora_te1_{path}", 768, 768) | pair(f"lora_te2_{path}", 1280, 1280)
    found = match(header(shapes), table("sdxl"))
    assert [target.name.split(".")[0] for target in found.targets] == ["text_encoder", "text_encoder_2"]
    bare = {n.replace(f"lora_te1_{path}", "text_model.encoder.layers.0.self_attn.q_proj"): s for n, s in shapes.items()}
    (refused,) = match(header(bare), table("sdxl")).refused
    assert "means 2 layers" in refused.reason


# Fused layers.


def test_a_fused_name_is_one_target_on_the_fused_layer() -> None:
    shapes = {f"{BLOCK}.lora_B.weight": (9216, RANK), f"{BLOCK}.lora_A.weight": (RANK, 3072)}
    (target,) = match(header(shapes), table("flux")).targets
    assert target.name == "double_blocks.0.img_attn.qkv"
    assert [row.name[-4:] for row in target.rows] == ["to_q", "to_k", "to_v"]
    assert (target.layer.out, target.layer.inp, target.adapter.rows) == (9216, 3072, None)


def test_linear1_has_parts_of_unequal_sizes() -> None:
    name = "lora_unet_single_blocks_7_linear1"
    (target,) = match(header(pair(name, 21504, 3072)), table("flux")).targets
    assert [row.out for row in target.rows] == [3072, 3072, 3072, 12288]
    assert target.layer.out == 21504
    assert "(9216, 4)" in only_refusal(pair(name, 9216, 3072), "flux")


@pytest.mark.parametrize(("number", "stream"), [(1, "img"), (2, "txt")])
def test_xlabs_numbers_are_streams(number: int, stream: str) -> None:
    module = f"double_blocks.3.processor.qkv_lora{number}"
    shapes = {f"{module}.up.weight": (9216, RANK), f"{module}.down.weight": (RANK, 3072)}
    (target,) = match(header(shapes), table("flux")).targets
    assert (target.name, target.adapter.spelling) == (f"double_blocks.3.{stream}_attn.qkv", "xlabs")


def test_xlabs_single_qkv_is_a_part_of_linear1() -> None:
    module = "single_blocks.3.processor.qkv_lora"
    shapes = {f"{module}.up.weight": (9216, RANK), f"{module}.down.weight": (RANK, 3072)}
    (target,) = match(header(shapes), table("flux")).targets
    assert (target.name, target.layer.out, target.adapter.rows) == ("single_blocks.3.linear1", 21504, (0, 9216))


def test_a_layer_stored_in_another_row_order_is_told_by_its_name() -> None:
    """BFL's final layer has (shift, scale), diffusers' (scale, shift): the same shape, not the same rows."""
    for module, name in (
        ("transformer.norm_out.linear", "norm_out.linear"),
        ("diffusion_model.final_layer.adaLN_modulation.1", "final_layer.adaLN_modulation.1"),
        ("lora_unet_final_layer_adaLN_modulation_1", "final_layer.adaLN_modulation.1"),
    ):
        shapes = {f"{module}.lora_up.weight": (6144, RANK), f"{module}.lora_down.weight": (RANK, 3072)}
        (target,) = match(header(shapes), table("flux")).targets
        assert (target.name, target.rows[0].name) == (name, "norm_out.linear")
