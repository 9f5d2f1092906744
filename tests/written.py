"""Random adapters, written and read back, and what they add to a layer."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

from fulldiff.cases.tables import TableRow, load_table
from fulldiff.harness import realise
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import read_header
from fulldiff.harness.files.fold import save
from fulldiff.harness.files.match import Target, match
from fulldiff.harness.files.piece import Piece
from fulldiff.harness.files.writers import Writer
from fulldiff.reference.truth import Factors, Truth

UP, DOWN = "lora_up.weight", "lora_down.weight"
COLUMNS = slice(100, 108)
"""A fused layer is large: it is compared on these inputs."""


def row_named(model: str, name: str) -> TableRow:
    return next(row for row in load_table(model) if row.name == name)


def values(draw: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


def made(draw: random.Random, row: TableRow, form: str) -> tuple[str, dict[str, Tensor]]:
    """Random factors of one form for a layer: its kind and tensors, without alpha."""
    out, inp, *kernel = row.weight_shape
    r, ones = draw.choice((1, 2, 3, 4)), [1] * len(kernel)
    up, uq = draw.choice([d for d in (1, 2, 4) if out % d == 0]), draw.choice([d for d in (1, 2, 4) if inp % d == 0])
    flat = inp * torch.Size(kernel).numel()
    shapes: dict[str, tuple[int, ...]] = {
        "lora": {UP: (out, r, *ones), DOWN: (r, inp, *kernel)},
        "mid": {UP: (out, r, *ones), DOWN: (r, inp, *ones), "lora_mid.weight": (r, r, *kernel)},
        "lokr": {"lokr_w1": (up, uq), "lokr_w2": (out // up, inp // uq, *kernel)},
        "lokr low": {"lokr_w1_a": (up, 1), "lokr_w1_b": (1, uq), "lokr_w2_a": (out // up, r),
                     "lokr_w2_b": (r, flat // uq)},
        "lokr tucker": {"lokr_w1": (up, uq), "lokr_t2": (r, r, *kernel), "lokr_w2_a": (r, out // up),
                        "lokr_w2_b": (r, inp // uq)},
        "loha": {"hada_w1_a": (out, r), "hada_w1_b": (r, flat), "hada_w2_a": (out, r), "hada_w2_b": (r, flat)},
        "loha tucker": {"hada_t1": (r, r, *kernel), "hada_w1_a": (r, out), "hada_w1_b": (r, inp),
                        "hada_t2": (r, r, *kernel), "hada_w2_a": (r, out), "hada_w2_b": (r, inp)},
        "diff": {"diff": (out, inp, *kernel)},
    }[form]  # fmt: skip
    kind = {"mid": "lora", "diff": "diff"}.get(form, form.split()[0])
    return kind, {name: values(draw, *shape) for name, shape in shapes.items()}


def with_numbers(draw: random.Random, kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with no alpha, or one of any form; sometimes a LoRA's ``scale``."""
    form = draw.choice(["none", "alpha", "alpha", "scale" if kind == "lora" else "alpha"])
    number = torch.tensor(draw.choice((0.5, 1.0, 8.0, 3.0, 0.0)), dtype=torch.float32)
    return tensors | ({} if form == "none" else {form: number.reshape(draw.choice(((), (1,), (1, 1))))})


def delta(piece: Piece[Tensor], row: TableRow, weight: Tensor) -> Tensor:
    tensors = {name: tensor.double() for name, tensor in piece.tensors.items()}
    return Truth().delta(Factors(piece.kind, tensors), weight)


def read_delta(target: Target, weight: Tensor) -> Tensor:
    """What a target of a written file adds to its layer's weight."""
    adapter = target.adapter
    assert adapter.source
    tensors = {name: tensor.double() for name, tensor in realise.read(adapter.source).items()}
    if adapter.alpha.form != "absent":
        tensors["alpha"] = torch.tensor(adapter.alpha.value, dtype=torch.float64)
    return Truth().delta(Factors(adapter.kind, tensors, rows=adapter.rows), weight)


def written(path: Path, family: Writer, pieces: list[Piece[Tensor]]) -> tuple[Target, ...]:
    """The targets of a file of these pieces; nothing of it may be left over."""
    save(path, family, pieces)
    found = match(read_header(path), table(pieces[0].rows[0].model))
    assert not (found.unmatched or found.skipped or found.refused), found.describe()
    return found.targets


def check_whole(piece: Piece[Tensor], target: Target) -> None:
    """One layer's delta, all of it, within the rounding of its factors' dtype."""
    (row,) = piece.rows
    weight = torch.zeros(row.weight_shape, dtype=torch.float64)
    wanted, got = delta(piece, row, weight), read_delta(target, weight)
    dtype = next(iter(piece.tensors.values())).dtype
    tolerance = 8 * torch.finfo(dtype).eps * float(wanted.abs().max())
    assert float((wanted - got).abs().max()) <= tolerance, (row.name, target.adapter)


def lora(draw: random.Random, out: int, inp: int, rank: int, **numbers: float) -> dict[str, Tensor]:
    factors = {UP: values(draw, out, rank), DOWN: values(draw, rank, inp)}
    return factors | {name: torch.tensor(number) for name, number in numbers.items()}


def narrow(tensors: dict[str, Tensor]) -> Factors:
    """A LoRA on a few of the layer's inputs."""
    found = {name: t.double() for name, t in tensors.items()}
    return Factors("lora", found | {DOWN: found[DOWN][:, COLUMNS]})


def narrow_delta(tensors: dict[str, Tensor], out: int) -> Tensor:
    return Truth().delta(narrow(tensors), torch.zeros(out, COLUMNS.stop - COLUMNS.start, dtype=torch.float64))


def tensors_of(target: Target) -> dict[str, Tensor]:
    assert target.adapter.source
    return realise.read(target.adapter.source)


def stored_ranges(row: TableRow, delta: Tensor) -> Tensor:
    """A slice's rows of a stored layer's delta, in the slice's own order."""
    return torch.cat([delta[start:end] for start, end in row.original.rows])
