"""Adapter files written in every family and read back: the same layers, the same deltas, alpha folded once."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from written import (
    DOWN,
    UP,
    check_whole,
    delta,
    lora,
    made,
    read_delta,
    row_named,
    tensors_of,
    values,
    with_numbers,
    written,
)

from fulldiff.cases.tables import TableRow, load_table
from fulldiff.harness.files.base import layer_name
from fulldiff.harness.files.container import read_header
from fulldiff.harness.files.fold import fold, prepared, save
from fulldiff.harness.files.piece import Piece, UnspellableError
from fulldiff.harness.files.writers import WRITERS, Writer, spell

FILES = 2000
FORMS = ("lora", "mid", "lokr", "lokr low", "lokr tucker", "loha", "loha tucker", "diff")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def pool(model: str) -> list[TableRow]:
    """The layers that generated files adapt: the small ones, and of each text encoder a few."""
    known = load_table(model)
    small = [row for row in known if row.parameters <= 265_000 and not row.original.transposed]
    text = [row for row in known if row.part == "text_encoder" and row.name.endswith("0.self_attn.q_proj")]
    return small + text


POOLS = {model: pool(model) for model in ("sd15", "sdxl", "flux", "zimage")}


def holds(family: Writer, row: TableRow, form: str) -> bool:
    """What this test expects each family to hold, written without the writers' own table."""
    if family in ("kohya", "lycoris"):
        return True
    if family == "cloneofsimo":
        attention = ".attn" in row.name or "self_attn" in row.name or "net.0" in row.name
        return form == "lora" and row.model == "sd15" and attention
    if family == "comfyui":
        return not row.part.startswith("text") and form != "mid" and (form == "lora" or not row.original.rows)
    if family == "diffusers-old":
        return form == "lora"
    return form in {"diffusers": ("lora", "lokr", "lokr low"), "peft": FORMS[:1] + FORMS[2:7]}[family]


def draw_piece(draw: random.Random, family: Writer, model: str, taken: set[str]) -> Piece[Tensor] | None:
    row, form = draw.choice(POOLS[model]), draw.choice(FORMS)
    if layer_name(row) in taken or (row.original.rows and family == "comfyui") or not holds(family, row, form):
        return None
    kind, tensors = made(draw, row, form)
    dtype = draw.choice(DTYPES)
    factors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return Piece((row,), kind, with_numbers(draw, kind, factors))


def peft_groups(family: Writer, pieces: list[Piece[Tensor]]) -> list[Piece[Tensor]]:
    """PEFT and its config hold one kind on one part of a model."""
    first = pieces[0]
    same = [p for p in pieces if (p.kind, p.rows[0].part) == (first.kind, first.rows[0].part)]
    text = family == "peft" and first.rows[0].part.startswith("text") and first.rows[0].model == "sdxl"
    return [] if text else same if family == "peft" else pieces


def test_two_thousand_files_of_every_family_give_the_deltas_they_were_made_from(tmp_path: Path) -> None:
    draw, seen = random.Random(7), Counter[tuple[str, str]]()
    files = 0
    while files < FILES:
        family, model = draw.choice(WRITERS), draw.choice(tuple(POOLS))
        pieces: list[Piece[Tensor]] = []
        for _ in range(2):
            piece = draw_piece(draw, family, model, {layer_name(p.rows[0]) for p in pieces})
            pieces += [piece] if piece else []
        if not pieces or not (pieces := peft_groups(family, pieces)):
            continue
        path = tmp_path / f"{files}.safetensors"
        try:
            targets = written(path, family, pieces)
        except UnspellableError as refused:
            # PEFT makes a LoKr's and a LoHa's factors by rules of its own: see test_peft_config.
            assert (family, pieces[0].kind) in (("peft", "lokr"), ("peft", "loha")), refused
            continue
        by_name = {target.name: target for target in targets}
        assert len(targets) == len(pieces)
        for piece in pieces:
            check_whole(piece, by_name[layer_name(piece.rows[0])])
            seen[family, piece.kind] += 1
        for file in tmp_path.iterdir():
            file.unlink()
        files += 1
    assert {family for family, _ in seen} == set(WRITERS)
    assert {kind for _, kind in seen} == {"lora", "lokr", "loha", "diff"}
    assert {kind for family, kind in seen if family == "peft"} == {"lora", "lokr", "loha"}


# What goes where.

ROW = row_named("sd15", "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q")


@pytest.mark.parametrize("family", WRITERS)
def test_one_pair_gives_one_layer_and_one_delta_in_every_family(tmp_path: Path, family: Writer) -> None:
    piece = Piece((ROW,), "lora", lora(random.Random(3), 320, 320, 4, alpha=2.0))
    (target,) = written(tmp_path / "one.safetensors", family, [piece])
    assert target.name == ROW.name
    check_whole(piece, target)


@pytest.mark.parametrize("family", WRITERS)
def test_alpha_is_folded_exactly_once(family: Writer) -> None:
    piece = Piece((ROW,), "lora", lora(random.Random(3), 320, 320, 4, alpha=2.0))
    (once,) = prepared(family, [piece])
    (twice,) = prepared(family, [once])
    kept = family in ("kohya", "lycoris", "peft")
    factor = 1.0 if kept else 0.5
    assert torch.equal(once.tensors[UP], piece.tensors[UP] * factor)
    assert torch.equal(once.tensors[DOWN], piece.tensors[DOWN])
    assert ("alpha" in once.tensors) == (family in ("kohya", "lycoris"))
    assert {n: t.tolist() for n, t in once.tensors.items()} == {n: t.tolist() for n, t in twice.tensors.items()}
    (moved,) = prepared("kohya", prepared("peft", [piece]))
    assert float(moved.tensors["alpha"]) == 2.0
    assert (once.alpha, twice.alpha) == ((2.0, 2.0) if family == "peft" else (None, None))


@pytest.mark.parametrize("family", WRITERS)
def test_an_alpha_beyond_all_numbers_is_never_computed_with(tmp_path: Path, family: Writer) -> None:
    """Both factors full: trainers write inf there, and the scale is 1. Of a LoRA it cannot be folded."""
    full = {"lokr_w1": values(random.Random(1), 4, 4), "lokr_w2": values(random.Random(2), 80, 80)}
    inf = {"alpha": torch.tensor(torch.inf)}
    lokr = Piece((ROW,), "lokr", full | inf)
    if family in ("kohya", "lycoris", "diffusers", "peft", "comfyui"):
        check_whole(lokr, *written(tmp_path / "inf.safetensors", family, [lokr]))
    pair = Piece((ROW,), "lora", lora(random.Random(3), 320, 320, 4) | inf)
    if family not in ("kohya", "lycoris"):
        with pytest.raises(UnspellableError, match=r"a scale of inf cannot be folded"):
            fold(family, pair)


@pytest.mark.parametrize("family", ["kohya", "lycoris", "peft", "diffusers", "comfyui"])
def test_a_magnitude_comes_back(tmp_path: Path, family: Writer) -> None:
    tensors = lora(random.Random(3), 320, 320, 4, alpha=2.0) | {"dora_scale": torch.rand(320, 1).double() + 1}
    piece = Piece((ROW,), "lora", tensors)
    (target,) = written(tmp_path / "dora.safetensors", family, [piece])
    assert "dora_scale" in target.adapter.factors
    weight = values(random.Random(4), 320, 320)
    torch.testing.assert_close(read_delta(target, weight), delta(piece, ROW, weight), rtol=1e-12, atol=1e-12)


def test_cloneofsimos_metadata_says_classes_and_ranks(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    text = row_named("sd15", "text_model.encoder.layers.1.self_attn.v_proj")
    pieces = [Piece((ROW,), "lora", lora(random.Random(1), 320, 320, 4))]
    pieces += [Piece((text,), "lora", lora(random.Random(2), 768, 768, 2))]
    written(path, "cloneofsimo", pieces)
    found = read_header(path)
    assert set(found.tensors) == {"unet:0:up", "unet:0:down", "text_encoder:5:up", "text_encoder:5:down"}
    assert dict(found.metadata) == {
        "unet": '["Attention", "CrossAttention", "GEGLU"]',
        "unet:0:rank": "4",
        "text_encoder": '["CLIPAttention"]',
        "text_encoder:5:rank": "2",
    }


def test_pefts_config_has_ranks_and_alphas_by_module(tmp_path: Path) -> None:
    other = row_named("sd15", ROW.name.replace("to_q", "to_k"))
    pieces = [Piece((ROW,), "lora", lora(random.Random(1), 320, 320, 4, alpha=2.0))]
    pieces += [Piece((other,), "lora", lora(random.Random(2), 320, 320, 3))]
    targets = written(tmp_path / "adapter_model.safetensors", "peft", pieces)
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 2.0,
        "rank_pattern": {other.name: 3},
        "alpha_pattern": {other.name: 3.0},
        "target_modules": [ROW.name, other.name],
        "use_dora": False,
    }
    assert {target.alpha for target in targets} == {"metadata"}


def test_spelled_names() -> None:
    qkv = row_named("flux", "transformer_blocks.0.attn.to_q")
    old = row_named("sd15", ROW.name.replace("to_q", "to_out.0"))
    assert spell("kohya", qkv, UP) == "lora_unet_transformer_blocks_0_attn_to_q.lora_up.weight"
    assert spell("kohya", qkv, UP, stored=True) == "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"
    assert spell("comfyui", qkv, UP, stored=True) == "diffusion_model.double_blocks.0.img_attn.qkv.lora_B.weight"
    assert spell("diffusers", qkv, DOWN) == f"transformer.{qkv.name}.lora_A.weight"
    assert spell("peft", qkv, DOWN) == f"base_model.model.{qkv.name}.lora_A.weight"
    before = ROW.name.removesuffix("to_q")
    assert spell("diffusers-old", old, UP) == f"unet.{before}processor.to_out_lora.up.weight"


@pytest.mark.parametrize(
    ("family", "form", "message"),
    [
        ("comfyui", "mid", "comfyui files hold no lora_mid.weight"),
        ("diffusers", "loha", "diffusers files hold no hada_w1_a"),
        ("diffusers", "lokr tucker", "diffusers files hold no lokr_t2"),
        ("diffusers-old", "lokr", "diffusers-old files hold no lokr_w1"),
        ("peft", "diff", "peft files hold no diff"),
        ("peft", "mid", "peft files hold no lora_mid.weight"),
        ("cloneofsimo", "loha", "cloneofsimo files hold no hada_w1_a"),
    ],
)
def test_what_a_family_cannot_hold_is_refused_by_name(tmp_path: Path, family: Writer, form: str, message: str) -> None:
    row = row_named("sd15", "down_blocks.0.attentions.0.proj_in") if form == "mid" else ROW
    kind, tensors = made(random.Random(1), row, form)
    with pytest.raises(UnspellableError, match=re.escape(f"{row.name}: {message}")):
        save(tmp_path / "no.safetensors", family, [Piece((row,), kind, tensors)])
    assert not list(tmp_path.iterdir())


def test_pieces_that_have_no_place_are_refused_by_name(tmp_path: Path) -> None:
    draw, path = random.Random(1), tmp_path / "no.safetensors"
    text = row_named("sd15", "text_model.encoder.layers.0.mlp.fc1")
    query = row_named("flux", "transformer_blocks.0.attn.to_q")
    on_text = Piece((text,), "lora", lora(draw, 3072, 768, 2))
    pair = Piece((ROW,), "lora", lora(draw, 320, 320, 2))
    lokr = Piece((query,), "lokr", {"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(1536, 1536)})
    per_input = Piece((ROW,), "lora", dict(pair.tensors) | {"dora_scale": torch.ones(1, 320)})
    cases: list[tuple[Writer, list[Piece[Tensor]], str]] = [
        ("comfyui", [on_text], "name no text encoder"),
        ("cloneofsimo", [on_text], "do not count it"),
        ("peft", [on_text, pair], r"one part, not \['text_encoder', 'unet'\]|one kind on one part"),
        ("comfyui", [lokr], "on a slice cannot be fused"),
        ("peft", [per_input], "no DoRA magnitude per input"),
        ("kohya", [pair, pair], "would be written twice"),
    ]
    for family, pieces, message in cases:
        with pytest.raises(UnspellableError, match=message):
            save(path, family, pieces)
    assert not path.exists()


def test_fp8_factors_are_read_widened(tmp_path: Path) -> None:
    exact = {name: t.to(torch.float8_e4m3fn) for name, t in lora(random.Random(1), 320, 320, 2).items()}
    (target,) = written(tmp_path / "fp8.safetensors", "kohya", [Piece((ROW,), "lora", exact)])
    assert target.adapter.dtype == "f8_e4m3"
    for name, tensor in tensors_of(target).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, exact[name].float())
