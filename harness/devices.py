"""Which backends this machine has, asked of torch in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from fulldiff.harness.backends import vulkan

PROBE = """
import json, torch
print(json.dumps([torch.__version__, torch.version.cuda, torch.version.hip, torch.cuda.is_available(),
                  torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                  torch.backends.cpu.get_cpu_capability()]))
"""


def devices() -> list[tuple[str, str]]:
    """(backend, state): what it is, or exactly which piece is missing."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        return [("cpu", f"absent: torch does not import: {done.stderr.strip().splitlines()[-1]}")]
    torch, cuda, hip, available, name, capability = json.loads(done.stdout)
    return [
        ("cpu", f"available: {capability}, torch {torch}"),
        ("cuda", _gpu("CUDA", cuda, available, name, torch)),
        ("rocm", _gpu("ROCm", hip, available, name, torch)),
        ("vulkan", vulkan.state()),
    ]


def _gpu(kind: str, built_for: str | None, available: bool, name: str | None, torch: str) -> str:
    if built_for is None:
        return f"absent: torch {torch} is not a {kind} build"
    if not available:
        return f"absent: torch {torch} is built for {kind} {built_for} but finds no device or driver"
    return f"present: {name}, {kind} {built_for}; this version of fulldiff does not measure on it yet"
