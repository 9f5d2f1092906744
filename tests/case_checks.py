"""Draw cases, and check what every case promises: that it is valid, that exact sums are exact."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulldiff.cases.model import Case, RuntimeCase, encode
from fulldiff.cases.scales import largest_row
from fulldiff.harness.realise import factors64, module_for, realise
from fulldiff.reference.layers import apply
from fulldiff.reference.truth import Truth

TRUTH = Truth()


def many(examples: int) -> settings:
    """Settings for a fixed, repeatable number of drawn cases."""
    slow = [HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=slow)


def drawn(strategy: st.SearchStrategy[Case], examples: int) -> list[Case]:
    """Distinct cases that a strategy draws."""
    cases: dict[bytes, Case] = {}

    @many(examples)
    @given(strategy)
    def collect(case: Case) -> None:
        cases[encode(case)] = case

    collect()
    return list(cases.values())


def runtime(case: Case) -> RuntimeCase:
    assert isinstance(case.body, RuntimeCase)
    return case.body


def accepts(case: Case) -> None:
    """torch.nn takes the input, and each adapter's factors give the weight's shape."""
    body = runtime(case)
    material = realise(case, body)
    # On the meta device: shapes alone, and torch's CPU convolution crashes on some of these layouts.
    y = module_for(body.layer, material.weight, material.bias).to("meta")(material.x.to("meta"))
    assert y.shape[1 if body.layer.kernel else -1] == body.layer.out
    for adapter in factors64(body, material):
        assert TRUTH.delta(adapter, material.weight.double()).shape == material.weight.shape


def relative_bound(case: Case) -> float:
    """The largest sum of magnitudes in the output over the smallest power of two among its terms."""
    body = runtime(case)
    material = realise(case, body)
    total, unit = material.weight.double().abs(), 1.0
    bias = torch.zeros(len(total)) if material.bias is None else material.bias.double().abs()
    for spec, adapter in zip(body.adapters, factors64(body, material), strict=True):
        gain = abs(adapter.strength * TRUTH.scale(adapter))
        assert gain == 0 or (math.frexp(gain)[0] == 0.5 and 0.25 <= gain <= 2)
        size = replace(adapter, tensors={name: t.abs() for name, t in adapter.tensors.items()})
        rows = TRUTH.rows(adapter, total)
        product = TRUTH.product(size, total[rows].shape)
        assert float(product.flatten(1).sum(1).max()) <= largest_row(spec)
        total[rows] += gain * product
        unit = min(unit, gain or unit)
        if "diff_b" in size.tensors:
            bias[rows] += abs(adapter.strength) * size.tensors["diff_b"]
            unit = min(unit, abs(adapter.strength) or unit)
    y = apply(body.layer, total, bias, torch.ones(body.input.shape, dtype=torch.float64))
    return float(y.max()) / unit if y.numel() else 0.0
