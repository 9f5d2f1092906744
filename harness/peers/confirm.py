"""Confirming findings: each is written as a script of the peer alone and run in a clean interpreter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fulldiff.cases.model import Case
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Reproduce

FOLDER = "reproductions"
LIMIT = 300.0
# The last line of a script whose peer does not give the expected numbers.
DIFFERS = "differs"


@dataclass(frozen=True)
class Reproduction:
    """A finding's script: its file name (none: why there is none), and whether it showed the finding."""

    name: str
    confirmed: bool
    said: str = ""


def reproduce(case: Case, peer: str, what: str, worker: Worker, path: Path) -> Reproduction:
    """Write the script of one finding and run it."""
    answer = worker.ask(Reproduce(case, peer, what))
    if not answer.script:
        return Reproduction("", False, answer.judgement.message if answer.judgement else "no script")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(answer.script)
    return confirm(path)


def confirm(path: Path) -> Reproduction:
    """Run a script in isolation: no environment variables, no user packages, not this project's folder."""
    try:
        done = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return Reproduction(path.name, False, f"no end within {LIMIT:g} s")
    lines = (done.stdout + done.stderr).split("\n")
    last = next((line for line in reversed(lines) if line), "")
    return Reproduction(path.name, done.returncode == 1 and last == DIFFERS, last)
