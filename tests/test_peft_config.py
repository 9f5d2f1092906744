"""PEFT's config: the values from which PEFT makes the very factors of a piece, or a refusal that names the layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from written import row_named

from fulldiff.harness.files import fold
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import read_header
from fulldiff.harness.files.match import matched
from fulldiff.harness.files.peft_config import decompose_factor, split, split_sorted
from fulldiff.harness.files.piece import Piece, UnspellableError
from fulldiff.harness.subjects.peers.files import model_of

LINEAR = row_named("sd15", "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q")
CONV = row_named("sd15", "conv_in")


def piece(out: int, inp: int, *kernel: int, name: str = "", **shapes: tuple[int, ...]) -> Piece[Tensor]:
    """A LoKr or LoHa of ones with a LoKr's factors named w1, w2_a …, on a layer of these sizes."""
    row = CONV if kernel else LINEAR
    row = msgspec.structs.replace(row, out=out, inp=inp, kernel=kernel, name=name or row.name)
    kind = "lokr" if any(factor.startswith("w1") and "hada" not in factor for factor in shapes) else "loha"
    named = {factor if kind == "loha" else f"lokr_{factor}": torch.ones(shape) for factor, shape in shapes.items()}
    return Piece((row,), kind, named | {"alpha": torch.tensor(3.0)})


def config(folder: Path, *pieces: Piece[Tensor]) -> dict[str, Any]:
    fold.save(folder / "adapter_model.safetensors", "peft", pieces)
    read: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return read


@pytest.mark.parametrize(
    ("size", "factor", "parts"),
    [
        (12, -1, (3, 4)), (128, -1, (8, 16)), (127, -1, (1, 127)), (25, -1, (5, 5)), (1, -1, (1, 1)),
        (128, 4, (4, 32)), (128, 32, (32, 4)), (20, 3, (2, 10)), (12, 5, (3, 4)), (100, 7, (5, 20)),
    ],
)  # fmt: skip
def test_a_size_is_split_by_hand(size: int, factor: int, parts: tuple[int, int]) -> None:
    assert split(size, factor) == parts


@pytest.mark.parametrize(("module", "ours"), [("peft.tuners.lokr.layer", split), ("lycoris.functional", split_sorted)])
def test_sizes_are_split_as_they_split_them(module: str, ours: Callable[[int, int], tuple[int, int]]) -> None:
    theirs = pytest.importorskip(module).factorization
    for size in (*range(1, 65), 320, 640, 1280, 2048, 2560, 4096):
        for factor in (-1, *range(1, 20), 64, 1280):
            assert ours(size, factor) == theirs(size, factor), (size, factor)


def test_one_factor_for_all_layers() -> None:
    assert decompose_factor([((3, 4), (4, 5))]) == -1
    assert decompose_factor([((3, 2), (4, 10))]) == 3
    assert decompose_factor([((8, 8), (160, 160)), ((8, 8), (80, 96))]) == 8
    assert decompose_factor([((4, 5), (3, 4))]) is None
    assert decompose_factor([((8, 8), (160, 160)), ((4, 4), (80, 80))]) is None


def test_the_config_says_what_the_forms_follow_from(tmp_path: Path) -> None:
    low = piece(30, 25, w1_a=(5, 2), w1_b=(2, 5), w2_a=(6, 2), w2_b=(2, 5))
    assert config(tmp_path, low) == {
        "peft_type": "LOKR", "r": 2, "alpha": 3.0, "rank_pattern": {}, "alpha_pattern": {},
        "target_modules": [LINEAR.name], "use_effective_conv2d": False, "decompose_factor": -1, "decompose_both": True,
    }  # fmt: skip


def test_whole_factors_have_a_rank_from_which_they_are_whole_and_no_scale(tmp_path: Path) -> None:
    made = config(tmp_path, piece(30, 25, w1=(5, 5), w2=(6, 5)))
    assert (made["r"], made["alpha"], made["decompose_both"]) == (6, 6.0, False)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece(30, 25, w1=(3, 5), w2=(10, 5))], "no decompose_factor"),
        ([piece(30, 25, w1=(4, 5), w2=(7, 5))], "w1 is 4×5, which does not divide the layer's 30×25"),
        ([piece(30, 25, w1=(5, 5), w2_a=(6, 3), w2_b=(3, 5))], "at rank 3 PEFT has w2 whole"),
        ([piece(30, 25, w1_a=(5, 3), w1_b=(3, 5), w2=(6, 5))], "at rank 3 PEFT has w1 whole"),
        ([piece(30, 25, w1_a=(5, 1), w1_b=(1, 5), w2_a=(6, 2), w2_b=(2, 5))], "one rank for w1 and w2"),
        (
            [
                piece(30, 25, w1_a=(5, 2), w1_b=(2, 5), w2_a=(6, 2), w2_b=(2, 5)),
                piece(30, 25, name="other", w1=(5, 5), w2_a=(6, 2), w2_b=(2, 5)),
            ],
            "other: at rank 2 PEFT has w1 as two factors",
        ),
        (
            [
                piece(30, 25, 3, 2, w1=(5, 5), t2=(2, 2, 3, 2), w2_a=(2, 6), w2_b=(2, 5)),
                piece(30, 25, 3, 2, name="other", w1=(5, 5), w2_a=(6, 2), w2_b=(2, 30)),
            ],
            "other: PEFT has Tucker cores on all",
        ),
    ],
)
def test_what_peft_would_make_otherwise_is_refused(tmp_path: Path, pieces: list[Piece[Tensor]], message: str) -> None:
    with pytest.raises(UnspellableError, match=message):
        config(tmp_path, *pieces)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "one",
    [
        piece(30, 25, w1_a=(5, 2), w1_b=(2, 5), w2_a=(6, 2), w2_b=(2, 5)),
        piece(30, 25, w1=(5, 5), w2=(6, 5)),
        piece(30, 25, 3, 2, w1=(5, 5), t2=(2, 2, 3, 2), w2_a=(2, 6), w2_b=(2, 5)),
        piece(30, 25, 3, 2, w1=(5, 5), w2_a=(6, 2), w2_b=(2, 30)),
        piece(30, 25, 3, 2, hada_w1_a=(30, 2), hada_w1_b=(2, 150), hada_w2_a=(30, 2), hada_w2_b=(2, 150)),
    ],
)
def test_peft_makes_the_same_factors(tmp_path: Path, one: Piece[Tensor]) -> None:
    peft = pytest.importorskip("peft")
    config(tmp_path, one)
    row = one.rows[0]
    layer = nn.Conv2d(row.inp, row.out, row.kernel) if row.kernel else nn.Linear(row.inp, row.out)
    model = peft.PeftModel(model_of(row.name, layer), peft.PeftConfig.from_pretrained(str(tmp_path)), "a")
    before = {name for name, _ in model.named_parameters() if "_w1" in name or "_w2" in name or "_t2" in name}
    result = model.load_adapter(str(tmp_path), "a")
    assert not result.unexpected_keys
    loaded = {name: p for name, p in model.named_parameters() if name in before}
    assert len(loaded) == len(one.tensors) - 1
    assert all(torch.equal(p, torch.ones_like(p)) for p in loaded.values())


def test_whole_factors_that_peft_scales_are_refused_and_others_are_read(tmp_path: Path) -> None:
    own = piece(LINEAR.out, LINEAR.inp, w1=(4, 4), w2=(LINEAR.out // 4, LINEAR.inp // 4))
    made = config(tmp_path, own)
    for share, says in ((1, ""), (0.5, "alpha / r = 0.5")):
        (tmp_path / "adapter_config.json").write_text(json.dumps(made | {"alpha": made["r"] * share}))
        found = matched(read_header(tmp_path / "adapter_model.safetensors"), table("sd15"))
        assert [len(found.targets), len(found.refused)] == ([0, 1] if says else [1, 0])
        assert all(says in refused.reason for refused in found.refused)
