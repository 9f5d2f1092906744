"""Folding for the writers, in workers only (torch): what a family of files cannot hold goes into a factor, once.

The product stays the same: an alpha is multiplied into one factor, slices of a fused layer get one pair of
factors, a fused pair is split by the rows of its up. Arithmetic is in float64 and cast once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fulldiff.cases.tables import TableRow
from fulldiff.harness.files.metadata import CONFIG
from fulldiff.harness.files.peft_config import CORES, TYPES, sizes
from fulldiff.harness.files.piece import Piece, UnspellableError
from fulldiff.harness.files.writers import Writer, Written, whole, write

UP, DOWN = "lora_up.weight", "lora_down.weight"
# The factor that takes the scale, and those whose first size is the rank, by kind.
CARRIERS = {"lora": (UP,), "lokr": ("lokr_w1", "lokr_w1_a"), "loha": ("hada_w1_a",)}
RANKS = {"lora": (DOWN,), "lokr": ("lokr_w2_b", "lokr_w1_b"), "loha": ("hada_w1_b",)}
NUMBERS = ("alpha", "scale")
# Families that keep alpha as a tensor; PEFT keeps it in its config.
KEEP_ALPHA: tuple[Writer, ...] = ("kohya", "lycoris")


def save(path: Path, family: Writer, pieces: Iterable[Piece[Tensor]]) -> None:
    """Write the pieces as a safetensors file of ``family``; PEFT's config goes beside it.

    Raises:
        UnspellableError: the family cannot hold one of them.
    """
    put(path, write(family, prepared(family, pieces)))


def put(path: Path, written: Written[Tensor]) -> None:
    """Write spelled tensors and their metadata; PEFT's config goes beside them."""
    tensors = {name: tensor.contiguous() for name, tensor in written.tensors.items()}
    save_file(tensors, path, written.metadata or None)
    if written.config is not None:
        path.with_name(CONFIG).write_text(json.dumps(written.config, indent=1), encoding="utf-8")


def prepared(family: Writer, pieces: Iterable[Piece[Tensor]]) -> list[Piece[Tensor]]:
    """The pieces as ``family`` holds them."""
    folded = [fold(family, piece) for piece in pieces]
    if family == "comfyui":
        return list(fused(folded))
    if family == "kohya":
        return folded
    return [part for piece in folded for part in (split(piece) if piece.stored else [piece])]


def fold(family: Writer, piece: Piece[Tensor]) -> Piece[Tensor]:
    """The piece with its scale where the family keeps it."""
    rank = rank_of(piece)
    magnitude = magnitude_for(family, piece)
    known = replace(piece, rank=rank, tensors=dict(piece.tensors) | magnitude)
    if family in KEEP_ALPHA:
        return scale_as_alpha(known)
    if family == "peft" and piece.kind in TYPES:
        return for_peft(known)
    return scaled(known)


def for_peft(piece: Piece[Tensor]) -> Piece[Tensor]:
    """The piece with the scale as an alpha for PEFT's config, and its tensors in the shapes of PEFT's parameters.

    A LoKr of whole factors gets the rank from which on PEFT keeps both whole.
    """
    kernel, rank = piece.rows[0].kernel, piece.rank
    if rank is None:
        rank = max(max(own) for own in sizes(piece)) if piece.kind == "lokr" else 1
    tensors = _without_numbers(piece.tensors)
    for name, tensor in tensors.items():
        if name in CORES and tensor.dim() == 3:  # a conv1d's cores have a second spatial dimension there
            tensors[name] = tensor.unsqueeze(-1)
        elif name == "dora_scale" and kernel:
            tensors[name] = tensor.reshape(1, -1, *[1] * len(kernel))
        elif name in (UP, DOWN) and tensor.dim() == 2:
            tensors[name] = tensor.reshape(tensor.shape[0], -1, *(kernel if name == DOWN else [1] * len(kernel)))
        elif name == "lokr_w2":
            tensors[name] = tensor.reshape(*tensor.shape[:1], -1, *kernel)
        elif name in ("lokr_w2_b", "hada_w1_b", "hada_w2_b"):
            tensors[name] = tensor.flatten(1)
    return replace(piece, tensors=tensors, rank=rank, alpha=finite_scale(piece) * rank)


def scaled(piece: Piece[Tensor]) -> Piece[Tensor]:
    """The piece with its scale multiplied into one factor, and no alpha."""
    scale, tensors = finite_scale(piece), _without_numbers(piece.tensors)
    carrier = next((name for name in CARRIERS.get(piece.kind, ()) if name in tensors), None)
    if carrier is not None and scale != 1:
        tensors[carrier] = (tensors[carrier].to(torch.float64) * scale).to(tensors[carrier].dtype)
    return replace(piece, tensors=tensors, alpha=None)


def finite_scale(piece: Piece[Tensor]) -> float:
    """The piece's scale where it is a number that can be multiplied with.

    Raises:
        UnspellableError: it is infinite or no number.
    """
    scale = scale_of(piece)
    if not math.isfinite(scale):
        raise UnspellableError(f"{piece.rows[0].name}: a scale of {scale} cannot be folded; write kohya")
    return scale


def scale_of(piece: Piece[Tensor]) -> float:
    """alpha / rank; 1 without an alpha, and where no factor is decomposed, whatever alpha says."""
    if "scale" in piece.tensors:
        return float(piece.tensors["scale"].reshape(()))
    rank = rank_of(piece)
    alpha = float(piece.tensors["alpha"].reshape(())) if "alpha" in piece.tensors else piece.alpha
    return 1.0 if alpha is None or rank is None else alpha / rank


def rank_of(piece: Piece[Tensor]) -> int | None:
    """The rank that alpha is divided by."""
    return next((piece.tensors[n].shape[0] for n in RANKS.get(piece.kind, ()) if n in piece.tensors), None)


def scale_as_alpha(piece: Piece[Tensor]) -> Piece[Tensor]:
    """A ``scale``, or an alpha from a config, as the alpha tensor that gives it, which every reader knows."""
    if "scale" not in piece.tensors and ("alpha" in piece.tensors or piece.alpha is None):
        return piece
    alpha = torch.tensor(scale_of(piece) * (piece.rank or 1), dtype=torch.float64)
    return replace(piece, tensors=_without_numbers(piece.tensors) | {"alpha": alpha}, alpha=None)


def magnitude_for(family: Writer, piece: Piece[Tensor]) -> dict[str, Tensor]:
    """PEFT's magnitude is one-dimensional and per output row.

    Raises:
        UnspellableError: the piece's is per input.
    """
    magnitude = piece.tensors.get("dora_scale")
    if magnitude is None or family not in ("peft", "diffusers"):
        return {}
    if magnitude.shape[0] != sum(row.out for row in piece.rows) or magnitude.numel() != magnitude.shape[0]:
        raise UnspellableError(f"{piece.rows[0].name}: {family} files hold no DoRA magnitude per input; write kohya")
    return {"dora_scale": magnitude.reshape(-1)}


def fused(pieces: list[Piece[Tensor]]) -> Iterator[Piece[Tensor]]:
    """Slices of one stored tensor as one piece; the others as they are."""
    groups: dict[str, list[Piece[Tensor]]] = {}
    for piece in pieces:
        if whole(piece.rows) and not piece.stored:
            groups.setdefault(piece.rows[0].original.path, []).append(piece)
        else:
            yield piece
    for group in groups.values():
        yield fuse(group)


def fuse(pieces: list[Piece[Tensor]]) -> Piece[Tensor]:
    """One pair for the stored layer of these slices: downs one below the other, ups block by block.

    A slice that no piece adapts is rows of zeros, of its own size.

    Raises:
        UnspellableError: a piece is no plain LoRA.
    """
    for piece in pieces:
        if set(piece.tensors) != {UP, DOWN}:
            raise UnspellableError(
                f"{piece.rows[0].name}: {piece.kind} {sorted(piece.tensors)} on a slice cannot be fused; write kohya"
            )
    rows = whole(pieces[0].rows)
    down = torch.cat([piece.tensors[DOWN] for piece in pieces])
    up = down.new_zeros(sum(row.out for row in rows), down.shape[0])
    column = 0
    for piece in pieces:
        part = piece.tensors[UP].flatten(1)
        start = 0
        for first, last in _ranges(piece.rows):
            up[first:last, column : column + part.shape[1]] = part[start : start + last - first]
            start += last - first
        column += part.shape[1]
    return Piece(rows, "lora", {UP: up, DOWN: down}, stored=True, rank=down.shape[0])


def split(piece: Piece[Tensor]) -> list[Piece[Tensor]]:
    """A stored layer's pair as one per slice: the down is shared, never split; each has its rows of the up.

    Raises:
        UnspellableError: the piece is no LoRA, whose product alone has rows that can be taken.
    """
    if not set(piece.tensors) <= {UP, DOWN, *NUMBERS}:
        raise UnspellableError(
            f"{piece.rows[0].original.path}: {piece.kind} {sorted(piece.tensors)} cannot be split; write kohya"
        )
    parts = []
    for row in piece.rows:
        up = torch.cat([piece.tensors[UP][first:last] for first, last in _ranges((row,))])
        tensors = {name: tensor.clone() for name, tensor in piece.tensors.items()} | {UP: up}
        parts.append(replace(piece, rows=(row,), tensors=tensors, stored=False))
    return parts


def _ranges(rows: tuple[TableRow, ...]) -> list[tuple[int, int]]:
    """The rows of the stored tensor that these layers are, in the layers' order."""
    return [bounds for row in rows for bounds in row.original.rows]


def _without_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in NUMBERS}
