"""Whether this processor can run a ggml library's CPU part: a build for another one ends with an illegal instruction.

The library says what it was compiled for; ``python -m fulldiff.harness.backends.ggml_fit LIBRARY`` prints that, in a
process of its own, as a process can load one ggml only. Known on Linux on x86, and of a CPU part that does not itself
choose among several.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import cache
from pathlib import Path

from fulldiff.harness.backends import ggml
from fulldiff.harness.backends.ggml import GgmlAbsent

# What ggml says → the processor's flag in /proc/cpuinfo. Without AMX (ggml asks for it when it runs) and AVX-VNNI (used
# only where AVX-512 is not).
FEATURES = {
    "avx": "avx", "f16c": "f16c", "fma": "fma", "bmi2": "bmi2", "avx2": "avx2", "avx512": "avx512f",
    "avx512_vbmi": "avx512vbmi", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
}  # fmt: skip


def find() -> Path:
    """The first library whose CPU part this processor can run; raises GgmlAbsent."""
    found = ggml.places()
    for place in found:
        if not lacking(place):
            return place
    raise GgmlAbsent(f"{unfit(found[0])}, or pip install libggml-python")


@cache
def lacking(place: Path) -> tuple[str, ...]:
    """What the library's CPU part was compiled for and this processor has not."""
    if not (flags := processor()):
        return ()
    done = subprocess.run([sys.executable, "-m", __name__, str(place)], capture_output=True, text=True, timeout=120)
    # A library that cannot even be asked says why when it is loaded.
    names = done.stdout.split() if done.returncode == 0 else []
    return tuple(name for name in names if FEATURES[name] not in flags)


def unfit(place: Path) -> str:
    """Why the library computes nothing on this CPU, and the remedy."""
    part = place / ggml.file_name("ggml-cpu")
    return (
        f"{part if part.exists() else place} was built for a processor with {', '.join(lacking(place))}: on this one "
        f"it would crash; set {ggml.VARIABLE} to a build for this machine"
    )


def processor() -> set[str]:
    """The processor's flags; empty where Linux's /proc/cpuinfo names none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def compiled_for(library: ggml.Ggml) -> list[str]:
    """Those of `FEATURES` that the library's CPU part uses."""
    functions = {
        name: library.symbol(f"ggml_cpu_has_{name}") for name in FEATURES if library.has(f"ggml_cpu_has_{name}")
    }
    for function in functions.values():
        function.restype, function.argtypes = ctypes.c_int, []
    return [name for name, function in functions.items() if function()]


if __name__ == "__main__":
    print(*compiled_for(ggml.load(Path(sys.argv[1]), ("GGML_DISABLE_VULKAN",))))
