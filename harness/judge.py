"""Judging one runtime case in the worker: run the subject, compare with the oracle, return numbers.

Three comparisons are made: the output, the delta's own contribution (base weight and bias zero: a large
base hides a wrong adapter), and what must not change (the input, the base after taking the adapters off).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fulldiff.cases.model import Case, Layer, RuntimeCase
from fulldiff.harness.backends import cpu
from fulldiff.harness.part import part_of
from fulldiff.harness.protocol import BARE, Claim, Judgement, Outcome
from fulldiff.harness.realise import Material, factors64, module_for, realise
from fulldiff.harness.subjects.base import Adapter, Refused, Subject, Unsupported
from fulldiff.reference.bounds import LARGEST, Budget, budget
from fulldiff.reference.truth import POLICIES, Factors, Truth

Report = Callable[[str], None]


@dataclass
class Where:
    """The device that subjects run on; the oracle is always computed on the CPU."""

    device: str = "cpu"


where = Where()


def judge(case: Case, subject: Subject, stage: Report) -> Judgement:
    """The judgement of one runtime case; ``stage`` is told what is about to run, for crash reports."""
    assert isinstance(case.body, RuntimeCase)
    stage("generate")
    material = realise(case, case.body)
    claims: list[Claim] = []
    # A crash of torch's own layer is not the subject's: the stage tells them apart.
    stage(BARE)
    with torch.no_grad():
        bare = on(where.device, material)
        module_for(case.body.layer, bare.weight, bare.bias)(bare.x)
    for name, part in (("output", material), ("delta alone", _without_base(material))):
        stage(f"subject: {name}")
        try:
            got, intact = observe(case.body, part, subject)
        except Refused as reason:
            return Judgement("refused", material.digest(), message=str(reason))
        except Unsupported as reason:
            return Judgement("unsupported", material.digest(), message=str(reason))
        stage("oracle")
        small = part_of(case.body, part, case.body.checked)
        claims += [*compare(name, small.body, small.material, subject, small.of(got)), intact]
    stage("memory")
    claims += memory(case.body, material, subject)
    module = module_for(case.body.layer, material.weight, material.bias)
    return conclude(claims, material.digest(), subject.remark(module, loaded(case.body, material)))


def conclude(claims: Sequence[Claim], digest: str, remark: str = "") -> Judgement:
    """Not finite before wrong before passed; the claim shown is a broken one, else the tightest."""
    broken = [claim for claim in claims if not claim.holds]
    shown = broken[0] if broken else max(claims, key=lambda claim: claim.used)
    outcome: Outcome = "passed" if not broken else "not finite" if shown.got in ("nan", "inf", "-inf") else "wrong"
    return Judgement(outcome, digest, claim=shown, used=max(c.used for c in claims), message=remark)


def observe(body: RuntimeCase, material: Material, subject: Subject) -> tuple[Tensor, Claim]:
    """The subject's output, and whether input and base are bit for bit what they were."""
    material = on(where.device, material)
    module = module_for(body.layer, material.weight, material.bias)
    x = material.x.clone(memory_format=torch.preserve_format)
    detach = subject.attach(module, loaded(body, material))
    with torch.no_grad():
        y = module(x).cpu().clone()
    detach()
    weight = module.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        restored = torch.equal(module(x), module_for(body.layer, material.weight, material.bias)(x))
    same = same_bits(x, material.x) and same_bits(weight, material.weight) and restored
    return y, Claim("leaves input and base as they were", same, 0.0 if same else 1.0)


def on(device: str, material: Material) -> Material:
    """The same tensors on a device."""
    if device == "cpu" and material.x.device.type == "cpu":
        return material
    bias = None if material.bias is None else material.bias.to(device)
    adapters = tuple({name: t.to(device) for name, t in tensors.items()} for tensors in material.adapters)
    return Material(material.weight.to(device), bias, adapters, material.x.to(device))


def loaded(body: RuntimeCase, material: Material) -> list[Adapter]:
    """The adapters as a subject gets them."""
    pairs = zip(body.adapters, material.adapters, strict=True)
    return [Adapter(adapter.kind, tensors, adapter.strength, adapter.rows) for adapter, tensors in pairs]


def compare(name: str, body: RuntimeCase, material: Material, subject: Subject, got: Tensor) -> list[Claim]:
    """The claims about one output: its shape and dtype, every element, the errors as a whole."""
    want, allowed = expected(body, material, subject)
    if got.shape != want.shape or got.dtype != material.weight.dtype:
        right = f"{tuple(want.shape)} {material.weight.dtype}"
        return [Claim(f"{name}: shape and dtype", False, 1.0, "", f"{tuple(got.shape)} {got.dtype}", right)]
    if body.values == "exact":
        return [elements(f"{name}: exact", got.double(), want, allowed.hard)]
    each = elements(f"{name}: each element", got.double(), want, allowed.hard)
    return [each, rms(f"{name}: RMS", got.double(), want, allowed.rms)] if each.holds else [each]


def expected(body: RuntimeCase, material: Material, subject: Subject) -> tuple[Tensor, Budget]:
    """The right output, NaN where nothing is asked, and the error that a correct subject may show: none if exact."""
    want = truth_of(body, material, subject)
    if body.values == "exact":
        return want, Budget(torch.zeros_like(want), torch.zeros_like(want), 0.0)
    stored, sums = subject.arithmetic(body.layer.kind, body.dtype)
    allowed = budget(Truth(POLICIES[subject.policy]), *_arguments(body, material), stored, sums)
    # Where sums of magnitudes leave the dtype's range, a correct subject may overflow too.
    within = allowed.magnitude <= min(LARGEST[body.dtype], LARGEST[stored])
    return torch.where(within, want, torch.nan), allowed


def truth_of(body: RuntimeCase, material: Material, subject: Subject) -> Tensor:
    """The float64 output under the subject's policy."""
    return Truth(POLICIES[subject.policy]).forward(*_arguments(body, material))


def _arguments(body: RuntimeCase, material: Material) -> tuple[Layer, Tensor, Tensor | None, list[Factors], Tensor]:
    bias = None if material.bias is None else material.bias.double()
    return body.layer, material.weight.double(), bias, factors64(body, material), material.x.double()


def elements(name: str, got: Tensor, want: Tensor, allowed: Tensor) -> Claim:
    """Every element within its budget; elements that the oracle leaves open (NaN) are not judged."""
    if not got.numel():
        return Claim(name, True, 0.0)
    error = torch.where(want.isnan(), 0.0, (got - want).abs())
    error = torch.where(error.isnan(), torch.inf, error)
    share = torch.where(error == 0, 0.0, error / allowed)
    at = int(share.argmax())
    # torch.unravel_index would import sympy: most of a second in every new worker.
    index = ",".join(map(str, np.unravel_index(at, tuple(got.shape))))
    flat = (t.reshape(-1)[at].item() for t in (got, want, error, allowed))
    numbers = [f"{value:.9g}" for value in flat]
    used = _finite(share.reshape(-1)[at].item())
    return Claim(name, used <= 1, used, f"[{index}]", *numbers)


def rms(name: str, got: Tensor, want: Tensor, allowed: float) -> Claim:
    """The root of the mean squared error within the statistical budget."""
    finite = want.isfinite() & got.isfinite()
    error = (got - want)[finite]
    value = float(error.square().mean().sqrt()) if error.numel() else 0.0
    used = _finite(value / allowed) if value else 0.0
    return Claim(name, used <= 1, used, "", "", "", f"{value:.9g}", f"{allowed:.9g}")


def _finite(share: float) -> float:
    """JSON holds neither infinity nor NaN: a share of 10^30 stands for both."""
    return min(share, 1e30) if share == share else 1e30


def memory(body: RuntimeCase, material: Material, subject: Subject) -> list[Claim]:
    """A subject that promises peak bytes is held to them, to the byte (f32)."""
    if body.dtype != "f32" or where.device != "cpu":
        return []
    module, x = module_for(body.layer, material.weight, material.bias), material.x
    with torch.no_grad():
        bare, output = cpu.peak_bytes(lambda: module(x)), module(x).nbytes
        detach = subject.attach(module, loaded(body, material))
        promise = subject.promised_bytes(module, loaded(body, material), x)
        if promise is None:
            return []
        module(x)
        measured = cpu.peak_bytes(lambda: module(x))
        detach()
    want = max(bare, output + promise)
    return [Claim("peak bytes as promised", measured == want, 0.0, "", str(measured), str(want))]


def _without_base(material: Material) -> Material:
    bias = None if material.bias is None else torch.zeros_like(material.bias)
    return replace(material, weight=torch.zeros_like(material.weight), bias=bias)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    raw = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.contiguous().view(raw), b.contiguous().view(raw))
