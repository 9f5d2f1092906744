"""Subject ``program:COMMAND``: any program, in any language, that computes a layer with its adapters.

It reads one JSON object a line from stdin and answers with one a line on stdout; what else it prints belongs
on stderr. Its first line, before any request, is ``{"fulldiff": 1, "policy": "default"}``: the version of
this protocol, and the rule it has where implementations differ (see reference/factors.py's POLICIES).

A request names the layer, the adapters in order, and two safetensors files::

    {"layer": {"kind": "conv2d", "stride": [1, 1], "padding": [1, 1], "padding_mode": "zeros",
               "dilation": [1, 1], "groups": 1},
     "adapters": [{"kind": "lokr", "strength": 0.7, "rows": null}],
     "input": "….safetensors", "output": "….safetensors"}

``input`` holds ``weight``, ``bias`` where there is one, ``x``, and the factors of the first adapter as
``0.lokr_w1``, ``0.alpha``, …: the names of the file without the layer's. The program writes ``y`` to ``output``
and answers ``{}``; or it writes nothing and answers ``{"unsupported": WHY}`` for what it does not do,
``{"refused": WHY}`` for an adapter that is invalid, ``{"error": WHY}``. A program that dies is a crash.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fulldiff.harness.subjects.base import Adapter, Forward, Refused, Unsupported
from fulldiff.harness.subjects.stacked import Stacked

VERSION = 1
SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode")


class Program(Stacked):
    """One running program, started when first asked for."""

    def __init__(self, command: str) -> None:
        """Raises ImportError: the command cannot be started, or its first line is not this protocol's."""
        self.command = shlex.split(command, posix=os.name == "posix")
        # A program that was built anew is another subject.
        self.files = [word for word in self.command if Path(word).is_file()]
        self.folder = tempfile.TemporaryDirectory()
        try:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise ImportError(f"{command}: {error}") from error
        hello = self._line()
        if hello.get("fulldiff") != VERSION:
            raise ImportError(f'{command}: its first line is not {{"fulldiff": {VERSION}, …}} but {hello}')
        self.policy = hello.get("policy", self.policy)

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        def forward(x: Tensor) -> Tensor:
            folder = Path(self.folder.name)
            given, made = folder / "input.safetensors", folder / "output.safetensors"
            made.unlink(missing_ok=True)
            save_file({"x": x.contiguous()} | _stored(module, adapters), given)
            files = {"input": str(given), "output": str(made)}
            self._ask({"layer": _layer(module), "adapters": [_described(a) for a in adapters]} | files)
            if not made.exists():
                raise ValueError(f"{self.command[0]} answered {{}} and wrote no {made.name}")
            return load_file(made)["y"]

        return forward

    def _ask(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self._line()
        except (BrokenPipeError, EOFError):
            _die_like(self.process.wait())
        if "unsupported" in answer:
            raise Unsupported(answer["unsupported"])
        if "refused" in answer:
            raise Refused(answer["refused"])
        if answer:
            raise RuntimeError(answer.get("error", f"{self.command[0]} answered {answer}"))

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ImportError(
                f"{self.command[0]} printed {line!r}: one JSON object a line belongs on stdout, nothing else"
            )
        return answer


def _die_like(code: int) -> None:
    """End this worker as the program ended, for the harness to see."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _stored(module: nn.Module, adapters: Sequence[Adapter]) -> dict[str, Tensor]:
    tensors = {name: p.detach().contiguous() for name, p in module.named_parameters()}
    for at, adapter in enumerate(adapters):
        # Copies: safetensors stores no two names of one memory.
        tensors |= {f"{at}.{name}": t.detach().clone().contiguous() for name, t in adapter.tensors.items()}
    return tensors


def _layer(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, nn.Linear):
        return {"kind": "linear"}
    settings = {name: getattr(module, name) for name in SETTINGS}
    return {"kind": type(module).__name__.lower()} | settings


def _described(adapter: Adapter) -> dict[str, Any]:
    return {"kind": adapter.kind, "strength": adapter.strength, "rows": adapter.rows}
