"""Questions to Python in a process of its own: for what loads torch or a driver, which a manager must not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class NoAnswer(RuntimeError):
    """The process failed; the message is the last line it printed, or its exit code."""


def ask(code: str, *arguments: str, python: str = sys.executable, environment: Mapping[str, str] = os.environ) -> Any:
    """What the code prints last, as JSON; raises NoAnswer."""
    done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, env=dict(environment))
    if done.returncode or not done.stdout.strip():
        raise NoAnswer((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])
