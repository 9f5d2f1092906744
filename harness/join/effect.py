"""What a joined file does, against what it should: its error, and each file's share of the effect."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulldiff.cases.model import JoinCase
from fulldiff.harness.join.files import adapters_of, parts_of_files, rows_of, write_files
from fulldiff.harness.protocol import Effect
from fulldiff.harness.realise import DTYPES, module_for
from fulldiff.harness.subjects.base import Refused, Unsupported
from fulldiff.harness.subjects.joiner import Joiner
from fulldiff.harness.subjects.registry import subject_of
from fulldiff.reference.join import Join, Part, Setting
from fulldiff.reference.truth import Truth

Deltas = dict[str, Tensor]


def effect(request: Effect) -> dict[str, Any]:
    """``error`` and ``realised``: ‖got − right‖ / ‖right‖ over all layers; ``multiples``: got as a multiple of each
    file's own delta (least squares). What the subject does not do is absent."""
    body, joiner = request.case.body, subject_of("join", request.subject)
    assert isinstance(body, JoinCase)
    assert isinstance(joiner, Joiner)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_files(request.case, folder)
        parts = parts_of_files(paths, body.weights, body.model.name)
        out = folder / "joined.safetensors"
        joiner.join(paths, body.weights, body.model.name, out)
        got, right = deltas_of(out, body.model.name), sums(parts, body.model.name)
        found = {"error": distance(got, right), "multiples": multiples(got, parts, len(paths), body.model.name)}
        try:
            return found | {"realised": realised(body, joiner, out, parts, folder)}
        except (Refused, Unsupported):
            return found


def realised(body: JoinCase, joiner: Joiner, out: Path, parts: Mapping[str, Sequence[Part]], folder: Path) -> float:
    """The error of the file that is written while the case's diagonal and scale are set."""
    rows, again = rows_of(body.model.name), folder / "realised.safetensors"
    zeros = {name: torch.zeros(rows[name].weight_shape, dtype=DTYPES[body.model.dtype]) for name in parts}
    running = joiner.attach(out, {n: module_for(rows[n].layer, z, None) for n, z in zeros.items()}, body.model.name)
    setting = Setting(body.diagonal or [1.0] * len(body.files), ranks(parts, len(body.files)), body.scale)
    running.set_diagonal(setting.numbers)
    running.tune(setting.scale)
    running.realise(again)
    right = {name: Join().running(own, setting, rows[name].weight_shape) for name, own in parts.items()}
    return distance(deltas_of(again, body.model.name), right)


def ranks(parts: Mapping[str, Sequence[Part]], files: int) -> list[int]:
    """Each file's rank, where it has one."""
    return [max((p.rank for own in parts.values() for p in own if p.file == file), default=0) for file in range(files)]


def sums(parts: Mapping[str, Sequence[Part]], model: str) -> Deltas:
    """The right delta of every layer."""
    rows = rows_of(model)
    return {name: Join().joined(own, rows[name].weight_shape) for name, own in parts.items()}


def deltas_of(path: Path, model: str) -> Deltas:
    """The deltas that a file holds."""
    rows, found = rows_of(model), adapters_of(path, model)
    zeros = {name: torch.zeros(rows[name].weight_shape, dtype=torch.float64) for name in found}
    return {name: sum((Truth().delta(a, zeros[name]) for a in own), start=zeros[name]) for name, own in found.items()}


def distance(got: Deltas, right: Deltas) -> float:
    """‖got − right‖ / ‖right‖ over all layers together."""
    error = sum(
        float((got[n] - right[n]).square().sum()) if n in got else float(right[n].square().sum()) for n in right
    )
    return float((error / sum(float(each.square().sum()) for each in right.values())) ** 0.5)


def multiples(got: Deltas, parts: Mapping[str, Sequence[Part]], files: int, model: str) -> list[float]:
    """The multiple of each file's own delta (weight 1) in what was got."""
    rows, names = rows_of(model), [name for name in parts if name in got]
    columns = []
    for file in range(files):
        own = [[p for p in parts[name] if p.file == file] for name in names]
        alone = [
            Join().joined([Part(p.adapter, 1.0) for p in each], rows[n].weight_shape)
            for n, each in zip(names, own, strict=True)
        ]
        columns.append(torch.cat([delta.flatten() for delta in alone]))
    whole = torch.cat([got[name].flatten() for name in names])
    solved = torch.linalg.lstsq(torch.stack(columns, 1), whole[:, None]).solution
    return [float(x) for x in solved.flatten()]
