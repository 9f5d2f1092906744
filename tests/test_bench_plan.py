"""What a bench plans to measure, and in which order."""

from __future__ import annotations

from fulldiff.cases.model import case_id
from fulldiff.harness.bench import plan as bench_plan
from fulldiff.harness.bench import run as bench


def test_a_shape_is_counted_as_often_as_it_occurs() -> None:
    found = bench_plan.shapes("sdxl", [(1024, 1024)])
    assert sum(count for shape in found for count in shape.counts.values()) == 788
    assert found[0].flops == max(shape.flops for shape in found)
    planned = list(bench_plan.layers(["sdxl"], bench_plan.SIZES[:2], 2))
    assert {workload.labels["tokens"] for workload in planned} >= {77, 256, 1024}
    assert len({case_id(workload.case) for workload in planned}) == len(planned)


def test_a_short_budget_shows_a_step_and_f32_before_what_bf16_may_take() -> None:
    labels = [workload.labels for workload in bench.planned(bench.Options(), None).values()]
    assert labels[0]["workload"] == "step"
    assert {(own["tokens"], own["dtype"], own["form"]) for own in labels[1:5]} == {
        (77, dtype, form) for dtype in ("f32", "bf16") for form in ("full w2", "rank 16")
    }
    layers = [own for own in labels[5:] if own["workload"] == "layer"]
    assert [own["dtype"] for own in layers] == sorted((own["dtype"] for own in layers), reverse=True)
    f32 = [own["tokens"] for own in layers if own["dtype"] == "f32"]
    assert f32 == sorted(f32)


def test_given_token_counts_are_measured_on_the_heaviest_layers_alone_with_every_factor() -> None:
    options = bench.Options(tokens=(77, 8192), more_factors=(16,))
    planned = list(bench.planned(options, None).values())
    assert len(planned) == 2 * bench_plan.SHAPES * 2 * 2 * 2
    assert {workload.labels["workload"] for workload in planned} == {"layer"}
    assert {workload.labels["tokens"] for workload in planned} == {77, 8192}
    assert {workload.labels["form"] for workload in planned} == {
        "full w2", "rank 16", "full w2, factor 16", "rank 16, factor 16"
    }  # fmt: skip
    assert options.name == "cpu-tokens"
    every = bench.planned(bench.Options(tokens=(77,), full=True), None)
    assert len(every) == 4 * len(bench_plan.shapes("sdxl", bench_plan.SIZES))
