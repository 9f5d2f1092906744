"""Which backends this machine has. Each says so itself; torch's are asked in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys

from fulldiff.harness.backends import vulkan

# A driver that crashes takes along only the process that asks it.
GROUPS = (("cpu", "cuda", "rocm"), ("torchvulkan",))
PROBE = """
import json, sys
from importlib import import_module
found = [import_module(f"fulldiff.harness.backends.{name}") for name in sys.argv[1:]]
print(json.dumps([[b.name, b.missing() or "", "" if b.missing() else b.describe()] for b in found]))
"""


def devices() -> list[tuple[str, str]]:
    """(backend, state): what it is, or exactly which piece is missing."""
    return [*(state for names in GROUPS for state in _torch(names)), ("vulkan", vulkan.state())]


def _torch(names: tuple[str, ...]) -> list[tuple[str, str]]:
    done = subprocess.run([sys.executable, "-c", PROBE, *names], capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [(name, f"absent: asking ended with: {words}") for name in names]
    states = json.loads(done.stdout.splitlines()[-1])
    return [(name, f"absent: {why}" if why else f"available: {what}") for name, why, what in states]
