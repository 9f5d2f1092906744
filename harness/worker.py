"""The worker: ``ANY_INTERPRETER -m fulldiff.harness.worker [--fork] [--threads N] [--backend NAME]``.

Reads one `Request` a line from stdin and answers on a private copy of stdout; whatever a subject prints
goes to stderr. With ``--fork`` (POSIX) every request runs in a child of this preloaded process, so that
a crash costs milliseconds; no parallel torch operation ever runs in the parent. Where the manager is gone
(POSIX), the worker and what it runs end within a second.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os
import platform
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, BinaryIO

import msgspec
import torch

from fulldiff.harness import rewriting
from fulldiff.harness.adapter_facts import facts_of
from fulldiff.harness.backends import torchvulkan
from fulldiff.harness.bench import worker as bench_worker
from fulldiff.harness.join import worker as join_worker
from fulldiff.harness.judge import where
from fulldiff.harness.load import worker as load_worker
from fulldiff.harness.peers.diagnosis import diagnose
from fulldiff.harness.peers.reproduction import script
from fulldiff.harness.protocol import (
    PROTOCOL,
    Answer,
    CheckSum,
    Compare,
    Diagnose,
    Effect,
    Hello,
    Join,
    Judge,
    Judgement,
    Load,
    Measure,
    Message,
    Reproduce,
    Request,
    Stage,
    TimeLoad,
    TimeToggle,
    Write,
    describe_exit,
)
from fulldiff.harness.subjects.base import Refused, Unsupported
from fulldiff.harness.subjects.registry import SubjectError, subject_of
from fulldiff.harness.suites import SUITES, imported

OUT_OF_MEMORY = ("can't allocate memory", "out of memory")
TORCH_BACKENDS = ("cpu", "cuda", "rocm", "torchvulkan")
LIBRARIES = ("fulldiff", "torch", "safetensors", "numpy")
_backend: Any = None
_subjects: dict[tuple[str, str], Any] = {}


def main() -> None:
    """Serve requests until stdin ends."""
    global _backend
    options, manager = _options(), os.getppid()
    _backend = import_module(f"fulldiff.harness.backends.{options.backend}")
    where.device = _backend.device
    torch.set_num_threads(options.threads)
    channel = _private_stdout()
    missing = _backend.missing() or ""
    device = "" if missing else _backend.describe()
    if not options.fork:
        # A process that forks has no other threads: its wait for the child looks itself.
        threading.Thread(target=_end_with, args=(manager,), daemon=True).start()
    # The libraries' objects stay: a collection has only what a case made to look through.
    gc.freeze()
    _send(channel, Hello(PROTOCOL, _versions(), device, options.threads, missing))
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        if options.fork:
            _in_child(channel, request, manager)
        else:
            _send(channel, answer(channel, request))


def answer(channel: BinaryIO, request: Request) -> Answer:
    """The answer to one request; whatever the subject raises is an outcome."""
    start = time.perf_counter()
    try:
        made = _answer(channel, request)
    except Exception as error:
        made = Answer(_raised(error))
    if made.judgement is None:
        return made
    timed = msgspec.structs.replace(made.judgement, seconds=time.perf_counter() - start)
    return msgspec.structs.replace(made, judgement=timed)


def _answer(channel: BinaryIO, request: Request) -> Answer:
    if isinstance(request, Judge):
        return _judged(channel, request)
    if isinstance(request, Measure):
        return Answer(bench=bench_worker.run(request.case, request.seconds, _backend))
    if isinstance(request, Diagnose):
        return Answer(diagnosis=diagnose(request.case, _subject("runtime", request.subject), request.closer))
    if isinstance(request, Reproduce):
        return Answer(script=script(request.case, request.subject, _subject("runtime", request.subject), request.what))
    if isinstance(request, Write):
        return Answer(written=rewriting.write(request))
    if isinstance(request, Compare):
        return Answer(rewriting.compare(request))
    if isinstance(request, Load | TimeLoad):
        return Answer(bench=load_worker.run(request))
    if isinstance(request, Join | CheckSum | TimeToggle | Effect):
        return join_worker.run(request)
    chosen = _subject(request.suite, request.subject)
    return Answer(code=_code(getattr(chosen, "files", ())))


def _judged(channel: BinaryIO, request: Judge) -> Answer:
    suite = request.case.suite
    chosen = _subject(suite, request.subject)
    facts = facts_of(request.case, chosen, request.tokens) if request.tokens else None
    if facts and facts.not_finite:
        return Answer(Judgement("refused", message=f"not finite: {', '.join(facts.not_finite)}"), facts=facts)
    judge = imported(SUITES[suite].judge)
    return Answer(judge(request.case, chosen, lambda name: _send(channel, Stage(name))), facts=facts)


def _raised(error: Exception) -> Judgement:
    if isinstance(error, SubjectError):
        return Judgement("absent", message=str(error))
    if isinstance(error, Refused | Unsupported):
        return Judgement("refused" if isinstance(error, Refused) else "unsupported", message=str(error))
    text = f"{type(error).__name__}: {error}"
    if torchvulkan.MESSAGE in text:
        return Judgement("unsupported", message=text)
    memory = isinstance(error, MemoryError) or any(part in str(error) for part in OUT_OF_MEMORY)
    traceback.print_exception(error, file=sys.stderr)
    return Judgement("out of memory" if memory else "raised", message=text, where=_where(error))


def _where(error: Exception) -> str:
    """The file and line that it was raised at; of what torch raised, those that called torch."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = os.path.dirname(torch.__file__) + os.sep
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(inside)), frames[-1])
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _in_child(channel: BinaryIO, request: Request, manager: int) -> None:
    child = os.fork()
    if child == 0:
        _send(channel, answer(channel, request))
        os._exit(0)
    status = _wait(child, request.limit, manager)
    if status is None:
        _send(channel, Answer(Judgement("timed out", message=f"no answer within {request.limit:g} s")))
    elif status != 0:
        _send(channel, Answer(Judgement("crashed", message=describe_exit(os.waitstatus_to_exitcode(status)))))


def _wait(child: int, limit: float, manager: int) -> int | None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        _end_without(manager)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _end_with(manager: int) -> None:
    while True:
        _end_without(manager)
        time.sleep(1.0)


def _end_without(manager: int) -> None:
    """End this process and its children if the manager is gone: nobody waits for the answer. Windows gives no sign."""
    if os.getppid() != manager:
        os.killpg(0, signal.SIGKILL)


def _subject(suite: str, name: str) -> Any:
    if (suite, name) not in _subjects:
        _subjects[suite, name] = subject_of(suite, name)
    return _subjects[suite, name]


def _code(more: Sequence[str]) -> str:
    """A hash of every loaded Python file that is not part of an installation, and ``more``: a subject under work."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    state = hashlib.blake2b(digest_size=8)
    for path in sorted(file for file in files if file.endswith(".py") and not file.startswith(installed)):
        _add(state, path)
    for path in more:
        _add(state, path)
    return state.hexdigest()


def _add(state: Any, path: str) -> None:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        state.update(file.read())


def _private_stdout() -> BinaryIO:
    """A copy of stdout for the protocol; descriptor 1 itself becomes stderr."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return channel


def _send(channel: BinaryIO, message: Message) -> None:
    channel.write(msgspec.json.encode(message) + b"\n")


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", choices=TORCH_BACKENDS, default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
