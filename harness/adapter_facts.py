"""The worker's side of `fulldiff check`: what a file's tensors hold on one layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fulldiff.cases.model import Case, RuntimeCase
from fulldiff.harness.judge import loaded
from fulldiff.harness.protocol import Facts
from fulldiff.harness.realise import Material, factors64, module_for, realise_adapters
from fulldiff.harness.subjects.base import Refused, Subject, Unsupported
from fulldiff.reference.factors import POLICIES, Factors
from fulldiff.reference.truth import Truth

# Power iterations for σ₁ of a delta that has no small factors: a spike is found in a few.
ITERATIONS = 12


def facts_of(case: Case, subject: Subject, tokens: int) -> Facts:
    """The facts of a runtime case's adapters."""
    body = case.body
    assert isinstance(body, RuntimeCase)
    tensors = realise_adapters(case, body)
    names = [dict(adapter.source.tensors) if adapter.source else {} for adapter in body.adapters]
    broken = [
        of.get(name, name) for t, of in zip(tensors, names, strict=True) for name, v in t.items() if not _finite(v)
    ]
    if broken:
        return Facts(tuple(broken))
    meta = torch.empty(body.layer.weight_shape, device="meta")
    material = Material(meta, None, tensors, torch.empty(tokens, body.layer.inp, device="meta"))
    factors = factors64(body, material)
    truth = Truth(POLICIES[subject.policy])
    spectra = [_spectrum(truth, f, body.layer.weight_shape) for f in factors]
    norm, spike = max(spectra, default=(0.0, 0.0), key=lambda pair: pair[1])
    return Facts((), tuple(truth.scale(f) for f in factors), norm, spike, _workspace(body, material, subject))


def _finite(t: Tensor) -> bool:
    return bool(torch.isfinite(t.to(torch.float32) if t.element_size() == 1 else t).all())


def _spectrum(truth: Truth, adapter: Factors, shape: tuple[int, ...]) -> tuple[float, float]:
    """(‖scale · ΔW‖, σ₁ over it) of the product, without DoRA's norm and without strength."""
    if adapter.rows:
        shape = (adapter.rows[1] - adapter.rows[0], *shape[1:])
    first, whole = _product_spectrum(truth, adapter, shape)
    return abs(truth.scale(adapter)) * whole, first / whole if whole else 0.0


def _product_spectrum(truth: Truth, adapter: Factors, shape: tuple[int, ...]) -> tuple[float, float]:
    """(σ₁, ‖·‖) of the unscaled product, out × (in · ∏kernel): from the factors where they are small."""
    t = adapter.tensors
    if adapter.kind == "lora" and "lora_mid.weight" not in t:
        return _low_rank(t["lora_up.weight"].flatten(1), t["lora_down.weight"].flatten(1))
    if adapter.kind == "lokr":
        w1 = _matrix(truth.w1(t))
        w2 = _low_rank(t["lokr_w2_a"], t["lokr_w2_b"]) if _is_low_rank(t) else _matrix(_w2(truth, t, shape))
        return w1[0] * w2[0], w1[1] * w2[1]
    return _power(truth.product(adapter, shape).flatten(1))


def _is_low_rank(t: Mapping[str, Tensor]) -> bool:
    return "lokr_w2_b" in t and "lokr_t2" not in t


def _w2(truth: Truth, t: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    return truth.w2(t, truth.w1(t), shape).flatten(1)


def _low_rank(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Of a (n, r) · b (r, m): the singular values of the r × r matrix between their orthogonal parts."""
    return _matrix(torch.linalg.qr(a, mode="r").R @ torch.linalg.qr(b.T, mode="r").R.T)


def _matrix(m: Tensor) -> tuple[float, float]:
    return _power(m.flatten(1)) if min(m.shape[0], m[0].numel()) > 64 else _exact(m.flatten(1))


def _exact(m: Tensor) -> tuple[float, float]:
    values = torch.linalg.svdvals(m)
    return float(values[0]) if values.numel() else 0.0, float(values.square().sum().sqrt())


def _power(m: Tensor) -> tuple[float, float]:
    """σ₁ by power iteration from the longest row: a lower bound, close where one direction stands out."""
    whole = float(torch.linalg.vector_norm(m))
    if not whole:
        return 0.0, 0.0
    v = m[int(torch.linalg.vector_norm(m, dim=1).argmax())]
    for _ in range(ITERATIONS):
        v = m.T @ (m @ (v / torch.linalg.vector_norm(v)))
    return float(torch.linalg.vector_norm(v).sqrt()), whole


def _workspace(body: RuntimeCase, material: Material, subject: Subject) -> int | None:
    """The bytes the subject promises for one call; shapes only, nothing is computed."""
    module = module_for(body.layer, material.weight, None)
    try:
        return subject.promised_bytes(module, loaded(body, material), material.x)
    except (Refused, Unsupported):
        return None
