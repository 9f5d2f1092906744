"""Subjects made for the gate's tests: our runtime LoKr, slowed or made larger by a known amount."""

from __future__ import annotations

import time

import torch

from fulldiff.harness.subjects.base import Unsupported
from fulldiff.harness.subjects.runtime_lokr import RuntimeLokr

SHARE = 0.06
EXTRA = 1 << 20


class Same(RuntimeLokr):
    """The runtime LoKr under another name."""


class Slow(RuntimeLokr):
    """Each call takes 6 % longer."""

    def forward(self, module, adapters, base):
        inner = super().forward(module, adapters, base)

        def forward(x):
            start = time.perf_counter()
            y = inner(x)
            end = time.perf_counter()
            while time.perf_counter() - end < SHARE * (end - start):
                pass
            return y

        return forward


class Big(RuntimeLokr):
    """Each call allocates 1 MiB more, from its start to its end, and promises nothing."""

    def forward(self, module, adapters, base):
        inner = super().forward(module, adapters, base)

        def forward(x):
            more = torch.empty(EXTRA, dtype=torch.uint8)
            y = inner(x)
            del more
            return y

        return forward

    def promised_bytes(self, module, adapters, x):
        return None


class OnlyLoRA(RuntimeLokr):
    """Leaves out every kind but LoRA."""

    def attach(self, module, adapters):
        if any(adapter.kind != "lora" for adapter in adapters):
            raise Unsupported("LoRA only")
        return super().attach(module, adapters)


class Wrong(RuntimeLokr):
    """Is 1 % off."""

    def forward(self, module, adapters, base):
        inner = super().forward(module, adapters, base)
        return lambda x: inner(x) * 1.01
