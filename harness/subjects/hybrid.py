"""Subject ``hybrid``: runtime on Linear layers, full diff on convolutions (stable-diffusion.cpp's fall-back)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fulldiff.harness.subjects.base import Adapter, Forward
from fulldiff.harness.subjects.full_diff import FullDiff
from fulldiff.harness.subjects.runtime_lokr import RuntimeLokr
from fulldiff.harness.subjects.stacked import Stacked


class Hybrid(Stacked):
    """Each layer's kind decides."""

    def __init__(self) -> None:
        self.runtime, self.whole = RuntimeLokr(), FullDiff()

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        return self._of(module).forward(module, adapters, base)

    def promised_bytes(self, module: nn.Module, adapters: Sequence[Adapter], x: Tensor) -> int | None:
        return self._of(module).promised_bytes(module, adapters, x)

    def remark(self, module: nn.Module, adapters: Sequence[Adapter]) -> str:
        return self._of(module).remark(module, adapters)

    def _of(self, module: nn.Module) -> Stacked:
        return self.runtime if isinstance(module, nn.Linear) else self.whole
