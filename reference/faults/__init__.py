"""Known wrong ways to compute, each a named, runnable variant of the truth with one step wrong.

`FAULTS` maps a name to an instance. Most were seen in shipped implementations; the docstring of
each says what goes wrong. A harness that does not tell every one of them from the truth is useless,
so the test suite runs each as a subject. One module per step: scale, factors, dora, several (adapters,
base, bias and fused layers), branch (the delta's own computation).
"""

from __future__ import annotations

from fulldiff.reference.faults import branch, dora, factors, scale, several
from fulldiff.reference.faults.registry import FAULTS

__all__ = ["FAULTS", "branch", "dora", "factors", "scale", "several"]
