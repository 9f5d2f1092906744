"""Adapter files in every family of names: which tensor name a factor of a layer gets, and what goes beside.

Pure Python: tensors are passed through untouched. What a family cannot hold (an alpha in most, a slice of a
fused layer in ComfyUI's names) must have been folded before, by `fulldiff.harness.files.fold` in a worker;
here it is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, Literal, get_args

from fulldiff.cases.tables import KOHYA_TEXT_PREFIXES, LDM_PREFIX, TableRow, load_table, underscored
from fulldiff.harness.files.names import DIFF, LOHA, LOKR, LORA
from fulldiff.harness.files.peft_config import peft_config
from fulldiff.harness.files.piece import Piece, T, UnspellableError
from fulldiff.harness.files.positions import CLASSES, positions

Writer = Literal["kohya", "lycoris", "diffusers", "diffusers-old", "peft", "comfyui", "cloneofsimo"]
WRITERS: tuple[Writer, ...] = get_args(Writer)
PAIR = LORA[:2]
KOHYA_FACTORS = frozenset((*LORA, *LOKR, *LOHA, *DIFF, "dora_scale", "alpha"))
HOLDS: dict[Writer, frozenset[str]] = {
    "kohya": KOHYA_FACTORS,
    "lycoris": KOHYA_FACTORS,
    "diffusers": frozenset((*PAIR, *LOKR, "dora_scale")) - {"lokr_t2"},
    "diffusers-old": frozenset(PAIR),
    "peft": frozenset((*PAIR, *LOKR, *LOHA, "dora_scale")),
    "comfyui": frozenset((*PAIR, *LOKR, *LOHA, *DIFF, "dora_scale")),
    "cloneofsimo": frozenset(PAIR),
}
PEFT_SUFFIXES = {
    "lora_down.weight": "lora_A.weight",
    "lora_up.weight": "lora_B.weight",
    "dora_scale": "lora_magnitude_vector",
}


@dataclass(frozen=True)
class Written(Generic[T]):
    """What to write: tensors by name, the file's metadata, and PEFT's config beside it."""

    tensors: dict[str, T] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None


def write(family: Writer, pieces: Iterable[Piece[T]]) -> Written[T]:
    """Every piece under its names in ``family``.

    Raises:
        UnspellableError: the family cannot hold a piece, or two pieces get one name.
    """
    known = list(pieces)
    tensors: dict[str, T] = {}
    for piece in known:
        for factor, tensor in piece.tensors.items():
            name = spell(family, piece.rows[0], factor, piece.stored)
            if name in tensors:
                raise UnspellableError(f"{name} would be written twice; write one adapter per layer")
            tensors[name] = tensor
    if family == "cloneofsimo":
        return Written(tensors, positional_metadata(known))
    return Written(tensors, config=peft_config(known) if family == "peft" else None)


def spell(family: Writer, row: TableRow, factor: str, stored: bool = False) -> str:
    """The name of a row's factor in ``family``; ``stored`` means the original checkpoint's whole tensor.

    Raises:
        UnspellableError: the family has no name for it.
    """
    if factor not in HOLDS[family]:
        raise UnspellableError(f"{row.name}: {family} files hold no {factor}; fold it, or write kohya")
    if stored and (family not in ("kohya", "comfyui") or not row.original.rows):
        raise UnspellableError(f"{row.name}: {family} files name no fused layer; split it, or write kohya")
    module = module_name(family, row, stored)
    return f"{module}{suffix(family, row, factor)}"


def module_name(family: Writer, row: TableRow, stored: bool) -> str:
    """A layer's name without the factor's suffix."""
    text = row.part.startswith("text_encoder")
    if family in ("kohya", "lycoris"):
        return kohya_name(family, row, stored)
    if family == "peft":
        return f"base_model.model.{row.name}"
    if family == "cloneofsimo":
        return position(row)
    if family == "comfyui":
        if text or (row.original.rows and not stored):
            raise UnspellableError(f"{row.name}: comfyui files name no {'text encoder' if text else 'slice'}; fuse it")
        return f"diffusion_model.{row.original.path.removeprefix(LDM_PREFIX)}"
    if family == "diffusers-old" and ".to_" in row.name and row.part == "unet":
        return f"unet.{row.name.replace('.to_', '.processor.to_').replace('to_out.0', 'to_out')}"
    return f"{row.part}.{row.name}"


def kohya_name(family: Writer, row: TableRow, stored: bool) -> str:
    """A name with underscores. A transformer's layers have their original path, where it means the row alone."""
    if row.part.startswith("text_encoder"):
        return KOHYA_TEXT_PREFIXES[row.model][row.part] + underscored(row.name)
    original = family == "kohya" and row.part == "transformer" and (stored or not row.original.rows)
    path = row.original.path if original else row.name
    return f"{'lora_unet' if family == 'kohya' else 'lycoris'}_{underscored(path)}"


def position(row: TableRow) -> str:
    """cloneofsimo's ``unet:12``.

    Raises:
        UnspellableError: the format does not count the layer, or does not know the model.
    """
    try:
        return _positions_of(row.model)[(row.part, row.name)]
    except KeyError:
        raise UnspellableError(f"{row.model} {row.name}: cloneofsimo files do not count it; write kohya") from None


@cache
def _positions_of(model: str) -> dict[tuple[str, str], str]:
    return {(row.part, row.name): name for name, row in positions(model, load_table(model)).items()}


def suffix(family: Writer, row: TableRow, factor: str) -> str:
    """What stands behind a layer's name, its separator included."""
    side = factor.removeprefix("lora_").removesuffix(".weight")
    if family == "cloneofsimo":
        return f":{side}"
    if family == "diffusers-old":
        old = "_lora" if ".to_" in row.name and row.part == "unet" else ".lora"
        return f".lora_linear_layer.{side}.weight" if row.part.startswith("text") else f"{old}.{side}.weight"
    if family in ("diffusers", "peft", "comfyui"):
        kept = family == "comfyui" and factor == "dora_scale"
        return f".{factor if kept else PEFT_SUFFIXES.get(factor, factor)}"
    return f".{factor}"


def positional_metadata(pieces: Iterable[Piece[T]]) -> dict[str, str]:
    """cloneofsimo's: the classes whose modules are counted, and each one's rank."""
    metadata: dict[str, str] = {}
    for piece in pieces:
        name = position(piece.rows[0])
        part = name.partition(":")[0]
        metadata[part] = json.dumps(sorted(CLASSES[part]))
        metadata[f"{name}:rank"] = str(piece.rank)
    return metadata


def whole(rows: tuple[TableRow, ...]) -> tuple[TableRow, ...]:
    """All rows that share the stored tensor of these, in stored order; empty for a layer stored as it is."""
    path = rows[0].original.path
    if not rows[0].original.rows:
        return ()
    return tuple(sorted(_stored(rows[0].model)[path], key=lambda row: row.original.rows[0]))


@cache
def _stored(model: str) -> dict[str, list[TableRow]]:
    found: dict[str, list[TableRow]] = {}
    for row in load_table(model):
        found.setdefault(row.original.path, []).append(row)
    return found
