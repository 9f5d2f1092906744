"""Fused layers and their slices: fused with zeros for what is missing, split by the rows of the up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from written import (
    DOWN,
    lora,
    narrow_delta,
    row_named,
    stored_ranges,
    tensors_of,
    written,
)

from fulldiff.harness.files.fold import fuse, save, split
from fulldiff.harness.files.piece import Piece, UnspellableError
from fulldiff.harness.files.writers import WRITERS, Writer, whole

FUSED = {
    "flux img qkv": ("flux", "transformer_blocks.4.attn.to_q"),
    "flux txt qkv": ("flux", "transformer_blocks.4.attn.add_k_proj"),
    "flux linear1": ("flux", "single_transformer_blocks.4.proj_mlp"),
    "flux final": ("flux", "norm_out.linear"),
    "zimage qkv": ("zimage", "layers.4.attention.to_v"),
}


@pytest.mark.parametrize("case", FUSED)
@pytest.mark.parametrize("absent", [0, 1])
def test_slices_are_fused_with_zero_rows_of_the_missing_parts_own_size(tmp_path: Path, case: str, absent: int) -> None:
    """Also the final layer, one slice whose rows are stored in another order."""
    draw = random.Random(case)
    group = whole((row_named(*FUSED[case]),))
    known = group[absent:] or group
    pieces = [
        Piece((row,), "lora", lora(draw, row.out, row.inp, rank, alpha=3.0)) for rank, row in enumerate(known, start=1)
    ]
    (target,) = written(tmp_path / "fused.safetensors", "comfyui", pieces)
    assert (target.rows, target.name) == (group, group[0].original.path)
    delta = narrow_delta(tensors_of(target), target.layer.out)
    made = {piece.rows[0].name: narrow_delta(dict(piece.tensors), piece.rows[0].out) for piece in pieces}
    for row in group:
        wanted = made.get(row.name, torch.zeros(row.out, 8, dtype=torch.float64))
        torch.testing.assert_close(stored_ranges(row, delta), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("case", FUSED)
def test_a_fused_pair_is_kept_whole_or_split_by_the_ups_rows(tmp_path: Path, family: Writer, case: str) -> None:
    group = whole((row_named(*FUSED[case]),))
    out = sum(row.out for row in group)
    tensors = lora(random.Random(case), out, group[0].inp, 3, alpha=2.0)
    piece = Piece(group, "lora", tensors, stored=True)
    if family == "cloneofsimo":
        with pytest.raises(UnspellableError, match="cloneofsimo files do not count it"):
            save(tmp_path / "no.safetensors", family, [piece])
        return
    targets = written(tmp_path / "split.safetensors", family, [piece])
    delta = narrow_delta(tensors, out)
    if family in ("kohya", "comfyui"):
        (target,) = targets
        assert target.layer.out == out
        torch.testing.assert_close(narrow_delta(tensors_of(target), out), delta, rtol=1e-12, atol=1e-12)
        return
    assert sorted(target.name for target in targets) == sorted(row.name for row in group)
    for target in targets:
        adapter, (row,) = target.adapter, target.rows
        found = tensors_of(target)
        assert found[DOWN].shape == (3, row.inp)
        if adapter.alpha.form != "absent":
            found["alpha"] = torch.tensor(adapter.alpha.value)
        torch.testing.assert_close(narrow_delta(found, row.out), stored_ranges(row, delta), rtol=1e-12, atol=1e-12)


def test_fusing_and_splitting_undo_each_other() -> None:
    draw, group = random.Random(1), whole((row_named("flux", "transformer_blocks.0.attn.to_q"),))
    pieces = [Piece((row,), "lora", lora(draw, row.out, row.inp, 2)) for row in group]
    parts = split(fuse(pieces))
    for piece, part in zip(pieces, parts, strict=True):
        one, other = (narrow_delta(dict(p.tensors), p.rows[0].out) for p in (piece, part))
        assert torch.equal(one, other)
