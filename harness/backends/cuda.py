"""Backend ``cuda``: a GPU through torch's CUDA build."""

from __future__ import annotations

import torch

from fulldiff.harness.backends import torch_gpu
from fulldiff.harness.backends.torch_gpu import device, memory, seconds

__all__ = ["describe", "device", "memory", "missing", "name", "seconds"]

name = "cuda"


def missing() -> str | None:
    """What keeps this backend from running; None when nothing does."""
    return torch_gpu.missing("CUDA", torch.version.cuda, torch.version.hip)


def describe() -> str:
    """The device's name, memory, and the version that torch is built for."""
    return torch_gpu.describe("CUDA", torch.version.cuda)
