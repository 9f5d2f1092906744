"""ggml's subjects on its CPU backend and, where a driver can be had, on Vulkan; crashes included.

Each library or driver that is missing skips what needs it, and the reason says which.
"""

from __future__ import annotations

import os
import platform
import sys
import types
from pathlib import Path

import pytest
from vulkan_here import BACKENDS, NO_GGML, needs_cpu, needs_split, needs_vulkan

from fulldiff.cases.catalogue import pinned
from fulldiff.harness.backends import ggml, ggml_fit, vulkan
from fulldiff.harness.bench import vulkan_report as report
from fulldiff.harness.manager import CAN_FORK, Worker
from fulldiff.harness.protocol import Claim, Judgement
from fulldiff.harness.results import Cell, Result
from fulldiff.harness.subjects.base import Subject
from fulldiff.harness.subjects.full_diff import FullDiff
from fulldiff.harness.subjects.ggml.blocks import ALIGNED, even_parts

LIMIT = 65535 * 32
# Linear and conv, every factored form, batches, groups, fused parts, several adapters.
NAMES = (
    "d1-low-rank", "d2-factored-w1", "d3-conv-batch", "d4-three-leading-dimensions", "d5-conv1x1-flat-w2",
    "d6-conv-full-w2", "d7-rank-1", "d8-locon-mid-stride-2", "d9-qkv-qv", "d13-tucker-w1factored", "three-adapters",
    "groups-not-dividing-up", "depthwise-lokr", "stride-and-dilation", "empty-batch", "prime-token-count-4099",
    "nb10-transposed-input", "form-w1factored-tucker-conv3d-f32-normal", "form-loha-linear-bf16-normal",
    "form-diff-bias-conv1d-f16-normal",
)  # fmt: skip


@pytest.mark.parametrize("items", [1, 4099, LIMIT - 1, LIMIT, LIMIT + 1, 3 * 2**20, 2097143, 16777213])
@pytest.mark.parametrize("unit", [1, ALIGNED])
def test_work_is_split_evenly_into_as_few_parts_as_the_limit_allows(items: int, unit: int) -> None:
    parts = list(even_parts(items, LIMIT, unit))
    counts = [count for _, count in parts]
    assert sum(counts) == items and max(counts) <= LIMIT
    assert [start for start, _ in parts] == [sum(counts[:at]) for at in range(len(counts))]
    assert len(parts) <= -(-items // LIMIT) + 1
    assert all(start % unit == 0 for start, _ in parts)
    assert max(counts) - min(counts) <= unit * len(parts)


def test_a_chosen_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ggml.VARIABLE, str(tmp_path))
    with pytest.raises(ggml.GgmlAbsent, match="a folder without"):
        ggml.find()
    monkeypatch.setenv(ggml.VARIABLE, str(tmp_path / "libmine.so"))
    with pytest.raises(ggml.GgmlAbsent, match="no such library"):
        ggml.find()


def test_without_any_library_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ggml.VARIABLE, raising=False)
    monkeypatch.setattr(ggml, "WHEELS", {"no_such_package": "lib"})
    with pytest.raises(ggml.GgmlAbsent, match=f"set {ggml.VARIABLE}"):
        ggml.find()


def test_a_subject_without_its_library_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ggml.VARIABLE, str(tmp_path))
    with Worker() as worker:
        judgement = worker.judge(pinned()["d1-low-rank"], "ggml")
    assert judgement.outcome == "absent"
    assert ggml.VARIABLE in judgement.message


@needs_vulkan
def test_without_a_driver_the_missing_piece_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(variable, "/no/such/driver.json")
    assert "driver" in vulkan.state() and vulkan.state().startswith("absent")


@needs_vulkan
def test_devices_are_told_with_type_driver_and_limits() -> None:
    for device in vulkan.ask():
        assert device.name and device.kind in vulkan.KINDS and device.driver
        # The least that Vulkan guarantees.
        assert min(device.work_groups) >= 65535
        assert device.largest_storage_buffer >= 2**27


@pytest.mark.parametrize("backend", BACKENDS)
def test_named_cases_pass(backend: str) -> None:
    subject = "ggml" if backend == "cpu" else "ggml@vulkan"
    with Worker(limit=300) as worker:
        ended = {name: worker.judge(pinned()[name], subject) for name in NAMES}
    assert {name: j.outcome for name, j in ended.items()} == dict.fromkeys(NAMES, "passed")


@needs_cpu
@pytest.mark.parametrize("subject", ["ggml-shipped", "ggml-full-diff"])
def test_the_other_ways_pass_within_their_budgets(subject: str) -> None:
    with Worker() as worker:
        ended = {name: worker.judge(pinned()[name], subject).outcome for name in NAMES}
    assert ended == dict.fromkeys(NAMES, "passed")


@needs_split
def test_factors_on_the_cpu_and_the_base_on_the_device() -> None:
    names = ("d4-leading-dimensions", "d9-qkv-qv", "groups-dividing-up")
    with Worker(limit=300) as worker:
        assert {worker.judge(pinned()[name], "ggml-split@vulkan").outcome for name in names} == {"passed"}


@needs_cpu
def test_a_refusal_of_the_device_or_engine_is_unsupported() -> None:
    with Worker() as worker:
        for name, says in (("padding-circular", "pad with zeros"), ("form-lora-linear-f64-normal", "f32")):
            judgement = worker.judge(pinned()[name], "ggml")
            assert judgement.outcome == "unsupported" and says in judgement.message


@needs_cpu
@pytest.mark.skipif(not CAN_FORK, reason="elsewhere each crash costs a cold start")
def test_the_pull_request_s_order_is_right_wrong_or_crashes_and_the_run_goes_on() -> None:
    expected = {
        "d1-low-rank-square": ("wrong", ""),
        "d1-low-rank": ("crashed", "ggml_can_mul_mat"),
        "d2-factored-w1": ("crashed", "ggml_can_mul_mat"),
        "d2-factored-w1-square": ("wrong", ""),
        "d3-conv-batch": ("crashed", "ggml_can_mul_mat"),
        "d4-leading-dimensions": ("crashed", "ggml_nelements"),
        "d5-conv1x1-flat-w2": ("crashed", "ggml_nelements"),
        "lokr-oblong-kernel": ("crashed", "k * k"),
        "lokr-kernel-of-rank-1": ("crashed", "ggml_nelements"),
        "nb10-transposed-input": ("crashed", "ggml_is_contiguous"),
        "d6-conv-full-w2": ("passed", ""),
        "prime-token-count-4099": ("passed", ""),
    }
    with Worker() as worker:
        for name, (outcome, says) in expected.items():
            judgement = worker.judge(pinned()[name], "ggml-sdcpp-order")
            assert (name, judgement.outcome) == (name, outcome)
            assert says in judgement.message


def test_a_subject_s_budget_is_the_case_s_dtype_unless_it_says_otherwise() -> None:
    assert Subject.arithmetic(FullDiff(), "conv2d", "bf16") == ("bf16", "")


def test_a_looser_arithmetic_gives_a_larger_budget_and_no_negative_one() -> None:
    import torch

    from fulldiff.cases.model import Layer
    from fulldiff.reference.bounds import budget
    from fulldiff.reference.truth import Truth

    def made(inp: int, *dtypes: str) -> float:
        x, weight = torch.ones(1, inp, dtype=torch.float64), torch.ones(1, inp, dtype=torch.float64)
        return float(budget(Truth(), Layer("linear", 1, inp), weight, None, [], x, *dtypes).hard)

    assert made(8, "f32") < made(8, "f16") < made(8, "f16", "f16") < made(4096, "f16", "f16") == float("inf")


def test_the_report_names_failures_and_gives_no_times_of_software() -> None:
    wrong = Judgement("wrong", claim=Claim("output: exact", False, 1.0, "[0]", "0", "1"))
    crashed = Judgement("crashed", message="died; it last printed: /home/me/ggml/src/ggml.c:7: GGML_ASSERT(a | b)")
    case = pinned()["d1-low-rank"]
    results = [Result("id", "ggml-sdcpp-order", "cpu", case, j, name) for j, name in ((wrong, "d1"), (crashed, "d2"))]
    labels = {"layer": "a layer", "way": "none", "backend": "vulkan"}
    cells = [Cell("c", "vulkan", labels, {"none": [1.25]}, {"none": 3 << 20}, {}, facts={"error": 1e-7})]
    driver = vulkan.Device("llvmpipe", "CPU", "Mesa", (65535,) * 3, 2**27, 2**31)
    text = report.markdown(results, cells, [driver], {})
    assert "got 0, expected 1" in text and "ggml.c:7: GGML_ASSERT(a / b)" in text and "/home" not in text
    assert "(software)" in text and "1.25" not in text and "| 3 " in text


def test_a_library_says_what_its_cpu_part_was_compiled_for() -> None:
    library = object.__new__(ggml.Ggml)
    functions = {f"ggml_cpu_has_{name}": lambda has=has: has for name, has in (("avx2", 1), ("avx512", 1), ("fma", 0))}
    library._loaded = [types.SimpleNamespace(**functions)]  # type: ignore[list-item]
    assert ggml_fit.compiled_for(library) == ["avx2", "avx512"]


@pytest.mark.skipif(bool(NO_GGML or os.environ.get(ggml.VARIABLE)), reason=NO_GGML or f"{ggml.VARIABLE} is set")
def test_a_wheel_s_cpu_part_lacks_what_the_processor_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ggml.find()
    for flags, lacks in (({"sse2"}, True), (set(ggml_fit.FEATURES.values()), False), (set(), False)):
        monkeypatch.setattr(ggml_fit, "processor", lambda flags=flags: flags)
        # Not from the cache, and not into it.
        assert ("avx2" in ggml_fit.lacking.__wrapped__(place)) == lacks


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="flags are known on Linux on x86")
def test_the_processor_s_flags_are_read() -> None:
    assert "sse2" in ggml_fit.processor()


def test_of_two_libraries_the_first_that_fits_the_processor_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Path("/one/libsd.so"), Path("/another/ggml")
    monkeypatch.setattr(ggml_fit, "lacking", lambda place: ("avx512", "fma") if place == first else ())
    monkeypatch.setattr(ggml, "places", lambda: [second, first])
    assert ggml_fit.find() == second
    monkeypatch.setattr(ggml, "places", lambda: [first, second])
    assert ggml_fit.find() == second
    monkeypatch.setattr(ggml, "places", lambda: [first])
    says = f"libsd.so was built for a processor with avx512, fma: .* would crash; set {ggml.VARIABLE}"
    with pytest.raises(ggml.GgmlAbsent, match=says):
        ggml_fit.find()


def test_a_report_says_what_was_left_out_and_why_and_names_no_folder() -> None:
    text = report.markdown([], [], [], {"ggml": "subject 'ggml': /home/me/libggml-cpu.so was built for AVX-512"})
    assert "- left out: subject 'ggml': libggml-cpu.so was built for AVX-512" in text
