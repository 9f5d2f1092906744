"""The project's tasks. `nox -l` lists them; what follows `--` is passed on.

Two environment variables choose the torch that a session gets (unset or empty: the tested one):
FULLDIFF_TORCH, a requirement such as torch==2.9.1, and FULLDIFF_TORCH_INDEX, the URL of a package
index with other builds of torch (CPU only, ROCm).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = ROOT / "pyproject.toml"
# What a backend's bench needs beside the project itself.
EXTRAS = {"cpu": "unet", "cuda": "unet", "rocm": "unet", "vulkan": "vulkan", "torchvulkan": "unet,torchvulkan"}
PACKAGES = ("cases", "harness", "reference")
# What the session `peers` checks, and what those hold each other to.
PEERS = ("accelerate", "diffusers", "huggingface_hub", "lycoris_lora", "peft", "tokenizers", "transformers")

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint"]


@nox.session
def tests(session: nox.Session) -> None:
    """Run pytest; what needs Vulkan skips where ggml's wheel or a driver cannot be had."""
    install(session, "dev", wanted=("vulkan", "ggml", "torchvulkan"))
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check with ruff (rules and format) and mypy."""
    install(session, "dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    check_types(session)


@nox.session
def conform(session: nox.Session) -> None:
    """Check the runtime LoKr against the full diff on generated and named cases."""
    install(session)
    session.run("fulldiff", "conform", "--subject", "runtime-lokr", "--profile", "ci", *session.posargs)


@nox.session(name="bench-cpu")
def bench_cpu(session: nox.Session) -> None:
    """Measure memory and time on the CPU; an adapter file of yours: -- --adapter FILE."""
    bench(session, "cpu")


@nox.session(name="bench-cuda")
def bench_cuda(session: nox.Session) -> None:
    """The same on an NVIDIA GPU."""
    bench(session, "cuda")


@nox.session(name="bench-rocm")
def bench_rocm(session: nox.Session) -> None:
    """The same on an AMD GPU; FULLDIFF_TORCH_INDEX names PyTorch's index of ROCm builds."""
    bench(session, "rocm")


@nox.session(name="bench-vulkan")
def bench_vulkan(session: nox.Session) -> None:
    """ggml on any Vulkan GPU, or on a software driver."""
    bench(session, "vulkan")


@nox.session(name="bench-torchvulkan")
def bench_torchvulkan(session: nox.Session) -> None:
    """torch on any Vulkan GPU, through the experimental package torchvulkan (Python 3.11 or 3.13)."""
    bench(session, "torchvulkan")


@nox.session(name="bench-load")
def bench_load(session: nox.Session) -> None:
    """Time loaders of several adapter files."""
    install(session)
    session.run("fulldiff", "bench-load", *session.posargs)


@nox.session(name="bench-join")
def bench_join(session: nox.Session) -> None:
    """Time one joined LoRA against several apart."""
    install(session)
    session.run("fulldiff", "bench-join", *session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """Gate this project's own runtime LoKr against main; or: -- --base REVISION --subject planned."""
    install(session)
    base = [] if "--base" in session.posargs else ["--base", "main"]
    session.run("fulldiff", "gate", *base, *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """Check what others wrote and write reports/peers.md; -- --latest takes their newest versions."""
    latest = "--latest" in session.posargs
    options = [option for option in session.posargs if option != "--latest"] or ["--profile", "ci"]
    install(session, "peers", newest=PEERS if latest else ())
    names = session.run("python", "-c", "from fulldiff.harness.subjects.names import PEERS; print(*PEERS)", silent=True)
    for name in str(names).split():
        # 1 is what a peer that is wrong ends with: the report says how.
        session.run("fulldiff", "conform", "--subject", name, *options, success_codes=[0, 1])
    session.run("fulldiff", "peers")


def bench(session: nox.Session, backend: str) -> None:
    """One backend's bench."""
    install(session, EXTRAS[backend], wanted=("ggml",) if backend == "vulkan" else ())
    session.run("fulldiff", "bench", "--backend", backend, *session.posargs)


def install(session: nox.Session, extra: str = "", wanted: Sequence[str] = (), newest: Sequence[str] = ()) -> None:
    """Install torch, then this project (editable) with an extra, at the tested versions.

    Torch comes first and alone: only it may come from the other index, and the second step keeps
    a torch that meets the constraints. The extras ``wanted`` are installed where they can be had; the
    packages ``newest`` at their newest release, whatever is tested.
    """
    pinned = "".join(line for line in CONSTRAINTS.open() if line.partition("==")[0] not in newest)
    default = re.search(r"^torch==.*$", pinned, re.MULTILINE)
    assert default, "constraints.txt has no line for torch"
    torch = os.environ.get("FULLDIFF_TORCH") or default[0]
    index = os.environ.get("FULLDIFF_TORCH_INDEX")
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text(pinned.replace(default[0], torch))
    source = ["--extra-index-url", index] if index else []
    # A build of the same version from another index would pass for installed: hence the force.
    pip_once(session, "torch", "--force-reinstall", *source, torch, constraints=constraints)
    target = f"{ROOT}[{extra}]" if extra else str(ROOT)
    pip_once(session, "project", "--editable", target, constraints=constraints)
    if newest:
        session.install("--constraint", str(constraints), "--upgrade", *newest)
    for name in wanted:
        try:
            pip_once(session, name, "--editable", f"{ROOT}[{name}]", constraints=constraints)
        except CommandFailed:
            session.warn(f"the extra {name!r} cannot be installed here: what needs it is left out")


def pip_once(session: nox.Session, step: str, *args: str, constraints: Path) -> None:
    """Run pip install unless this step was done here with the same arguments and files."""
    done = Path(session.virtualenv.location) / f"{step}.installed"
    wanted = "\n".join([*args, constraints.read_text()])
    if "--editable" in args:
        wanted += PROJECT.read_text()
    if done.exists() and done.read_text() == wanted:
        return
    session.install("--constraint", str(constraints), *args)
    done.write_text(wanted)


def check_types(session: nox.Session) -> None:
    """Run mypy on the package `fulldiff`, laid out as it is imported.

    An editable install with package-dir is invisible to mypy; links to the folders are not.
    """
    layout = Path(session.create_tmp()) / "fulldiff"
    layout.mkdir(exist_ok=True)
    for name in PACKAGES:
        link = layout / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name, target_is_directory=True)
    cache = f"--cache-dir={ROOT / '.mypy_cache'}"
    with session.chdir(layout.parent):
        session.run("mypy", f"--config-file={PROJECT}", cache, "-p", "fulldiff")
