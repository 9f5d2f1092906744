"""Which backends this machine has. Each says so itself; torch's are asked in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys

from fulldiff.harness.backends import vulkan

PROBE = """
import json
from fulldiff.harness.backends import cpu, cuda, rocm
print(json.dumps([[b.name, b.missing() or "", "" if b.missing() else b.describe()] for b in (cpu, cuda, rocm)]))
"""


def devices() -> list[tuple[str, str]]:
    """(backend, state): what it is, or exactly which piece is missing."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        return [("cpu", f"absent: torch does not import: {done.stderr.strip().splitlines()[-1]}")]
    states = [(name, f"absent: {why}" if why else f"available: {what}") for name, why, what in json.loads(done.stdout)]
    return [*states, ("vulkan", vulkan.state())]
