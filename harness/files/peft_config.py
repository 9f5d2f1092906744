"""PEFT's adapter_config.json. Which factors PEFT makes, and of what sizes, is not in its tensors: it follows from here.

Source: PEFT 0.21.2, `tuners/lora`, `tuners/lokr/layer.py` and `tuners/loha/layer.py`. A LoKr's w1 and w2 have the
sizes of `split` by ``decompose_factor``; w2, and with ``decompose_both`` w1 too, has two factors of rank r where r is
below half of its larger size, else it is whole. ``use_effective_conv2d`` gives kernels that are not all 1 Tucker cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fulldiff.harness.files.piece import Piece, UnspellableError

TYPES = {"lora": "LORA", "lokr": "LOKR", "loha": "LOHA"}
CORES = frozenset({"lokr_t2", "hada_t1", "hada_t2"})
Sizes = tuple[tuple[int, int], tuple[int, int]]


def peft_config(pieces: Sequence[Piece[Any]]) -> dict[str, Any]:
    """Ranks and alphas by module, the first's as the default, and what the kind's forms follow from.

    Raises:
        UnspellableError: the pieces are of several kinds or parts of the model, which need a file each, or PEFT
            would make other factors on a layer than the piece has.
    """
    kinds, parts = {piece.kind for piece in pieces}, {piece.rows[0].part for piece in pieces}
    if len(kinds) != 1 or len(parts) != 1:
        raise UnspellableError(f"a PEFT file holds one kind on one part, not {sorted(kinds)} on {sorted(parts)}")
    kind = kinds.pop()
    if kind not in TYPES:
        raise UnspellableError(f"PEFT has no files of kind {kind}; write kohya")
    ranks = {piece.rows[0].name: piece.rank or 1 for piece in pieces}
    alphas = {
        piece.rows[0].name: float(ranks[piece.rows[0].name] if piece.alpha is None else piece.alpha) for piece in pieces
    }
    first = pieces[0].rows[0].name
    return {
        "peft_type": TYPES[kind],
        "r": ranks[first],
        "lora_alpha" if kind == "lora" else "alpha": alphas[first],
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != ranks[first]},
        "alpha_pattern": {name: alpha for name, alpha in alphas.items() if alpha != alphas[first]},
        "target_modules": list(ranks),
    } | _forms(kind, pieces)


def _forms(kind: str, pieces: Sequence[Piece[Any]]) -> dict[str, Any]:
    """What one kind's config has beside ranks and alphas."""
    if kind == "lora":
        return {"use_dora": "dora_scale" in pieces[0].tensors}
    made: dict[str, Any] = {"use_effective_conv2d": any(CORES & piece.tensors.keys() for piece in pieces)}
    if kind == "lokr":
        factor = decompose_factor([sizes(piece) for piece in pieces])
        if factor is None:
            name = pieces[0].rows[0].name
            raise UnspellableError(
                f"{name}: no decompose_factor gives w1 and w2 of all layers their sizes; write lycoris"
            )
        both = any("lokr_w1_a" in piece.tensors for piece in pieces)
        made |= {"decompose_factor": factor, "decompose_both": both}
    for piece in pieces:
        _check(piece, made["use_effective_conv2d"], made.get("decompose_both", False))
    return made


def _check(piece: Piece[Any], use_effective_conv2d: bool, decompose_both: bool) -> None:
    """Raises UnspellableError where PEFT would make other factors of the layer."""
    row, rank = piece.rows[0], piece.rank or 1
    wide = math.prod(row.kernel) > 1
    whole = False
    if piece.kind == "lokr":
        w1, w2 = sizes(piece)
        if "lokr_w1_b" in piece.tensors and piece.tensors["lokr_w1_b"].shape[0] != rank:
            raise UnspellableError(f"{row.name}: PEFT has one rank for w1 and w2; write lycoris")
        whole = rank >= max(w2) / 2
        for name, is_whole in (("w1", not (decompose_both and rank < max(w1) / 2)), ("w2", whole)):
            if is_whole != (f"lokr_{name}" in piece.tensors):
                form = "whole" if is_whole else "as two factors"
                raise UnspellableError(f"{row.name}: at rank {rank} PEFT has {name} {form}; write lycoris")
    if (use_effective_conv2d and wide and not whole) != bool(CORES & piece.tensors.keys()):
        raise UnspellableError(
            f"{row.name}: PEFT has Tucker cores on all of a file's low-rank layers with a kernel beyond 1, or on none; "
            "write lycoris"
        )


def sizes(piece: Piece[Any]) -> Sizes:
    """A LoKr's w1 (up, uq) and w2 (vp, vq).

    Raises:
        UnspellableError: w1's do not divide the layer's.
    """
    t, row = piece.tensors, piece.rows[0]
    up = (t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"]).shape[0]
    uq = (t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_b"]).shape[1]
    if row.out % up or row.inp % uq:
        raise UnspellableError(f"{row.name}: w1 is {up}×{uq}, which does not divide the layer's {row.out}×{row.inp}")
    return (up, uq), (row.out // up, row.inp // uq)


def split(size: int, factor: int) -> tuple[int, int]:
    """How PEFT splits a size in two: by ``factor``, where that divides it.

    Else into the two divisors that are nearest each other, the smaller one at most ``factor`` (-1: of any size).
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = min(math.isqrt(size), factor if factor > 0 else size)
    small = next(divisor for divisor in range(most, 0, -1) if size % divisor == 0)
    return small, size // small


def split_sorted(size: int, factor: int) -> tuple[int, int]:
    """How LyCORIS splits a size: as PEFT does, the smaller part first."""
    small, large = sorted(split(size, factor))
    return small, large


def decompose_factor(layers: Sequence[Sizes], rule: Callable[[int, int], tuple[int, int]] = split) -> int | None:
    """The factor by which ``rule`` gives every layer's w1 and w2 their sizes; None where none does."""
    wanted = {(one * other, (one, other)) for w1, w2 in layers for one, other in zip(w1, w2, strict=True)}
    tried = (-1, *range(1, max(max(parts) for _, parts in wanted) + 1))
    return next((f for f in tried if all(rule(size, f) == parts for size, parts in wanted)), None)
