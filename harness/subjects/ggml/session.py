"""ggml's devices in this process: one to compute on, and for a split placement the CPU beside it."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, field
from functools import cache

import torch

from fulldiff.harness.backends import ggml, ggml_fit, vulkan
from fulldiff.harness.backends.ggml import Device, Ggml, GgmlAbsent

# Vulkan: matrices are multiplied in tiles of 32 columns at least, one work group each; ggml asserts the count.
TILE = 32
NO_LIMIT = 1 << 62
# Exact f32 arithmetic in the shaders, where ggml would take f16 or its matrix cores.
STRICT = ("GGML_VK_DISABLE_F16", "GGML_VK_DISABLE_COOPMAT", "GGML_VK_DISABLE_COOPMAT2")


@dataclass(frozen=True)
class Place:
    """A device with its backend (a stream of work) and its buffer type."""

    device: Device
    backend: int
    buffers: int


@dataclass(frozen=True)
class Session:
    """Where graphs are computed: ``places[0]`` first; ``columns`` and ``bytes`` limit one operation and tensor."""

    library: Ggml
    places: tuple[Place, ...]
    columns: int
    bytes: int
    precise: bool
    pool: list[tuple[int, int]] = field(default_factory=list)

    def needed(self, graph: int) -> int:
        """The bytes of compute buffer that the graph needs on the first place, exactly."""
        call, size = self.library.call, ctypes.c_size_t()
        allocator = call.ggml_gallocr_new(self.places[0].buffers)
        call.ggml_gallocr_reserve_n_size(allocator, graph, None, None, ctypes.byref(size))
        call.ggml_gallocr_free(allocator)
        return size.value

    def allocator(self, size: int) -> int:
        """An allocator whose buffer takes so many bytes, from the pool if one there does.

        None is ever freed: lavapipe (Mesa 22.3) corrupts its heap when compute buffers come and go.
        """
        fitting = [entry for entry in self.pool if entry[0] >= size]
        if not fitting:
            fitting = [(size, self.library.call.ggml_gallocr_new(self.places[0].buffers))]
            self.pool.extend(fitting)
        return min(fitting)[1]

    def describe(self) -> str:
        devices = " + ".join(f"{p.device.backend} {p.device.description}" for p in self.places)
        return f"ggml {self.library.version} on {devices}"


@cache
def session(backend: str, strict: bool, split: bool = False) -> Session:
    """The session of this process; raises GgmlAbsent naming the missing piece and the remedy."""
    columns, size = NO_LIMIT, NO_LIMIT
    switches: tuple[str, ...] = ("GGML_DISABLE_VULKAN",)
    if backend == "vulkan":
        limits = _limits()
        columns, size = TILE * min(limits.work_groups[:2]), limits.largest_storage_buffer
        switches = STRICT if strict else ()
    place = ggml_fit.find() if backend == "cpu" else ggml.find()
    if split and ggml_fit.lacking(place):
        raise GgmlAbsent(ggml_fit.unfit(place))
    library = ggml.load(place, switches)
    places = [_place(library, _device(library, backend))]
    if split:
        places.append(_place(library, _device(library, "cpu")))
    return Session(library, tuple(places), columns, size, strict)


def _limits() -> vulkan.Device:
    """The device that ggml will take first: the first that is no CPU, else a software driver."""
    try:
        found = vulkan.ask()
    except vulkan.VulkanAbsent as reason:
        raise GgmlAbsent(str(reason)) from reason
    vulkan.make_visible(found)
    return next((device for device in found if not device.software), found[0])


def _device(library: Ggml, backend: str) -> Device:
    found = library.devices()
    for device in found:
        if (device.kind == ggml.CPU and backend == "cpu") or device.backend.lower() == backend:
            return device
    names = ", ".join(f"{device.backend} {device.name}" for device in found) or "none"
    raise GgmlAbsent(f"ggml in {library.place} has no {backend} device (it has: {names}); see `fulldiff devices`")


def _place(library: Ggml, device: Device) -> Place:
    backend = library.call.ggml_backend_dev_init(device.pointer, None)
    if not backend:
        raise GgmlAbsent(f"ggml cannot start {device.backend} {device.name}; is its driver working?")
    with contextlib.suppress(GgmlAbsent):
        library.set_threads(backend, device, torch.get_num_threads())
    return Place(device, backend, library.call.ggml_backend_get_default_buffer_type(backend))
