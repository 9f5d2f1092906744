"""The table of faults, and the decorator that enters a class in it."""

from __future__ import annotations

from collections.abc import Callable

from fulldiff.reference.truth import Truth

FAULTS: dict[str, Truth] = {}


def fault(name: str) -> Callable[[type[Truth]], type[Truth]]:
    """Register the decorated class under ``name``."""

    def register(kind: type[Truth]) -> type[Truth]:
        FAULTS[name] = kind()
        return kind

    return register
