"""The manager's side of a worker: start it, ask it, survive it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import msgspec

from fulldiff.cases.model import Case
from fulldiff.harness.protocol import (
    BARE,
    PROTOCOL,
    Answer,
    Hello,
    Judge,
    Judgement,
    LoadCode,
    Message,
    Request,
    Stage,
    describe_exit,
)

START_LIMIT = 120.0
CASE_LIMIT = 60.0
# glibc: no fresh pages from the system for each large tensor.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}
CAN_FORK = hasattr(os, "fork") and sys.platform.startswith("linux")
_decoder = msgspec.json.Decoder(Message)


class WorkerError(RuntimeError):
    """A worker that cannot be started or speaks another protocol; the message says what to do."""


class BackendAbsent(RuntimeError):
    """A backend that cannot run here; the message says exactly which piece is missing."""


class Worker:
    """One worker process, started when first asked and again after each crash.

    After its first crash it is started as a preloaded parent that forks a child per case (Linux).
    ``forked``: so from the start, every request in a process of its own (where a backend can fork).
    ``timed``: with the memory allocator as users have it; else freed memory is kept, which judges large
    layers three times faster.
    """

    def __init__(
        self,
        python: str = sys.executable,
        threads: int = 1,
        limit: float = CASE_LIMIT,
        timed: bool = False,
        backend: str = "cpu",
        forked: bool = False,
    ) -> None:
        self.python, self.threads, self.limit, self.backend = python, threads, limit, backend
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        if not timed:
            self.environment |= KEEP_MEMORY
        # A child of a process that uses a GPU cannot use it.
        self.can_fork = CAN_FORK and backend == "cpu"
        self.fork = forked and self.can_fork
        self.hello: Hello | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, case: Case, subject: str) -> Judgement:
        """The subject's judgement on the case; a time-out or lack of memory counts if it repeats."""
        judgement = self._judge_once(case, subject)
        if judgement.outcome in ("timed out", "out of memory"):
            judgement = self._judge_once(case, subject)
        if judgement.outcome == "crashed" and judgement.where == BARE:
            words = f"torch's own layer crashes here without any adapter: {judgement.message}"
            return Judgement("unsupported", message=words, where=BARE)
        return judgement

    def code(self, subject: str) -> str:
        """A hash of the code under work that the subject loads; empty where it cannot be loaded."""
        return self.ask(LoadCode(subject)).code

    def ask(self, request: Request) -> Answer:
        """Send a request and wait; a worker that dies or hangs is an answer too."""
        # In fork mode the parent ends a hanging child; the longer limit here is for the parent itself.
        limit = request.limit * (2 if self.fork else 1)
        process = self._started()
        stage, started, printed = "start", time.monotonic(), self._printed()
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
            while True:
                message = self._next(started + limit)
                if isinstance(message, Answer):
                    return self._with_stage(message, stage, printed)
                if isinstance(message, Stage):
                    stage = message.name
        except queue.Empty:
            self.stop()
            return self._died("timed out", f"no answer within {limit:g} s", stage)
        except (BrokenPipeError, EOFError):
            code = process.wait()
            self.stop()
            return self._died("crashed", describe_exit(code), stage)

    def start(self) -> Hello:
        """Start the worker if it is not running; its first message."""
        self._started()
        assert self.hello is not None
        return self.hello

    def stop(self) -> None:
        """End the worker, and on POSIX all its children, at once."""
        if self._process is not None:
            if os.name == "posix":
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            self._process = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _judge_once(self, case: Case, subject: str) -> Judgement:
        answer = self.ask(Judge(case, subject, limit=self.limit))
        assert answer.judgement is not None
        return answer.judgement

    def _died(self, outcome: str, words: str, stage: str) -> Answer:
        self.fork = self.can_fork
        message = _last_words(f"{words}, in stage '{stage}'", self._stderr_tail())
        return Answer(Judgement(outcome, message=message, where=stage))  # type: ignore[arg-type]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = self._launch()
            try:
                hello = self._next(time.monotonic() + START_LIMIT)
            except (EOFError, queue.Empty):
                self.stop()
                raise WorkerError(
                    f"{self.python} -m fulldiff.harness.worker did not start: {self._stderr_tail()}. "
                    "Is fulldiff installed for that interpreter?"
                ) from None
            if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
                self.stop()
                raise WorkerError(
                    f"{self.python}: its fulldiff speaks another protocol than {PROTOCOL}; install this one"
                )
            if hello.missing:
                self.stop()
                raise BackendAbsent(f"backend {self.backend}: {hello.missing}")
            self.hello = hello
        return self._process

    def _launch(self) -> subprocess.Popen[bytes]:
        options = ["--threads", str(self.threads), "--backend", self.backend]
        command = [self.python, "-m", "fulldiff.harness.worker", *options]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        self._lines: queue.Queue[bytes] = queue.Queue()
        process = subprocess.Popen(
            command + ["--fork"] * self.fork,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            env=self.environment, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=_pump, args=(process, self._lines), daemon=True).start()
        return process

    def _next(self, end: float) -> Message:
        line = self._lines.get(timeout=max(0.001, end - time.monotonic()))
        if not line:
            raise EOFError
        return _decoder.decode(line)

    def _with_stage(self, answer: Answer, stage: str, printed: int) -> Answer:
        """A forked child's crash, with the stage it died in and what it printed last."""
        judgement = answer.judgement
        if judgement is None or judgement.outcome not in ("crashed", "timed out"):
            return answer
        message = _last_words(f"{judgement.message}, in stage '{stage}'", self._stderr_tail(printed))
        return Answer(msgspec.structs.replace(judgement, message=message, where=stage))

    def _printed(self) -> int:
        """How many bytes the worker has printed so far."""
        return os.fstat(self._stderr.fileno()).st_size

    def _stderr_tail(self, start: int = 0) -> str:
        """The last line printed after so many bytes; a child shares our offset in the file, which must not move."""
        if hasattr(os, "pread"):
            data = os.pread(self._stderr.fileno(), self._printed() - start, start)
        else:
            self._stderr.seek(start)
            data = self._stderr.read()
        lines = data.decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line and not line.startswith("USDT:")), "")[:300]


def _pump(process: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
    assert process.stdout is not None
    for line in _lines_of(process):
        lines.put(line)
    lines.put(b"")


def _lines_of(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):
        yield from process.stdout


def _last_words(message: str, tail: str) -> str:
    return f"{message}; it last printed: {tail}" if tail else message
