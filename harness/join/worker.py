"""The worker's side of `fulldiff join` and `fulldiff bench-join`: write, compare by rows, toggle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fulldiff.cases.model import numel
from fulldiff.harness.files import stitching
from fulldiff.harness.files.adapters import WIDTHS
from fulldiff.harness.files.joining import DOWN, MID, UP, family_of, plan, widest
from fulldiff.harness.join import effect as join_effect
from fulldiff.harness.join.judge import ORACLE
from fulldiff.harness.judge import conclude
from fulldiff.harness.protocol import Answer, CheckSum, Claim, Effect, Join, Judgement, Part, TimeToggle
from fulldiff.harness.realise import adapter_tensors, module_for
from fulldiff.harness.subjects.joined_model import attach_layers
from fulldiff.reference.bounds import SMALLEST, UNIT_ROUNDOFF
from fulldiff.reference.truth import Factors, Truth

# Elements of a layer's delta that are compared at a time.
ROWS_OF = 1 << 20
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def run(request: Join | CheckSum | TimeToggle | Effect) -> Answer:
    """The answer to a request."""
    with torch.no_grad():
        if isinstance(request, Join):
            return Answer(bench=write(request))
        if isinstance(request, CheckSum):
            return Answer(check(request))
        if isinstance(request, Effect):
            return Answer(bench=join_effect.effect(request))
        return Answer(bench=toggle(request))


def write(request: Join) -> dict[str, Any]:
    """Write the joined file: seconds, and the most memory beyond what was there (None: it cannot be measured)."""
    before, start = _reset_peak(), time.perf_counter()
    paths = [Path(path) for path in request.paths]
    made = plan(paths, request.weights, request.model, request.family, request.dtype)
    stitching.write(made, request.family, Path(request.out))
    seconds, peak = time.perf_counter() - start, resident("VmHWM")
    return {"seconds": seconds, "peak_bytes": None if before is None or peak is None else peak - before}


def _reset_peak() -> int | None:
    """Make the system's peak of this process start anew (Linux); what is resident now."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")
        return resident("VmRSS")
    return None


def resident(name: str) -> int | None:
    """VmRSS or VmHWM of this process in bytes; None where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def check(request: CheckSum) -> Judgement:
    """Passed where the joined file's layer is the sum of the files' within the rounding of its dtype.

    The files' factors stand beside the joined one's, whose ups are negative: one product is the whole difference.
    """
    if not (request.parts and request.joined):
        return Judgement("wrong", message="only the files or only the joined one adapts this layer")
    parts, joined = [_flat(part) for part in request.parts], [_flat(part) for part in request.joined]
    up = torch.cat([*(p.up for p in parts), *(-p.up for p in joined)], 1)
    down = torch.cat([p.down for p in (*parts, *joined)])
    if not bool(up.isfinite().all() and down.isfinite().all()):
        return Judgement("not finite", message="a factor is not finite")
    size_up, size_down = torch.cat([p.up.abs() for p in parts], 1), torch.cat([p.size for p in parts])
    dtype = widest([part.adapter.dtype for part in request.joined])
    times = roundings(request)
    unit, tiny = times * UNIT_ROUNDOFF[dtype] + ORACLE, times * SMALLEST[dtype]
    lines = (tiny * torch.stack([p.line for p in parts]).sum(0)[:, None], tiny * size_down.sum(0, True).clamp(min=1.0))
    claims = []
    for rows in _chunks((up.shape[0], down.shape[1])):
        allowed = torch.mm(size_up[rows] * unit, size_down).add_(lines[0][rows]).add_(lines[1])
        claims.append(_worst(rows.start, torch.mm(up[rows], down).abs_(), allowed))
    return conclude(claims, "")


def _worst(first: int, error: Tensor, allowed: Tensor) -> Claim:
    """The element that uses most of what is allowed, which is nowhere 0."""
    share = error / allowed
    at = int(share.argmax())
    row, column = divmod(at, error.shape[1])
    used = min(float(share.flatten()[at]), 1e30)
    numbers = [f"{t.flatten()[at].item():.9g}" for t in (error, allowed)]
    return Claim("the weighted sum", used <= 1, used, f"[{first + row},{column}]", "", "", *numbers)


@dataclass(frozen=True)
class Flat:
    """A part in float64: up (out, r) with weight and scale, down (r, in·∏kernel) with any core, and its magnitude.

    ``line`` (out,) is how much a row moves where every value of down moves by 1, whichever factor has the scale.
    """

    up: Tensor
    down: Tensor
    size: Tensor
    line: Tensor


def _flat(part: Part) -> Flat:
    """One part's factors; of weight 0 zeros, whatever they hold. Its up's rows are in the layer's order."""
    t = {factor: tensor.double() for factor, tensor in adapter_tensors(part.adapter).items()}
    up, down = t[UP].flatten(1), t[DOWN].flatten(1)
    size = down.abs()
    if MID in t:
        down, size = (torch.einsum("mn...,ni->mi...", m, d) for m, d in ((t[MID], down), (t[MID].abs(), size)))
    if part.rows:
        up = torch.cat([up[start:end] for start, end in part.rows])
    if not part.adapter.strength:
        nothing = torch.zeros_like(down.flatten(1))
        return Flat(torch.zeros_like(up), nothing, nothing, torch.zeros_like(up[:, 0]))
    factor = part.adapter.strength * Truth().scale(Factors(part.adapter.kind, t))
    return Flat(up * factor, down.flatten(1), size.flatten(1), up.abs().sum(1) * max(1.0, abs(factor)))


def roundings(request: CheckSum) -> float:
    """How often a factor was rounded: the one with the scale, a down with a core in it, both where narrowed."""
    core = any(MID in part.adapter.factors for part in request.parts)
    kept = all(MID in part.adapter.factors for part in request.joined)
    width = min(WIDTHS[part.adapter.dtype] for part in request.joined)
    narrow = any(WIDTHS[p.adapter.dtype] > width or p.adapter.dtype != q.adapter.dtype
                 for p in request.parts for q in request.joined if WIDTHS[p.adapter.dtype] >= 16)  # fmt: skip
    return 1.01 * (1 + (core and not kept) + 2 * narrow)


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, ROWS_OF // numel(shape[1:]))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def toggle(request: TimeToggle) -> dict[str, Any]:
    """Seconds of setting the diagonals of all layers of a file, and what stays allocated over many settings.

    The base weights are one number, expanded: only their shapes count here.
    """
    path = Path(request.path)
    made = plan([path], [1.0], request.model, family_of([path], request.model))
    number = torch.zeros(1)
    modules = {layer.name: bare_module(layer.rows[0].layer, number) for layer in made.layers}
    attached = attach_layers(modules, path, request.model)
    turns = [[1.0 if file == turn % len(attached.files) else 0.0 for file in range(len(attached.files))]
             for turn in range(request.turns)]  # fmt: skip
    attached.set_diagonal(turns[0])
    before, samples = resident("VmRSS"), []
    for numbers in turns:
        start = time.perf_counter()
        attached.set_diagonal(numbers)
        samples.append(time.perf_counter() - start)
    after = resident("VmRSS")
    grown = None if before is None or after is None else after - before
    return {"seconds": samples, "grown_bytes": grown, "layers": len(modules), "files": len(attached.files)}


def bare_module(layer: Any, number: Tensor) -> nn.Module:
    """The layer with a weight of one number (1,) everywhere, which takes no memory."""
    module = module_for(layer, torch.empty(0), None)
    module.weight = nn.Parameter(number.expand(layer.weight_shape), requires_grad=False)
    return module
