"""Checkpoint files as the base that adapter files are matched to."""

from __future__ import annotations

import dataclasses

import pytest
from headers import BLOCK, GOOD, account, header, pair

from fulldiff.cases.model import Shape
from fulldiff.cases.tables import load_table, models
from fulldiff.harness.files.base import table
from fulldiff.harness.files.checkpoint import checkpoint
from fulldiff.harness.files.container import FileError, Header
from fulldiff.harness.files.match import Match, MatchError, match

# Checkpoints.


def weights(names: dict[str, Shape], **rest: object) -> Header:
    return header({f"{name}.weight": shape for name, shape in names.items()}, **rest)  # type: ignore[arg-type]


def small(model: str, divisor: int, original: bool, prefix: str = "") -> Header:
    """A model of ``model``'s names and a fraction of its sizes."""
    shapes: dict[str, Shape] = {}
    for row in load_table(model):
        if row.part.startswith("text"):
            continue
        size = (row.out // divisor, row.inp // divisor if row.inp >= divisor else row.inp, *row.kernel)
        path = prefix + row.original.path.removeprefix("model.diffusion_model.") if original else row.name
        held = shapes.get(path, (0,))[0] if original and row.original.rows else 0
        shapes[path] = (held + size[0], *size[1:])
    return weights(shapes)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("divisor", [1, 32])
def test_a_checkpoint_with_fused_layers(prefix: str, divisor: int) -> None:
    base = checkpoint(small("flux", divisor, True, prefix))
    size = 3072 // divisor
    assert base.model == "flux"
    whole = {f"{BLOCK}.lora_B.weight": (3 * size, 2), f"{BLOCK}.lora_A.weight": (2, size)}
    part = "transformer.transformer_blocks.0.attn.to_v"
    shapes = whole | {f"{part}.lora_B.weight": (size, 2), f"{part}.lora_A.weight": (2, size)}
    fused, one = match(header(shapes), base).targets
    assert fused.name == one.name == "double_blocks.0.img_attn.qkv"
    assert fused.layer == one.layer and fused.layer.out == 3 * size
    assert (fused.adapter.rows, one.adapter.rows) == (None, (2 * size, 3 * size))
    assert fused.weights == one.weights == (f"{prefix}double_blocks.0.img_attn.qkv.weight",)


def test_a_checkpoint_with_separate_layers_takes_a_fused_adapter() -> None:
    base = checkpoint(small("flux", 32, False))
    shapes = {f"{BLOCK}.lora_B.weight": (288, 2), f"{BLOCK}.lora_A.weight": (2, 96)}
    (target,) = match(header(shapes), base).targets
    assert (target.layer.out, target.layer.inp) == (288, 96)
    assert target.weights == tuple(f"transformer_blocks.0.attn.to_{p}.weight" for p in "qkv")


def test_rows_that_no_range_holds_are_refused_on_a_fused_checkpoint() -> None:
    base = checkpoint(small("flux", 32, True))
    module = "transformer.norm_out.linear"
    shapes: dict[str, Shape] = {f"{module}.lora_B.weight": (192, 2), f"{module}.lora_A.weight": (2, 96)}
    with pytest.raises(MatchError, match="no one range of final_layer"):
        match(header(shapes), base)


@pytest.mark.parametrize("model", ["sdxl", "sd15"])
@pytest.mark.parametrize("original", [False, True])
def test_a_unets_checkpoint_takes_both_kinds_of_names(model: str, original: bool) -> None:
    base = checkpoint(small(model, 1, original, "model.diffusion_model." if original else ""))
    assert base.model == model
    names = [row for row in load_table(model) if row.part == "unet" and row.in_lora]
    kohya = {f"lora_unet_{row.name.replace('.', '_')}": row for row in names}
    shapes: dict[str, Shape] = {}
    for module, row in kohya.items():
        shapes |= pair(module, row.out, row.inp)
    found = match(header(shapes), base)
    account(found, shapes)
    assert len(found.targets) == len(names)


def test_a_checkpoint_that_no_table_knows_has_its_own_names() -> None:
    base = checkpoint(weights({"blocks.0.lin": (8, 6), "blocks.0.conv": (8, 6, 3), "token_embedding": (9, 4)}))
    assert base.model is None
    shapes = pair("lora_unet_blocks_0_lin", 8, 6) | {
        "diffusion_model.blocks.0.conv.lora_A.weight": (2, 6, 3),
        "diffusion_model.blocks.0.conv.lora_B.weight": (8, 2, 1),
    }
    found = match(header(shapes), base)
    assert [(t.name, t.layer.kind, t.layer.padding) for t in found.targets] == [
        ("blocks.0.lin", "linear", ()),
        ("blocks.0.conv", "conv1d", (1,)),
    ]


def test_a_checkpoint_without_layers_is_refused() -> None:
    with pytest.raises(FileError, match=r"made\.safetensors: none of its 1 tensors is a layer's weight"):
        checkpoint(header({"norm.weight": (8,)}))


@pytest.mark.parametrize("model", models())
def test_every_layer_of_every_table_has_a_name_that_means_it_alone(model: str) -> None:
    base = table(model)
    reached = {place.rows for found in base.places.values() if len(found) == 1 for place in found}
    assert {(row,) for row in load_table(model)} <= reached


def test_a_match_is_a_value() -> None:
    found = match(header(GOOD), table("sdxl"))
    assert isinstance(found, Match)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.base = "flux"  # type: ignore[misc]
