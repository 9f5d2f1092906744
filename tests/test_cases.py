"""Cases: their JSON and ids, the strategies' promises."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch
from case_checks import TRUTH, accepts, drawn, many, relative_bound, runtime
from hypothesis import find, given

from fulldiff.cases import factors
from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.model import Case, CaseError, Layer, RuntimeCase, case_id, decode, encode
from fulldiff.cases.scales import EXACT_LIMIT
from fulldiff.cases.strategies import runtime_cases
from fulldiff.harness.realise import factors64, realise

# JSON and ids


def test_json_round_trip() -> None:
    for case in [*drawn(runtime_cases(), 500), *CATALOGUE.values()]:
        assert decode(encode(case)) == case


def test_an_id_is_stable() -> None:
    """A changed id would orphan every stored result line and expectation."""
    layer, adapter = "conv2d-8x12-k3x3-s2x2-p1x1", "lora[up.8x4x1x1+down.4x12x1x1+mid.4x4x3x3]"
    expected = f"runtime/{layer}/{adapter}/f32-1x12x8x8/exact/9c38564123"
    assert case_id(CATALOGUE["d8-locon-mid-stride-2"]) == expected


def test_ids_are_unique_and_survive_json() -> None:
    cases = drawn(runtime_cases(), 500)
    assert len({case_id(case) for case in cases}) == len(cases)
    assert all(case_id(decode(encode(case))) == case_id(case) for case in cases)


@pytest.mark.parametrize("text", ["", "{}", '{"body": {"suite": "no"}}', '{"body": 1, "seed": 0}'])
def test_what_is_not_a_case_is_refused(text: str) -> None:
    with pytest.raises(CaseError, match="not a fulldiff case"):
        decode(text)


# Strategies


@many(500)
@given(runtime_cases())
def test_every_generated_case_is_valid(case: Case) -> None:
    accepts(case)


@many(1000)
@given(runtime_cases(values=("exact",)))
def test_exact_sums_fit_bf16(case: Case) -> None:
    """Even with every input 1, so in any order of summation."""
    assert relative_bound(case) < EXACT_LIMIT


@many(300)
@given(runtime_cases(values=("exact",)))
def test_exact_values_survive_every_dtype(case: Case) -> None:
    """The output itself is the same number in bf16 and f16 as in float64."""
    body = runtime(case)
    material = realise(case, body)
    bias = None if material.bias is None else material.bias.double()
    adapters = factors64(body, material)
    y = TRUTH.forward(body.layer, material.weight.double(), bias, adapters, material.x.double())
    assert torch.equal(y, y.bfloat16().double())
    assert torch.equal(y, y.half().double())


def test_shrinking_reaches_a_simple_case() -> None:
    """From any case with more than two outputs (the very simplest case would stop it at once)."""
    found = find(runtime_cases(kinds=("lokr",)), lambda case: runtime(case).layer.out > 2, settings=many(100))
    body = runtime(found)
    (adapter,) = body.adapters
    assert (body.layer.kind, body.layer.out, body.layer.inp) == ("linear", 3, 1)
    assert set(adapter.factors) == {"lokr_w1", "lokr_w2"}
    assert (adapter.alpha.form, adapter.strength, adapter.dtype) == ("absent", 1.0, "f32")
    assert (body.dtype, body.input.layout) == ("f32", "contiguous")


def features(body: RuntimeCase) -> set[str]:
    """What is noteworthy in a case, in words."""
    layer, first = body.layer, body.adapters[0]
    names, rank = set(first.factors), factors.rank(first)
    found = {
        "groups": layer.groups > 1,
        "depthwise": layer.groups > 1 and layer.weight_shape[1] == 1,
        "1x1": bool(layer.kernel) and set(layer.kernel) == {1},
        "strided convolution": max(layer.stride, default=1) > 1,
        "dilated": max(layer.dilation, default=1) > 1,
        "no bias": not layer.bias,
        "empty": 0 in body.input.shape,
        "expanding": layer.out > layer.inp,
        "contracting": layer.out < layer.inp,
        "one vector": len(body.input.shape) == 1,
        "three leading": layer.kind == "linear" and len(body.input.shape) == 4,
        "two adapters": len(body.adapters) == 2,
        "three adapters": len(body.adapters) == 3,
        "strength 0": first.strength == 0,
        "negative strength": first.strength < 0,
        "other dtype": first.dtype != body.dtype,
        "infinite alpha": any(a.alpha.value > 65504 and a.alpha.dtype == "f16" for a in body.adapters),
        "both factored": {"lokr_w1_a", "lokr_w2_a"} <= names,
        "tucker": "lokr_t2" in names,
        "mid": "lora_mid.weight" in names,
        "flat": bool(layer.kernel) and any(len(a.factors.get("lokr_w2", (0, 0, 0))) == 2 for a in body.adapters),
        "loha": first.kind == "loha" and "hada_t1" not in names,
        "tucker loha": "hada_t1" in names,
        "diff": "diff" in names,
        "diff and bias": {"diff", "diff_b"} <= names,
        "bias delta alone": names == {"diff_b"},
        "bias delta without bias": "diff_b" in names and not layer.bias,
        "lora with bias delta": {"lora_up.weight", "diff_b"} <= names,
        "scale tensor": "scale" in names,
        "scale tensor and alpha": "scale" in names and first.alpha.form != "absent",
        "dora lora": {"lora_up.weight", "dora_scale"} <= names,
        "dora lokr": {"lokr_w2", "dora_scale"} <= names,
        "dora loha": {"hada_w1_a", "dora_scale"} <= names,
        "dora in one dimension": len(first.factors.get("dora_scale", ())) == 1,
        "dora per input": first.factors.get("dora_scale", (0,))[0] == 1 < layer.out,
        "dora on a square layer": "dora_scale" in names and layer.out == layer.inp > 1,
        "two kinds": len({a.kind for a in body.adapters}) > 1,
        "fused": first.rows is not None,
        "fused, first part absent": first.rows is not None and min(a.rows[0] for a in body.adapters if a.rows) > 0,
        "fused, middle part absent": _has_gap(body),
        "a part and the whole": len({a.rows is None for a in body.adapters}) == 2,
        "rank 1": rank == 1,
        "rank is vp": first.factors.get("lokr_w2_a", (0, 1))[0] == rank,
        "rank is not vp": first.factors.get("lokr_w2_a", (rank,))[0] != rank,
        f"alpha {first.alpha.form}": True,
        f"alpha in {first.alpha.dtype}": True,
    }
    tags = (layer.kind, layer.padding_mode, body.input.layout, body.dtype, body.values, first.kind)
    return {name for name, present in found.items() if present} | set(tags)


def _has_gap(body: RuntimeCase) -> bool:
    """Some part between two adapted ones is not adapted."""
    filled = {row for a in body.adapters if a.rows for row in range(*a.rows)}
    return bool(filled) and max(filled) - min(filled) >= len(filled)


@pytest.fixture(scope="module")
def frequencies() -> Counter[str]:
    """How many of 2,000 generated cases have each feature."""
    return Counter(f for case in drawn(runtime_cases(), 2000) for f in features(runtime(case)))


NEW_KINDS = (
    *("loha", "tucker loha", "diff", "diff and bias", "bias delta alone", "bias delta without bias"),
    *("lora with bias delta", "scale tensor", "scale tensor and alpha", "dora lora", "dora lokr", "dora loha"),
    *("dora in one dimension", "dora per input", "dora on a square layer", "two kinds", "fused"),
    *("fused, first part absent", "fused, middle part absent", "a part and the whole"),
)

ALWAYS_SEEN = """groups depthwise 1x1 strided_convolution dilated no_bias empty expanding contracting
one_vector three_leading two_adapters three_adapters strength_0 negative_strength other_dtype
infinite_alpha both_factored tucker mid flat rank_1 rank_is_vp rank_is_not_vp
alpha_absent alpha_0d alpha_1 alpha_1x1 alpha_in_f64 alpha_in_bf16 alpha_in_f16 alpha_in_i64
linear conv1d conv2d conv3d zeros reflect replicate circular contiguous transposed strided
channels_last f64 f32 bf16 f16 normal exact special lora lokr"""


@pytest.mark.parametrize("feature", [*ALWAYS_SEEN.replace("_last", "?last").split(), *NEW_KINDS])
def test_every_feature_is_drawn(feature: str, frequencies: Counter[str]) -> None:
    assert frequencies[feature.replace("_", " ").replace("?", "_")] >= 3


def test_exact_lohas_are_seldom_zero() -> None:
    """A Hadamard product of two sparse ones would be."""
    cases = drawn(runtime_cases(kinds=("loha",), values=("exact",), extras=()), 200)
    deltas = [
        TRUTH.product(factors64(runtime(c), realise(c, runtime(c)))[0], runtime(c).layer.weight_shape) for c in cases
    ]
    assert sum(bool(delta.any()) for delta in deltas) > 0.9 * len(deltas)


def test_a_dora_is_never_exact() -> None:
    case = next(
        c for c in drawn(runtime_cases(values=("normal",)), 200) if "dora_scale" in runtime(c).adapters[0].factors
    )
    with pytest.raises(CaseError, match="values = exact with dora_scale"):
        msgspec.structs.replace(runtime(case), values="exact")


def test_rows_beyond_the_layer_are_refused() -> None:
    with pytest.raises(CaseError, match=r"rows = \(2, 9\)"):
        body = runtime(CATALOGUE["d1-low-rank"])
        msgspec.structs.replace(
            body, layer=Layer("linear", 8, 21), adapters=(msgspec.structs.replace(body.adapters[0], rows=(2, 9)),)
        )


def test_the_arguments_restrict_what_is_drawn() -> None:
    for case in drawn(runtime_cases(kinds=("lokr",), values=("exact",), dtypes=("f16",)), 100):
        body = runtime(case)
        assert (body.values, body.dtype) == ("exact", "f16")
        assert {adapter.kind for adapter in body.adapters} == {"lokr"}
