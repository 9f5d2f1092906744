"""What of ggml and Vulkan this machine has; what is missing skips the tests that need it, and says which."""

from __future__ import annotations

import pytest

from fulldiff.harness.backends import ggml, vulkan
from fulldiff.harness.bench.vulkan import CPU, SPLIT, absence


def _without_ggml() -> str:
    try:
        ggml.find()
    except ggml.GgmlAbsent as reason:
        return str(reason)
    return ""


NO_GGML = _without_ggml()
NO_CPU = NO_GGML or absence(CPU)
NO_VULKAN = NO_GGML or vulkan.missing() or ""
NO_SPLIT = NO_VULKAN or absence(SPLIT)
needs_cpu = pytest.mark.skipif(bool(NO_CPU), reason=NO_CPU)
needs_vulkan = pytest.mark.skipif(bool(NO_VULKAN), reason=NO_VULKAN)
needs_split = pytest.mark.skipif(bool(NO_SPLIT), reason=NO_SPLIT)
BACKENDS = [pytest.param("cpu", marks=needs_cpu), pytest.param("vulkan", marks=needs_vulkan)]
