"""The layer tables against counts, ground truths and the script that writes them."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from shared_files import shared

from fulldiff.cases import tables
from fulldiff.cases.tables import (
    TableError,
    TableRow,
    aliases,
    load_table,
    models,
    tokens,
)

Choice = Callable[[Iterable[TableRow]], list[TableRow]]
TRUTH_GROUPS = dict.fromkeys(("attention", "feed_forward", "projection"), "transformer")


def rows(model: str, *parts: str) -> list[TableRow]:
    return [row for row in load_table(model) if row.part in parts]


def one_row(model: str, name: str) -> TableRow:
    return next(row for row in load_table(model) if row.name == name)


def in_lora(some: Iterable[TableRow]) -> list[TableRow]:
    return [row for row in some if row.in_lora]


def in_locon(some: Iterable[TableRow]) -> list[TableRow]:
    return [row for row in some if row.in_locon]


def truth(name: str) -> list[dict[str, str]]:
    with shared("models", name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_models() -> None:
    assert models() == ("flux", "sd15", "sdxl", "zimage")


def test_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(TableError, match=r"no layer table for model 'sd3'.*choose from .*sdxl"):
        load_table("sd3")


def test_bad_row_names_file_line_and_remedy() -> None:
    row = dict.fromkeys(("kernel", "stride", "padding", "dilation"), "")
    with pytest.raises(TableError, match=r"sdxl\.csv, line 7: .*make_tables"):
        tables.read_row("sdxl", 7, {**row, "order": "first"})


# Counts, all derived by hand: 722 = 70 blocks × 10 + 11 transformers × 2,
# 66 = 17 ResNets × 3 + 11 shortcuts + 2 + 2 samplers, 6 more are inputs, outputs and embeddings.


@pytest.mark.parametrize(
    ("model", "part", "layers", "lora", "locon"),
    [
        ("sdxl", "unet", 794, 722, 788),
        ("sdxl", "text_encoder", 72, 72, 72),
        ("sdxl", "text_encoder_2", 193, 192, 192),
        ("sd15", "unet", 282, 192, 278),
        ("sd15", "text_encoder", 72, 72, 72),
        ("flux", "transformer", 504, 494, 494),
        ("flux", "text_encoder", 72, 72, 72),
        ("zimage", "transformer", 276, 270, 270),
    ],
)
def test_counts(model: str, part: str, layers: int, lora: int, locon: int) -> None:
    found = rows(model, part)
    assert (len(found), len(in_lora(found)), len(in_locon(found))) == (layers, lora, locon)
    assert [row.order for row in found] == list(range(layers))


def test_sdxl_convolutional_layers() -> None:
    convolutional = [row for row in in_locon(rows("sdxl", "unet")) if not row.in_lora]
    shortcuts = [row for row in convolutional if row.name.endswith("conv_shortcut")]
    samplers = [row for row in convolutional if row.group == "sampler"]
    assert (len(convolutional), len(shortcuts), len(samplers)) == (66, 11, 4)
    kernels = [row.kernel for row in convolutional if row.kind == "conv2d"]
    # The facts page counts conv_in and conv_out among its 3 × 3 convolutions.
    assert (kernels.count((3, 3)) + 2, kernels.count((1, 1))) == (40, 11)


@pytest.mark.parametrize(
    ("model", "parts", "chosen", "per_rank", "giga"),
    [
        ("sdxl", ("unet",), in_lora, 2_659_840, "2.208"),
        ("sdxl", ("unet",), in_locon, 3_074_240, "2.559"),
        ("sdxl", ("text_encoder", "text_encoder_2"), in_lora, 903_168, "0.714"),
        ("sd15", ("unet",), in_lora, 423_936, "0.267"),
        ("sd15", ("unet",), in_locon, 1_050_816, "0.857"),
    ],
)
def test_parameters(model: str, parts: tuple[str, ...], chosen: Choice, per_rank: int, giga: str) -> None:
    found = chosen(rows(model, *parts))
    assert sum(row.parameters_per_rank for row in found) == per_rank
    assert f"{sum(row.parameters for row in found) / 1e9:.3f}" == giga


def test_commonest_sdxl_shapes() -> None:
    shapes = [(row.out, row.inp) for row in rows("sdxl", "unet") if row.kind == "linear"]
    expected = {(1280, 1280): 381, (1280, 2048): 120, (640, 640): 70}
    expected |= {(10240, 1280): 60, (1280, 5120): 60}
    assert {shape: shapes.count(shape) for shape in expected} == expected


def test_row_as_layer() -> None:
    layer = one_row("sdxl", "down_blocks.0.downsamplers.0.conv").layer
    assert layer.weight_shape == (320, 320, 3, 3)
    assert (layer.stride, layer.padding, layer.dilation) == ((2, 2), (1, 1), (1, 1))
    assert all(row.layer.weight_shape == row.weight_shape for row in load_table("sdxl"))


# Agreement with the ground truths.


def truth_sizes(line: dict[str, str]) -> tuple[object, ...]:
    """Kind, sizes and bias; a truth file gives a stride or padding once for all axes."""
    kernel = tuple(int(size) for size in line["kernel"].split("x") if size)
    stride, padding = line.get("stride"), line.get("padding")
    return (
        line["kind"],
        int(line["out_features"]),
        int(line["in_features"]),
        kernel,
        (int(stride),) * len(kernel) if stride else (),
        (int(padding),) * len(kernel) if padding else (),
        line["bias"] == "1",
    )


def row_sizes(row: TableRow) -> tuple[object, ...]:
    return (row.kind, row.out, row.inp, row.kernel, row.stride, row.padding, row.bias)


@pytest.mark.parametrize("model", ["sdxl", "sd15"])
def test_unet_agrees_with_the_truth(model: str) -> None:
    found, expected = rows(model, "unet"), truth(f"{model}_unet_layers.csv")
    for row, line in zip(found, expected, strict=True):
        assert (row.name, row.original_name) == (line["diffusers_name"], line["original_name"])
        assert row_sizes(row) == truth_sizes(line), row.name
        assert {line["kohya_name"], line["kohya_ldm_name"]} <= set(aliases(row)), row.name
        flags = (line["in_kohya_lora"] == "1", line["in_locon"] == "1")
        assert (row.in_lora, row.in_locon) == flags, row.name
        assert TRUTH_GROUPS.get(row.group, row.group) == line["group"], row.name


@pytest.mark.parametrize("model", ["sdxl", "sd15"])
def test_text_encoders_agree_with_the_truth(model: str) -> None:
    found = rows(model, "text_encoder", "text_encoder_2")
    expected = truth(f"{model}_text_encoder_layers.csv")
    for row, line in zip(found, expected, strict=True):
        original = line["original_name"].replace(" (stored transposed, no .weight)", "[T]")
        assert (row.part, row.name) == (line["encoder"], line["diffusers_name"])
        assert row.original_name == original
        assert row_sizes(row) == truth_sizes(line), row.name
        assert line["kohya_name"] in aliases(row)
        assert row.in_lora == (line["in_kohya_lora"] == "1"), row.name


# Token counts.


@pytest.mark.parametrize(
    ("model", "name", "count"),
    [
        ("sdxl", "conv_in", 128 * 128),
        ("sdxl", "down_blocks.0.downsamplers.0.conv", 64 * 64),
        ("sdxl", "up_blocks.0.upsamplers.0.conv", 64 * 64),
        ("sdxl", "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", 4096),
        ("sdxl", "mid_block.attentions.0.transformer_blocks.9.ff.net.2", 1024),
        ("sdxl", "mid_block.attentions.0.transformer_blocks.9.attn2.to_q", 1024),
        ("sdxl", "mid_block.attentions.0.transformer_blocks.9.attn2.to_k", 77),
        ("sdxl", "mid_block.resnets.0.time_emb_proj", 1),
        ("sdxl", "text_model.encoder.layers.0.mlp.fc1", 77),
        ("sdxl", "text_projection", 1),
        ("sd15", "mid_block.attentions.0.proj_in", 256),
        ("flux", "transformer_blocks.0.attn.to_q", 4096),
        ("flux", "transformer_blocks.0.attn.add_q_proj", 512),
        ("flux", "single_transformer_blocks.0.proj_mlp", 4096 + 512),
        ("flux", "transformer_blocks.0.norm1.linear", 1),
        ("flux", "text_model.encoder.layers.0.mlp.fc1", 77),
        ("zimage", "noise_refiner.0.attention.to_q", 4096),
    ],
)
def test_tokens_at_1024(model: str, name: str, count: int) -> None:
    assert tokens(one_row(model, name), 1024, 1024) == count


def test_tokens_of_other_sizes() -> None:
    attention = one_row("sdxl", "mid_block.attentions.0.proj_in")
    assert tokens(attention, 832, 1216) == 26 * 38
    # 1000 pixels are 125 latent pixels, halved twice rounding up: 63, then 32.
    assert tokens(attention, 1000, 1000) == 32 * 32


@pytest.mark.parametrize(("model", "step"), [("sdxl", 8), ("flux", 16)])
def test_impossible_image_sizes(model: str, step: int) -> None:
    row = next(row for row in load_table(model) if row.tokens.startswith("spatial/2"))
    for height, width in ((1024, 1028), (0, 1024), (-16, 16)):
        with pytest.raises(ValueError, match=f"{model}: .*multiples of {step}"):
            tokens(row, height, width)


# The script and the import.


def test_tables_are_what_the_script_writes() -> None:
    for name in ("diffusers", "transformers", "torch"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'fulldiff[tables]'")
    command = [sys.executable, "-m", "fulldiff.cases.models.make_tables", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


def test_importing_the_tables_leaves_torch_alone() -> None:
    code = "import sys, fulldiff.cases.tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_tables_hold_no_carriage_returns() -> None:
    """The script's check compares text, so line ends must not depend on the system."""
    folder = Path(tables.__file__).parent / "models"
    assert all(b"\r" not in path.read_bytes() for path in folder.glob("*.csv"))
