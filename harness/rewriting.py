"""The worker's side of `fulldiff convert`: write a file's adapters under another family's names, and compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fulldiff.harness.convert import is_stored
from fulldiff.harness.files import fold
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import read_header
from fulldiff.harness.files.match import Target, match
from fulldiff.harness.files.writers import Piece, UnspellableError, Writer
from fulldiff.harness.protocol import Claim, Compare, Judgement, Part, Write
from fulldiff.harness.realise import adapter_tensors
from fulldiff.reference.bounds import UNIT_ROUNDOFF
from fulldiff.reference.factors import Factors
from fulldiff.reference.truth import Truth

# The folded factor is rounded once; half as much again for the sums in float64 and subnormal numbers.
ROUNDINGS = 1.5
# fp8 factors are widened to f32 and stay so in the new file; others keep their dtype.
ROUNDOFF = UNIT_ROUNDOFF | {"f8_e4m3": UNIT_ROUNDOFF["f32"], "f8_e5m2": UNIT_ROUNDOFF["f32"]}
MAGNITUDE = "dora_scale"


def write(request: Write) -> int:
    """Write the file; how many modules it has then.

    Raises:
        UnspellableError: the family cannot hold one of them.
    """
    found = match(read_header(Path(request.path)), table(request.model))
    pieces = [_piece(target) for target in found.targets]
    family: Writer = request.family  # type: ignore[assignment]
    fold.save(Path(request.out), family, pieces)
    return len(pieces)


def _piece(target: Target) -> Piece[Tensor]:
    if target.adapter.rows:
        raise UnspellableError(f"{target.module}: adapts a part of a stored layer, which no other family names")
    return Piece(target.rows, target.adapter.kind, adapter_tensors(target.adapter), is_stored(target))


def compare(request: Compare) -> Judgement:
    """Passed where the two sums of deltas differ by no more than rounding one factor of each may cause."""
    deltas, bounds = zip(*(_sum(parts) for parts in (request.one, request.other)), strict=True)
    error, allowed = (deltas[0] - deltas[1]).abs(), bounds[0] + bounds[1]
    share = torch.where(error == 0, 0.0, error / allowed)
    worst = int(share.argmax())
    used = min(float(share.flatten()[worst]), 1e30)
    numbers = (f"{t.flatten()[worst].item():.9g}" for t in (*deltas, error, allowed))
    claim = Claim("the same delta", used <= 1, used, f"[{worst}]", *numbers)
    return Judgement("passed" if claim.holds else "wrong", claim=claim, used=used)


def _sum(parts: tuple[Part, ...]) -> tuple[Tensor, Tensor]:
    """The summed delta of one layer in float64, and how far rounding may move it."""
    both = [torch.stack(list(_delta(part))) for part in parts]
    total = torch.stack(both).sum(0)
    return total[0], total[1]


def _delta(part: Part) -> Iterator[Tensor]:
    """scale · ΔW, and its bound. Of a DoRA both are multiplied with the magnitude, which so counts too."""
    adapter = part.adapter
    t = {name: tensor.double() for name, tensor in adapter_tensors(adapter).items()}
    known = Factors(adapter.kind, t)
    truth = Truth()
    scale = truth.scale(known)
    magnitudes = replace(known, tensors={name: tensor.abs() for name, tensor in t.items()})
    unit = ROUNDINGS * ROUNDOFF[adapter.dtype]
    for of, factor in ((known, scale), (magnitudes, abs(scale) * unit)):
        product = factor * truth.product(of, part.shape)
        if MAGNITUDE in t:
            product = product * truth.magnitude(of, part.shape)
        yield _cut(product, part)


def _cut(delta: Tensor, part: Part) -> Tensor:
    return torch.cat([delta[start:end] for start, end in part.rows]) if part.rows else delta
