"""Base and head: which subject, which interpreter, and from where its code comes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fulldiff.cases.model import CaseError
from fulldiff.harness.asking import NoAnswer, ask
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import LoadCode
from fulldiff.harness.subjects.names import OURS, PEERS

PACKAGES = ("reference", "cases", "harness")
# Run by a side's own interpreter on its own code: every named case, by name.
LIST_CASES = """
from fulldiff.cases.model import case_id
from fulldiff.harness.suites import SUITES
import json
print(json.dumps({name: case_id(case) for suite in SUITES.values() for name, case in suite.named().items()}))
"""


class GateError(CaseError):
    """A gate that cannot be run as asked; the message says what to name instead."""


@dataclass(frozen=True)
class Side:
    """Base or head: the subject, the interpreter, and what goes on its path (empty: the code as installed)."""

    subject: str
    python: str = sys.executable
    path: str = ""

    def environment(self) -> dict[str, str]:
        """What the interpreter's environment gets, for this side's code to be imported."""
        path = os.pathsep.join(filter(None, [self.path, os.environ.get("PYTHONPATH", "")]))
        # Python puts the current folder first, which is often the head's tree: the base must not import from it.
        return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}

    def worker(self, threads: int, timed: bool = True) -> Worker:
        """A worker that imports this side's code; what is timed runs in a new process each."""
        worker = Worker(self.python, threads=threads, timed=timed, forked=timed)
        worker.environment = {**worker.environment, **self.environment()}
        return worker

    def code(self) -> str:
        """A hash of the code under work that the side's subject loads; raises GateError if it cannot be loaded."""
        with self.worker(1) as worker:
            answer = worker.ask(LoadCode(self.subject))
        if answer.judgement is not None:
            raise GateError(f"{self.python}, path {self.path or 'as installed'}: {answer.judgement.message}")
        return answer.code

    def named_cases(self) -> dict[str, str]:
        """The ids of the named cases that this side's own code has, by name."""
        try:
            found: dict[str, str] = ask(LIST_CASES, python=self.python, environment=os.environ | self.environment())
        except NoAnswer as reason:
            where = self.path or "its fulldiff"
            raise GateError(f"{self.python} cannot list the named cases of {where}: {reason}") from reason
        return found


def digest(base: Side, head: Side, *options: object) -> str:
    """A short name for one comparison under these options, such as the hashes of both sides' code."""
    words = [base.subject, base.python, head.subject, head.python, *map(str, options)]
    return hashlib.blake2b("\0".join(words).encode(), digest_size=5).hexdigest()


@contextmanager
def side_of(text: str, subject: str, python: str) -> Iterator[Side]:
    """A side from what the user named: a folder, a subject (package.module:Name or a known one), a git revision.

    Raises:
        GateError: it is none of them.
    """
    if Path(text).is_dir():
        with _layout(Path(text)) as path:
            yield Side(subject, python, path)
    elif text in OURS or text in PEERS or ":" in text:
        yield Side(text, python)
    else:
        with _worktree(text) as tree, _layout(tree) as path:
            yield Side(subject, python, path)


@contextmanager
def _layout(tree: Path) -> Iterator[str]:
    """What to put on the path: the tree and its src; for fulldiff's own tree a folder that has it as a package."""
    if not all((tree / name).is_dir() for name in PACKAGES):
        folders = [tree.resolve(), *(p for p in [(tree / "src").resolve()] if p.is_dir())]
        yield os.pathsep.join(map(str, folders))
        return
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "fulldiff").mkdir()
        for name in PACKAGES:
            (Path(made) / "fulldiff" / name).symlink_to((tree / name).resolve(), target_is_directory=True)
        yield made


@contextmanager
def _worktree(revision: str) -> Iterator[Path]:
    """A checkout of a git revision of the repository here, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as made:
        tree = Path(made) / "tree"
        done = subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), revision], capture_output=True, text=True
        )
        if done.returncode:
            raise GateError(f"{revision!r} is no folder, subject or git revision: {done.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], capture_output=True)
