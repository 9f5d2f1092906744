"""Judging one load case in the worker: a loader against the naive one, then the merged weights against float64.

The loader is first given the same files on another model: what it remembers of a call or of a model must change
nothing. Patches are compared tensor by tensor, unmatched tensors and skipped targets as sets, lists in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fulldiff.cases.load_names import other
from fulldiff.cases.model import Case, CaseError, DType, LoadCase
from fulldiff.harness.judge import conclude, elements
from fulldiff.harness.load.realise import base_of, digest, files_of, weight_of
from fulldiff.harness.protocol import Claim, Judgement
from fulldiff.harness.subjects.base import Refused, Unsupported
from fulldiff.harness.subjects.loaders.base import Loader
from fulldiff.reference import merge
from fulldiff.reference.key_maps import Base
from fulldiff.reference.load import REJECTIONS, Fate, File, Found, Loaded, LoadError, Naive, Patch, Rejection
from fulldiff.reference.truth import FactorError, Truth

Report = Callable[[str], None]
TRUTH = Truth()


def judge(case: Case, subject: Loader, stage: Report) -> Judgement:
    """The judgement of one load case; ``stage`` is told what is about to run, for crash reports."""
    body = case.body
    assert isinstance(body, LoadCase)
    if body.rejection not in REJECTIONS:
        raise CaseError(f"rejection = {body.rejection!r}: use one of {', '.join(REJECTIONS)}")
    stage("generate")
    files, rejection = files_of(case, body), REJECTIONS[body.rejection]
    claims: list[Claim] = []
    for label, model in (("another model", other(body.model)), ("the model", body.model)):
        stage(f"subject: load onto {label}")
        base = base_of(model)
        want, got = (outcome(loader, base, files, rejection) for loader in (Naive(), subject))
        claims += compare(label, want, got)
    stage("subject: merge")
    if isinstance(got, Loaded) and isinstance(want, Loaded) and all(claim.holds for claim in claims):
        claims += merged(case, body, subject, got)
    return conclude(claims, digest(files))


def outcome(loader: Naive | Loader, base: Base, files: Sequence[File], rejection: Rejection) -> Loaded | LoadError:
    """What a load call gives, or the error that it raises."""
    try:
        return loader.load(base, files, rejection)
    except LoadError as error:
        return error


def compare(label: str, want: Loaded | LoadError, got: Loaded | LoadError) -> list[Claim]:
    """The claims about one load call: the first that is broken, or one that holds."""
    if isinstance(want, LoadError) or isinstance(got, LoadError):
        same = isinstance(want, LoadError) and isinstance(got, LoadError)
        named = str(want).partition(":")[0] in str(got)
        return [Claim(f"{label}: the same refusal", same and named, 0.0, "", _short(got), _short(want))]
    broken = next(_differences(want, got), None)
    if broken is None:
        return [Claim(f"{label}: the same patches, unmatched and skipped", True, 0.0)]
    name, index, wanted, found = broken
    return [Claim(f"{label}: {name}", False, 1.0, index, _short(found), _short(wanted))]


Difference = tuple[str, str, object, object]


def _differences(want: Loaded, got: Loaded) -> Iterator[Difference]:
    """What differs: the claim broken, where, what was wanted and what came out."""
    if len(want.fates) != len(got.fates):
        yield "one fate a file", "", len(want.fates), len(got.fates)
    for place, (wanted, found) in enumerate(zip(want.fates, got.fates, strict=False), 1):
        yield from _fates(f"file {place} ({wanted.file})", wanted, found)
    yield from _keys("weights with patches", "", want.patches, got.patches)
    for weight, patches in want.patches.items():
        pairs = (_described(patches), _described(got.patches.get(weight, ())))
        if pairs[0] != pairs[1]:
            yield "patches of each weight in load order, with their strengths", weight, *pairs
        for one, two in zip(patches, got.patches.get(weight, ()), strict=False):
            if not _same(one.tensors, two.tensors):
                yield "the patch's tensors", f"{weight} from {one.file}", sorted(one.tensors), sorted(two.tensors)


def _fates(where: str, want: Fate, got: Fate) -> Iterator[Difference]:
    if (want.file, want.rejected) != (got.file, got.rejected):
        yield "the same files rejected", where, want.rejected, got.rejected
    if sorted(want.unmatched) != sorted(got.unmatched):
        yield "unmatched tensors", where, sorted(want.unmatched), sorted(got.unmatched)
    if set(want.skipped) != set(got.skipped):
        yield "skipped targets", where, sorted(set(want.skipped)), sorted(set(got.skipped))
    for part in ("denoiser", "text"):
        wanted, found = want.patches.get(part, {}), got.patches.get(part, {})
        yield from _keys(f"targets of the {part}", where, wanted, found)
        for target in wanted.keys() & found.keys():
            if not _same_module(wanted[target], found[target]):
                one, two = (f"{kind} {sorted(tensors)}" for kind, tensors in (wanted[target], found[target]))
                yield "the patch of a target", f"{target.weight}, {where}", one, two


def _keys(claim: str, where: str, want: Mapping[Any, object], got: Mapping[Any, object]) -> Iterator[Difference]:
    if want.keys() != got.keys():
        yield claim, where, sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())


def _described(patches: Sequence[Patch]) -> list[tuple[str, float, object, str]]:
    return [(patch.kind, patch.strength, patch.rows, patch.file) for patch in patches]


def _same_module(want: Found, got: Found) -> bool:
    return want[0] == got[0] and _same(want[1], got[1])


def _same(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> bool:
    return want.keys() == got.keys() and all(got[n] is t or torch.equal(got[n], t) for n, t in want.items())


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 300 else f"{text[:300]} … ({len(text)} characters)"


def merged(case: Case, body: LoadCase, subject: Loader, loaded: Loaded) -> list[Claim]:
    """The claims about the merged weights: each within its budget, refusals named, the base left as it was."""
    return [claim for name, patches in loaded.patches.items() for claim in _merged(case, body, subject, name, patches)]


def _merged(case: Case, body: LoadCase, subject: Loader, name: str, patches: Sequence[Patch]) -> Iterator[Claim]:
    weight = weight_of(case.seed, body.model, name)
    kept, dtype = weight.clone(), body.model.dtype
    try:
        budget = _budget(weight, patches, dtype)
    except (LoadError, FactorError) as reason:
        yield _refusal(subject, name, weight, patches, str(reason))
        return
    got = subject.merge(weight, patches)
    if got.shape != weight.shape or got.dtype != weight.dtype:
        expected = f"{tuple(weight.shape)} {weight.dtype}"
        yield Claim("merged weight: shape and dtype", False, 1.0, name, f"{tuple(got.shape)} {got.dtype}", expected)
        return
    yield Claim("merging leaves the base as it was", torch.equal(weight, kept), 0.0, name)
    yield _within(name, got, kept, budget)


def _budget(weight: Tensor, patches: Sequence[Patch], dtype: DType) -> tuple[Tensor, Tensor] | None:
    """The weight wanted, float64, and what each element may be off by; None where no patch has a strength."""
    if not merge.active(patches):
        return None
    base = weight.double()
    return merge.merged(TRUTH, base, patches), merge.budget(TRUTH, base, patches, dtype)


def _within(name: str, got: Tensor, weight: Tensor, budget: tuple[Tensor, Tensor] | None) -> Claim:
    if budget is None:
        return Claim("strength 0 leaves the weight bit for bit", torch.equal(got, weight), 0.0, name)
    want, allowed = budget
    return elements(f"merged weight {name}", got.double(), want, allowed)


def _refusal(subject: Loader, name: str, weight: Tensor, patches: Sequence[Patch], reason: str) -> Claim:
    """Factors without a meaning for the weight, and kinds without a delta, are refused by name."""
    try:
        subject.merge(weight, patches)
    except (LoadError, Refused, Unsupported):
        return Claim("what has no delta is refused", True, 0.0)
    return Claim("what has no delta is refused", False, 1.0, name, "merged", reason)
