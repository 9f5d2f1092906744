"""What a backend is: a device, a clock and a memory meter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class Memory(NamedTuple):
    """Bytes of one call: the most that were alive at once beyond what was there before, and what stays after.

    ``reserved`` is what the allocator holds of the device, None where there is no such thing.
    """

    peak: int
    kept: int
    reserved: int | None = None


class Backend(Protocol):
    """A module of this package with these names."""

    name: str
    device: str

    def missing(self) -> str | None:
        """What keeps this backend from running, exactly; None when nothing does."""

    def describe(self) -> str:
        """The device's name, type and driver as one line."""

    def memory(self, call: Callable[[], Any]) -> Memory:
        """The bytes of ``call``; its result is dropped before what stays is counted."""

    def seconds(self, call: Callable[[], Any]) -> float:
        """How long one call takes."""
