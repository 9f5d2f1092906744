"""Subjects that misbehave, for the harness's own tests."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import torch

from fulldiff.harness.subjects import full_diff
from fulldiff.harness.subjects.base import Subject, Unsupported, replace_forward


class _Bad(Subject):
    def attach(self, module, adapters):
        return replace_forward(module, lambda x: self.misbehave(module.__class__.forward(module, x)))


class CannotBeMade(_Bad):
    def __init__(self):
        raise KeyError("on purpose")


class Aborts(_Bad):
    def misbehave(self, y):
        os.abort()


class Segfaults(_Bad):
    def misbehave(self, y):
        ctypes.string_at(0)


class IsKilled(_Bad):
    def misbehave(self, y):
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(_Bad):
    def misbehave(self, y):
        time.sleep(600)


class Raises(_Bad):
    def misbehave(self, y):
        raise ZeroDivisionError("on purpose")


class RaisesInTorch(_Bad):
    def misbehave(self, y):
        return torch.nn.Linear(2, 2)(y.new_zeros(3))


class GivesNan(_Bad):
    def misbehave(self, y):
        return y * float("nan")


class Prints(_Bad):
    def misbehave(self, y):
        print("not a protocol line")
        raise Unsupported("prints only")


class RunsOutOfMemory(_Bad):
    def misbehave(self, y):
        return torch.empty(1 << 60)


class AbortsOnLowRank(Subject):
    """Crashes on one form only, so that the search has something to shrink."""

    def attach(self, module, adapters):
        if any("lokr_w2_a" in adapter.tensors for adapter in adapters):
            os.abort()
        raise Unsupported("everything else")


class Nothing(Subject):
    def attach(self, module, adapters):
        raise Unsupported("nothing is done here")


class ChainsForwards(Subject):
    """Each attachment saves the forward it found: taking off the first one brings it back in the end."""

    def attach(self, module, adapters):
        weights = [full_diff.merged(torch.zeros_like(module.weight), [adapter]) for adapter in adapters]
        inner = module.forward

        def forward(x):
            y = inner(x)
            for weight in weights:
                y = y + full_diff.run(module, weight, None, x)
            return y

        return replace_forward(module, forward)


class Subtracts(Subject):
    """Merges in place, and takes off by subtracting the same delta."""

    def attach(self, module, adapters):
        total = full_diff.merged(torch.zeros_like(module.weight), adapters)
        with torch.no_grad():
            module.weight += total

        def detach():
            with torch.no_grad():
                module.weight -= total

        return detach
