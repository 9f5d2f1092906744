"""The worker's side of `fulldiff convert`: write a file's adapters under another family's names, and compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fulldiff.harness.files import fold
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import read_header
from fulldiff.harness.files.joining import is_stored
from fulldiff.harness.files.match import Target, match
from fulldiff.harness.files.piece import Piece, UnspellableError
from fulldiff.harness.files.writers import Writer
from fulldiff.harness.protocol import Claim, Compare, Judgement, Part, Write
from fulldiff.harness.realise import adapter_tensors
from fulldiff.reference.bounds import UNIT_ROUNDOFF
from fulldiff.reference.factors import Factors
from fulldiff.reference.truth import Truth

# The folded factor is rounded once; half as much again for the sums in float64 and subnormal numbers.
ROUNDINGS = 1.5
# fp8 factors are widened to f32 and stay so in the new file; others keep their dtype.
ROUNDOFF = UNIT_ROUNDOFF | {"f8_e4m3": UNIT_ROUNDOFF["f32"], "f8_e5m2": UNIT_ROUNDOFF["f32"]}


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
    if not (request.one and request.other):
        return Judgement("wrong", message="only one of the files adapts this layer")
    (one, allowed), (other, more) = _sum(request.one), _sum(request.other)
    error, allowed = (one - other).abs_(), allowed.add_(more)
    share = torch.where(error == 0, 0.0, error / allowed)
    worst = int(share.argmax())
    used = min(float(share.flatten()[worst]), 1e30)
    numbers = (f"{t.flatten()[worst].item():.9g}" for t in (one, other, error, allowed))
    claim = Claim("the same delta", used <= 1, used, f"[{worst}]", *numbers)
    return Judgement("passed" if claim.holds else "wrong", claim=claim, used=used)


def _sum(parts: tuple[Part, ...]) -> tuple[Tensor, Tensor]:
    """The summed delta of one layer in float64, and how far rounding may move it."""
    total, bound = _delta(parts[0])
    for part in parts[1:]:
        delta, allowed = _delta(part)
        total += delta
        bound += allowed
    return total, bound


def _delta(part: Part) -> tuple[Tensor, Tensor]:
    """scale · ΔW, and its bound. Of a DoRA both are multiplied with the magnitude, which so counts too."""
    adapter, truth = part.adapter, Truth()
    known = Factors(adapter.kind, {name: tensor.double() for name, tensor in adapter_tensors(adapter).items()})
    sizes = replace(known, tensors={name: tensor.abs() for name, tensor in known.tensors.items()})
    scale, unit = truth.scale(known), ROUNDINGS * ROUNDOFF[adapter.dtype]
    return _product(truth, known, scale, part), _product(truth, sizes, abs(scale) * unit, part)


def _product(truth: Truth, known: Factors, factor: float, part: Part) -> Tensor:
    product = truth.product(known, part.shape).mul_(factor)
    if "dora_scale" in known.tensors:
        product.mul_(truth.magnitude(known, part.shape))
    return _cut(product, part)


def _cut(delta: Tensor, part: Part) -> Tensor:
    return torch.cat([delta[start:end] for start, end in part.rows]) if part.rows else delta
