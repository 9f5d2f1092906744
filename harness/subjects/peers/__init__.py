"""Implementations that nobody here wrote, one file each; their libraries are imported when a subject is made."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import nn

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter, Unsupported


def library(module: str, package: str) -> Any:
    """The peer's module; raises ImportError with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; install it with: pip install {package}") from error


def check(adapter: Adapter, kinds: Sequence[str], beyond: Sequence[str] = ()) -> None:
    """Unsupported: kinds and tensors (``beyond``, a bias delta, a scale tensor, a magnitude) without a place."""
    factors.check(adapter)
    if adapter.kind not in kinds:
        raise Unsupported(f"adapter kind {adapter.kind!r}: it has {', '.join(kinds)}")
    on_the_whole_layer(adapter)
    if more := sorted({"diff_b", "scale", "dora_scale", *beyond} & adapter.tensors.keys()):
        raise Unsupported(f"{adapter.kind} with {', '.join(more)}: no parameter for it")
    ranks = {w: adapter.tensors[f"lokr_{w}_b"].shape[0] for w in ("w1", "w2") if f"lokr_{w}_b" in adapter.tensors}
    if len(set(ranks.values())) > 1:
        raise Unsupported(f"w1 of rank {ranks['w1']} with w2 of rank {ranks['w2']}: it has one rank per layer")


def on_the_whole_layer(adapter: Adapter) -> None:
    """Unsupported: an adapter of some of a layer's rows, for which no peer has names."""
    if adapter.rows:
        raise Unsupported("an adapter of a part of a fused layer")


def alone(module: nn.Module) -> None:
    """Unsupported: a layer that has adapters already, for ways that take them all at once."""
    if "forward" in module.__dict__:
        raise Unsupported("adapters beside others: this way has them all at once")


def alpha_of(adapter: Adapter) -> float | None:
    """The value of alpha, None where the file has none."""
    alpha = adapter.tensors.get("alpha")
    return None if alpha is None else float(alpha.reshape(()))
