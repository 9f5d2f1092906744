"""The names of the tables' layers: real files' names resolve, fused layers and originals."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import msgspec
import pytest
from shared_files import shared

from fulldiff.cases.tables import TableError, TableRow, aliases, load_table


def rows(model: str, part: str) -> list[TableRow]:
    return [row for row in load_table(model) if row.part == part]


def one_row(model: str, name: str) -> TableRow:
    return next(row for row in load_table(model) if row.name == name)


@cache
def alias_index(model: str) -> dict[str, tuple[TableRow, ...]]:
    """Every alias of ``model`` and the rows it means, several for a fused layer."""
    index: dict[str, tuple[TableRow, ...]] = {}
    for row in load_table(model):
        for alias in aliases(row):
            index[alias] = (*index.get(alias, ()), row)
    return index


def listed_modules(name: str) -> set[str]:
    """Module names of a listing of tensor names (its own kohya ``.suffix`` taken off)."""
    return {key.split(".")[0] for key in json.loads(shared("state_dicts", name).read_text())}


@pytest.mark.parametrize(
    ("model", "listing", "modules"),
    [
        ("sdxl", "lora_inspector__sdxl_kohya_module_names.json", 722),
        ("sdxl", "lora_inspector__sdxl_lokr_names.json", 1052),
        ("sd15", "lora_inspector__sd15_kohya_boo_module_names.json", 264),
        ("flux", "invokeai__flux_lora_kohya_format.json", 304),
        ("flux", "invokeai__flux_lora_kohya_with_te1_format.json", 376),
    ],
)
def test_kohya_names_resolve(model: str, listing: str, modules: int) -> None:
    names = listed_modules(listing)
    assert len(names) == modules
    assert sorted(names - alias_index(model).keys()) == []


def test_the_kohya_listing_is_the_lora_set() -> None:
    names = listed_modules("lora_inspector__sdxl_kohya_module_names.json")
    assert names == {aliases(row)[0] for row in rows("sdxl", "unet") if row.in_lora}


@pytest.mark.parametrize(
    ("listing", "suffixes"),
    [
        ("invokeai__flux_lora_diffusers_format.json", (".lora_A.weight", ".lora_B.weight")),
        ("invokeai__flux_lora_aitoolkit_format.json", (".lora_A.weight", ".lora_B.weight")),
        ("invokeai__flux_lora_diffusers_v2_format.json", (".lora.down.weight", ".lora.up.weight")),
        ("invokeai__flux_lokr_bfl_format.json", (".lokr_w1", ".lokr_w2", ".alpha")),
    ],
)
def test_dotted_flux_names_resolve(listing: str, suffixes: tuple[str, ...]) -> None:
    keys = json.loads(shared("state_dicts", listing).read_text())
    names = {key.removesuffix(suffix) for key in keys for suffix in suffixes if key.endswith(suffix)}
    assert sorted(names - alias_index("flux").keys()) == []


@pytest.mark.parametrize(
    ("listing", "down", "up", "pairs"),
    [
        ("invokeai__flux_lora_kohya_format.json", "lora_down", "lora_up", 304),
        ("invokeai__flux_lora_aitoolkit_format.json", "lora_A", "lora_B", 228),
        ("invokeai__flux_lora_diffusers_format.json", "lora_A", "lora_B", 494),
    ],
)
def test_real_flux_factors_fit(listing: str, down: str, up: str, pairs: int) -> None:
    """A fused layer's up has the rows of all its slices together; they share one input."""
    shapes = json.loads(shared("state_dicts", listing).read_text())
    names = [key.removesuffix(f".{down}.weight") for key in shapes if f".{down}." in key]
    assert len(names) == pairs
    for name in names:
        found = alias_index("flux")[name]
        assert shapes[f"{name}.{up}.weight"][0] == sum(row.out for row in found), name
        assert {shapes[f"{name}.{down}.weight"][1]} == {row.inp for row in found}, name


def test_dora_flux_names_resolve() -> None:
    names = listed_modules("invokeai__flux_lora_diffusers_dora_format.json")
    assert sorted(names - alias_index("flux").keys()) == []


def test_flux_names_of_a_whole_embedder_are_no_layer() -> None:
    """A listing names ``time_in`` and two more, which hold two layers each: not resolvable."""
    names = listed_modules("lora_inspector__flux_kohya_with_io_layers_names.json")
    embedders = {f"lora_unet_{name}_in" for name in ("guidance", "time", "vector")}
    assert names - alias_index("flux").keys() == embedders


# Aliases.


def test_aliases_of_a_unet_layer() -> None:
    name = "up_blocks.1.attentions.2.transformer_blocks.0.attn1.to_out.0"
    assert set(aliases(one_row("sdxl", name))) == {
        "lora_unet_up_blocks_1_attentions_2_transformer_blocks_0_attn1_to_out_0",
        "lora_unet_output_blocks_5_1_transformer_blocks_0_attn1_to_out_0",
        "lycoris_up_blocks_1_attentions_2_transformer_blocks_0_attn1_to_out_0",
        f"unet.{name}",
        name,
        "unet.up_blocks.1.attentions.2.transformer_blocks.0.attn1.processor.to_out",
        "up_blocks.1.attentions.2.transformer_blocks.0.attn1.processor.to_out",
        "diffusion_model.output_blocks.5.1.transformer_blocks.0.attn1.to_out.0",
    }


@pytest.mark.parametrize(
    ("model", "part", "prefix"),
    [
        ("sd15", "text_encoder", "lora_te_"),
        ("sdxl", "text_encoder", "lora_te1_"),
        ("sdxl", "text_encoder_2", "lora_te2_"),
        ("flux", "text_encoder", "lora_te1_"),
    ],
)
def test_aliases_of_a_text_encoder_layer(model: str, part: str, prefix: str) -> None:
    row = next(row for row in rows(model, part) if row.name.endswith("layers.3.mlp.fc1"))
    path = "text_model.encoder.layers.3.mlp.fc1"
    assert aliases(row) == (prefix + path.replace(".", "_"), f"{part}.{path}")


def test_sd15_sampler_after_a_block_without_attention() -> None:
    """ldm numbers an upsampler 1 there, 2 elsewhere."""
    names = {row.name: row.original.path for row in rows("sd15", "unet")}
    place = "model.diffusion_model.output_blocks"
    assert names["up_blocks.0.upsamplers.0.conv"] == f"{place}.2.1.conv"
    assert names["up_blocks.1.upsamplers.0.conv"] == f"{place}.5.2.conv"


@pytest.mark.parametrize("model", ["flux", "sd15", "sdxl", "zimage"])
def test_a_shared_alias_is_a_fused_layer(model: str) -> None:
    """Several rows of one name tile one stored tensor: no gap, no overlap."""
    for alias, found in alias_index(model).items():
        if len(found) > 1:
            assert len({row.original.path for row in found}) == 1, alias
            ranges = sorted(bounds for row in found for bounds in row.original.rows)
            assert ranges[0][0] == 0, alias
            assert all(a[1] == b[0] for a, b in pairwise(ranges)), alias


@pytest.mark.parametrize("model", ["flux", "sd15", "sdxl", "zimage"])
def test_row_ranges_have_the_layers_size(model: str) -> None:
    for row in load_table(model):
        sizes = [end - start for start, end in row.original.rows]
        assert sum(sizes) == (row.out if sizes else 0), row.name


def test_originals() -> None:
    qkv = alias_index("flux")["diffusion_model.double_blocks.7.img_attn.qkv"]
    assert [row.name[-4:] for row in qkv] == ["to_q", "to_k", "to_v"]
    assert len(alias_index("flux")["lora_unet_single_blocks_7_linear1"]) == 4
    swapped = one_row("flux", "norm_out.linear").original
    assert swapped.rows == ((3072, 6144), (0, 3072))
    assert one_row("sdxl", "text_projection").original.transposed


def test_bad_original_name_is_refused() -> None:
    row = msgspec.structs.replace(one_row("sdxl", "conv_in"), original_name="a.b[q]")
    with pytest.raises(TableError, match=r"sdxl\.csv: conv_in: .*'a\.b\[q\]'"):
        _ = row.original
