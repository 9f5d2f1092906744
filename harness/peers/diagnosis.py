"""Why a subject is wrong on a case: which known fault gives the same numbers.

Both comparisons count, the output and the delta alone: a fault is named only if it gives what the subject
gives in both, within the budget that a correct subject would have. Where none does, single or as a pair,
the subject's delta is described beside the right one (a constant ratio, some rows, another order), then
what it is not made of (a factor that changes nothing, numbers that change by themselves), and the property
of the layer without which the subject is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import msgspec
import torch
from torch import Tensor

from fulldiff.cases.model import Case, RuntimeCase
from fulldiff.harness.judge import elements, expected, observe, rms, same_bits
from fulldiff.harness.peers.description import describe
from fulldiff.harness.protocol import Diagnosis
from fulldiff.harness.realise import Material, factors64, realise
from fulldiff.harness.subjects.base import Subject
from fulldiff.reference.bounds import budget
from fulldiff.reference.faults import FAULTS
from fulldiff.reference.faults.branch import Apart
from fulldiff.reference.truth import POLICIES, FactorError, Truth

# Faults that get one of these wrong call the next one's: two of them chain. `Apart`'s output ends the chain.
CHAINED = {"forward", "output", "own"}
ALONE, WITH_BASE = "delta alone", "output"
RANDOM = "other numbers each time"
# Nearer than this share of the largest value a wrong way's own rounding is worth computing.
NEAR = 0.1


@dataclass(frozen=True)
class Part:
    """One comparison: what the subject gave, what is right, and the error that rounding explains."""

    body: RuntimeCase
    material: Material
    got: Tensor
    want: Tensor
    allowed: Tensor
    allowed_rms: float
    arithmetic: tuple[str, str]

    @property
    def right(self) -> bool:
        """Whether rounding explains every element and the errors as a whole, as a case is judged."""
        if self.got.shape != self.want.shape or not elements("", self.got, self.want, self.allowed).holds:
            return False
        return rms("", self.got, self.want, self.allowed_rms).holds

    def equals(self, truth: Truth) -> bool:
        """Whether this way of computing gives the subject's numbers."""
        other = forward(truth, self.body, self.material)
        if other is None or other.shape != self.got.shape:
            return False
        # Of what is open nothing is judged, and what gives NaN where a number is right and was given explains nothing.
        is_open = self.want.isnan().expand_as(other)
        if bool((other.isnan() & ~self.got.isnan() & ~is_open).any()):
            return False
        other = torch.where(is_open, torch.nan, other)
        # A fault may broadcast the output along a dimension of size 1.
        if elements("", self.got, other, self.allowed.expand_as(other)).holds:
            return True
        # A wrong way may round where the right one is exact or zero: alpha over another axis, a delta at strength 0.
        exact = self.body.values == "exact" and torch.equal(other.to(self.material.x.dtype).double(), other)
        largest = float(other.nan_to_num().abs().amax())
        if exact or not torch.allclose(
            self.got[~is_open], other[~is_open], rtol=0, atol=NEAR * largest, equal_nan=True
        ):
            return False
        wider = rounding(truth, self.body, self.material, self.arithmetic, at_zero=1.0)
        return wider.shape == other.shape and elements("", self.got, other, wider).holds


def diagnose(case: Case, subject: Subject, closer: bool = True) -> Diagnosis:
    """The diagnosis of a subject that computes something on the case; raises what the subject raises.

    What no single fault explains is looked at ``closer``: pairs of faults, else a description.
    """
    assert isinstance(case.body, RuntimeCase)
    parts = parts_of(case, case.body, subject)
    policy = POLICIES[subject.policy]
    if all(part.right for part in parts.values()):
        return Diagnosis(right=True)
    named = equal(parts, ((name, replace(fault, policy=policy)) for name, fault in FAULTS.items()))
    if not named and (wider := in_f32(case, case.body, parts, subject, closer)):
        return wider
    if named or not closer:
        return Diagnosis(tuple(named))
    if named := equal(parts, ((name, kind(policy)) for name, kind in pair_faults().items())):
        return Diagnosis(tuple(named))
    alone = parts[ALONE]
    seen = (describe(case.body.layer.kind, alone.got, alone.want, alone.allowed), cured(case, case.body, subject))
    return Diagnosis(partly=", ".join(filter(None, seen)), unread=unread(case.body, parts, subject))


def in_f32(
    case: Case, body: RuntimeCase, parts: Mapping[str, Part], subject: Subject, closer: bool
) -> Diagnosis | None:
    """The diagnosis of an f16 case in f32, where what overflowed in f16 has a number; None where nothing did."""
    if body.dtype != "f16" or not any(
        part.got.shape == part.want.shape and (~part.got.isfinite() & part.want.isfinite()).any()
        for part in parts.values()
    ):
        return None
    try:
        found = diagnose(
            msgspec.structs.replace(case, body=msgspec.structs.replace(body, dtype="f32")), subject, closer
        )
    except Exception:  # whatever a subject raises: f32 tells nothing
        return None
    return Diagnosis(partly="not finite in f16, right in f32") if found.right else found


def unread(body: RuntimeCase, parts: Mapping[str, Part], subject: Subject) -> str:
    """The factors that the output does not depend on though it should, and whether it is another one each time.

    Empty where an output is not finite: nothing can be told of what went into it.
    """
    part = next((part for part in parts.values() if part.got.any()), None)
    if part is None or not all(part.got.isfinite().all() for part in parts.values()):
        return ""

    def output(material: Material, seed: int = 0) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return observe(body, material, subject)[0]

    first, again, other = output(part.material), output(part.material), output(part.material, seed=1)
    if not same_bits(first, again):
        return RANDOM
    ignored = [
        name
        for index, tensors in enumerate(part.material.adapters)
        for name in tensors
        if _matters(part, changed := negated(part.material, index, name), subject) and same_bits(output(changed), first)
    ]
    none = f"{', '.join(dict.fromkeys(ignored))} without effect" if ignored else ""
    return ", ".join(filter(None, (none, "" if same_bits(first, other) else RANDOM)))


def negated(material: Material, index: int, name: str) -> Material:
    """The tensors with one factor of one adapter negated."""
    adapters = list(material.adapters)
    adapters[index] = {**adapters[index], name: -adapters[index][name]}
    return replace(material, adapters=tuple(adapters))


def _matters(part: Part, changed: Material, subject: Subject) -> bool:
    """Whether the right output is another one with these tensors."""
    want = forward(Truth(POLICIES[subject.policy]), part.body, changed)
    return want is not None and not torch.equal(want, part.want)


def cured(case: Case, body: RuntimeCase, subject: Subject) -> str:
    """Which property of the layer makes the subject wrong: it is right once this one is plain."""
    names = [
        name for name, plain in plainer(body).items() if _is_right(msgspec.structs.replace(case, body=plain), subject)
    ]
    return f"right with {' or with '.join(names)}" if names else ""


def plainer(body: RuntimeCase) -> dict[str, RuntimeCase]:
    """The case with one property of its layer made plain, by a name for the change; factors stay as they are."""
    layer, shape, ones = body.layer, body.input.shape, (1,) * len(body.layer.kernel)
    changes: dict[str, dict[str, Any]] = {
        "zeros as padding": {"padding_mode": "zeros"},
        "dilation 1": {"dilation": ones},
        "stride 1": {"stride": ones},
        "groups = 1": {"groups": 1, "inp": layer.inp // layer.groups},
    }
    made = {}
    for name, change in changes.items():
        plain = msgspec.structs.replace(layer, **change)
        if plain != layer:
            channels = (shape[0], plain.inp, *shape[2:])
            made[name] = msgspec.structs.replace(
                body, layer=plain, input=msgspec.structs.replace(body.input, shape=channels)
            )
    return made


def _is_right(case: Case, subject: Subject) -> bool:
    assert isinstance(case.body, RuntimeCase)
    try:
        parts = parts_of(case, case.body, subject)
    except Exception:  # whatever a subject raises: it is not right
        return False
    return all(part.right for part in parts.values())


def parts_of(case: Case, body: RuntimeCase, subject: Subject) -> dict[str, Part]:
    """The subject's output with the base, and with a base of zeros."""
    return {
        name: compared(body, material, subject)
        for name, material in zip((WITH_BASE, ALONE), materials(case, body), strict=True)
    }


def materials(case: Case, body: RuntimeCase) -> tuple[Material, Material]:
    """The case's tensors, and the same with a base weight and bias of zeros."""
    whole = realise(case, body)
    bias = None if whole.bias is None else torch.zeros_like(whole.bias)
    return whole, replace(whole, weight=torch.zeros_like(whole.weight), bias=bias)


def compared(body: RuntimeCase, material: Material, subject: Subject) -> Part:
    """The subject's output with these tensors beside the truth's; raises what the subject raises."""
    got = observe(body, material, subject)[0].double()
    want, allowed = expected(body, material, subject)
    return Part(body, material, got, want, allowed.hard, allowed.rms, subject.arithmetic(body.layer.kind, body.dtype))


def rounding(
    truth: Truth, body: RuntimeCase, material: Material, arithmetic: tuple[str, str], at_zero: float
) -> Tensor:
    """The error per element that rounding may cause in this way of computing; a strength of 0 counts as ``at_zero``."""
    bias = None if material.bias is None else material.bias.double()
    adapters = [replace(adapter, strength=adapter.strength or at_zero) for adapter in factors64(body, material)]
    layer = (body.layer, material.weight.double(), bias, adapters, material.x.double())
    return budget(truth, *layer, *arithmetic).hard


def forward(truth: Truth, body: RuntimeCase, material: Material) -> Tensor | None:
    """The output of this way of computing; None where it cannot compute the case."""
    bias = None if material.bias is None else material.bias.double()
    try:
        return truth.forward(body.layer, material.weight.double(), bias, factors64(body, material), material.x.double())
    except (FactorError, RuntimeError, IndexError, KeyError):
        return None


def equal(parts: Mapping[str, Part], candidates: Iterator[tuple[str, Truth]]) -> list[str]:
    """The names of those that give the subject's numbers in every part."""
    return [name for name, truth in candidates if all(part.equals(truth) for part in parts.values())]


@cache
def pair_faults() -> dict[str, type[Truth]]:
    """Two faults at once, where they get different steps wrong."""
    return {
        f"{one} and {two}": type("Pair", tuple(sorted(kinds, key=lambda kind: issubclass(kind, Apart))), {})
        for one, two in combinations(FAULTS, 2)
        if not _steps(*(kinds := (type(FAULTS[one]), type(FAULTS[two])))) & _steps(*reversed(kinds)) - CHAINED
    }


def _steps(kind: type[Truth], other: type[Truth]) -> set[str]:
    """The methods of the truth that a fault has its own of, not shared with the other."""
    own = [base for base in kind.__mro__ if base not in other.__mro__]
    return {step for base in own for step in vars(base) if not step.startswith("__")}
