"""Subjects that misbehave, for the harness's own tests."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import torch

from fulldiff.harness.subjects.base import Subject, Unsupported, replace_forward


class _Bad(Subject):
    def attach(self, module, adapters):
        return replace_forward(module, lambda x: self.misbehave(module.__class__.forward(module, x)))


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
