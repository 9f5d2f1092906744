"""Which backends this machine has. Each says so itself; torch's are asked in a process of their own."""

from __future__ import annotations

from fulldiff.harness.asking import NoAnswer, ask
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
    try:
        states = ask(PROBE, *names)
    except NoAnswer as reason:
        return [(name, f"absent: asking ended with: {reason}") for name in names]
    return [(name, f"absent: {why}" if why else f"available: {what}") for name, why, what in states]
