"""Confirming findings: each becomes a script of the peer alone, which is run in a clean interpreter."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fulldiff.cases.model import Case
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Judgement, Reproduce

LIMIT = 300.0
# The last line of a script whose peer gives other numbers; of one whose peer raises: ``raised TYPE``.
DIFFERS = "differs"


@dataclass(frozen=True)
class Reproduction:
    """A finding's script (empty: why there is none), and whether it showed the finding."""

    script: str
    confirmed: bool
    said: str = ""


def reproduce(case: Case, judgement: Judgement, peer: str, what: str, worker: Worker) -> Reproduction:
    """Make the script of one finding and run it."""
    answer = worker.ask(Reproduce(case, peer, what))
    if not answer.script:
        return Reproduction("", False, answer.judgement.message if answer.judgement else "no script")
    return confirm(answer.script, last_line(judgement))


def last_line(judgement: Judgement) -> str:
    """What a script must end with to show such a judgement."""
    return f"raised {judgement.message.split(':')[0]}" if judgement.outcome == "raised" else DIFFERS


def confirm(script: str, wanted: str = DIFFERS) -> Reproduction:
    """Run a script in isolation: no environment variables, no user packages, not this project's folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reproduction.py"
        path.write_text(script, encoding="utf-8")
        try:
            done = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return Reproduction(script, False, f"no end within {LIMIT:g} s")
    lines = (done.stdout + done.stderr).split("\n")
    last = next((line for line in reversed(lines) if line), "")
    return Reproduction(script, done.returncode == 1 and last == wanted, last)
