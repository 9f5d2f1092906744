"""Backend ``rocm``: a GPU through torch's ROCm build."""

from __future__ import annotations

import torch

from fulldiff.harness.backends import torch_gpu
from fulldiff.harness.backends.torch_gpu import device, memory, seconds

__all__ = ["describe", "device", "memory", "missing", "name", "seconds"]

name = "rocm"


def missing() -> str | None:
    """What keeps this backend from running; None when nothing does."""
    return torch_gpu.missing("ROCm", torch.version.hip, torch.version.cuda)


def describe() -> str:
    """The device's name, memory, and the version that torch is built for."""
    return torch_gpu.describe("ROCm", torch.version.hip)
