"""torch's own operators on a Vulkan device; skipped, with the reason, where the package or a driver is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from fulldiff.cases.catalogue import pinned
from fulldiff.harness.backends import torchvulkan, vulkan
from fulldiff.harness.manager import BackendAbsent, Worker

NAMES = (
    "d1-low-rank", "d2-factored-w1", "d3-conv-batch", "d4-three-leading-dimensions", "d5-conv1x1-flat-w2",
    "d9-qkv-qv", "d12-dora-out", "d13-tucker-w1factored", "groups-not-dividing-up", "padding-circular",
    "stride-and-dilation", "empty-batch", "form-w1factored-tucker-conv3d-f32-normal", "form-loha-linear-f16-normal",
)  # fmt: skip


def _why_not() -> str:
    if not find_spec("torchvulkan"):
        return "torchvulkan is not installed"
    try:
        vulkan.ask()
        with Worker(backend="torchvulkan") as worker:
            worker.start()
    except (BackendAbsent, vulkan.VulkanAbsent) as reason:
        return str(reason)
    return ""


WHY_NOT = _why_not()
needs_torchvulkan = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvulkan", None)
    assert "pip install torchvulkan" in (torchvulkan.missing() or "")


@needs_torchvulkan
def test_named_cases_pass() -> None:
    with Worker(backend="torchvulkan") as worker:
        ended = {name: worker.judge(pinned()[name], "runtime-lokr").outcome for name in NAMES}
    assert ended == dict.fromkeys(NAMES, "passed")


@needs_torchvulkan
def test_what_would_silently_run_on_the_cpu_is_unsupported() -> None:
    with Worker(backend="torchvulkan") as worker:
        judgement = worker.judge(pinned()["form-lora-linear-bf16-normal"], "runtime-lokr")
    assert judgement.outcome == "unsupported" and "Falling back to CPU" in judgement.message


MEMORY = """
import json, torch
from fulldiff.harness.backends import torchvulkan as backend
assert backend.missing() is None
kept = []
def call():
    kept.append(torch.zeros(1 << 20, device=backend.device))
    torch.zeros(1 << 21, device=backend.device)
print(json.dumps([*backend.memory(call), backend.seconds(call)]))
"""


@needs_torchvulkan
def test_the_meter_counts_bytes_and_the_clock_runs() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    peak, held, reserved, seconds = json.loads(done.stdout.splitlines()[-1])
    assert (peak, held) == (12 << 20, 4 << 20)
    assert reserved >= peak and seconds > 0
