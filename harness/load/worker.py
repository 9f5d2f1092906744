"""The worker's side of `fulldiff load` and `fulldiff bench-load`: matching and merging, by stage, timed in pairs."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulldiff.cases.load_names import factor_key
from fulldiff.cases.model import AdapterFile, LoadCase, Model, Shape
from fulldiff.cases.state_dicts import state_dict
from fulldiff.harness.backends import cpu
from fulldiff.harness.bench.interleaving import interleave
from fulldiff.harness.load.realise import base_of, identity, opened
from fulldiff.harness.protocol import Load, TimeLoad
from fulldiff.harness.realise import DTYPES
from fulldiff.harness.subjects.loaders.base import Loader
from fulldiff.harness.subjects.loaders.names import FIRST, WARM
from fulldiff.harness.subjects.registry import subject_of
from fulldiff.reference.load import REJECTIONS, Fate, File, Loaded, Patch

MIN_BLOCKS, MAX_BLOCKS = 5, 60
PARTS = {"diffusion_model": "unet", "clip_l": "text_encoder", "clip_g": "text_encoder_2"}


def run(request: Load | TimeLoad) -> dict[str, Any]:
    """The answer to a request, as plain data."""
    body = request.case.body
    assert isinstance(body, LoadCase)
    with torch.no_grad():
        if isinstance(request, Load):
            return end_to_end(body, loader(request.loader))
        if request.end_to_end:
            return time_stages(body, request.ways, request.seconds)
        return time_matching(body, request.ways, request.seconds)


def loader(way: str) -> Loader:
    made = subject_of("load", way.removesuffix(WARM))
    assert isinstance(made, Loader)
    return made


# Matching alone, as the pull request timed it


def time_matching(body: LoadCase, ways: Sequence[str], seconds: float) -> dict[str, Any]:
    """Seconds of each way's load calls, and its counters; how many tensors the files have."""
    files, base, rejection = placeholders(body), base_of(body.model), REJECTIONS[body.rejection]
    warm = {way: loader(way) for way in ways if way.endswith(WARM)}

    def call(way: str, chosen: Sequence[File]) -> Callable[[], Loaded]:
        return lambda: (warm.get(way) or loader(way)).load(base, chosen, rejection)

    counted = {way: _counted(body, warm.get(way) or loader(way)) for way in ways}
    calls = {way: call(way, files) for way in ways}
    if len(files) > 1:
        calls |= {way + FIRST: call(way, files[:1]) for way in ways}
    samples = sampled(calls, seconds, cpu_seconds)
    return {"seconds": samples, "counters": counted, "tensors": sum(len(file.tensors) for file in files)}


def _counted(body: LoadCase, chosen: Loader) -> dict[str, int]:
    """The operations of one load call: candidate names tried, and tensor names spelled to be looked up in a file."""
    spelled, spell = [0], getattr(chosen, "spell", None)

    def counting(name: str, suffix: str) -> str:
        spelled[0] += 1
        return name + suffix

    if spell:
        chosen.spell = counting  # type: ignore[attr-defined]
    loaded = chosen.load(base_of(body.model), placeholders(body), REJECTIONS[body.rejection])
    if spell:
        chosen.spell = spell  # type: ignore[attr-defined]
    return {"names": loaded.names_tried, "lookups": spelled[0]}


def placeholders(body: LoadCase) -> list[File]:
    """The files with one number for every tensor: matching never looks at values."""
    nothing = torch.zeros(1, 1)
    return [
        File(f"{place}:{identity(file)}", dict.fromkeys(_keys(file), nothing), file.strength, file.strength)
        for place, file in enumerate(body.files)
    ]


def _keys(file: AdapterFile) -> list[str]:
    return [
        factor_key(module, adapter.spelling, factor)
        for module, adapter in file.modules.items()
        for factor in (*adapter.factors, *(("alpha",) if adapter.alpha.shape is not None else ()))
    ]


def cpu_seconds(call: Callable[[], object]) -> float:
    """This process's CPU time of one call: matching is pure Python in one thread, and others may use the machine."""
    start = time.process_time()
    call()
    return time.process_time() - start


def sampled(
    calls: Mapping[str, Callable[[], object]],
    budget: float,
    clock: Callable[[Callable[[], object]], float] = cpu.seconds,
) -> dict[str, list[float]]:
    """Seconds of one call of each way, warmed up by one; see `interleave`."""
    for call in calls.values():
        call()

    def sample(way: str) -> float:
        with collected():
            return clock(calls[way])

    return interleave(tuple(calls), sample, MIN_BLOCKS, MAX_BLOCKS, budget)


@contextmanager
def collected() -> Iterator[None]:
    """Garbage collected before, none while timed: else the way that happens to set it off pays for all objects."""
    gc.collect(1)
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


# End to end: open, match, merge


def end_to_end(body: LoadCase, chosen: Loader) -> dict[str, Any]:
    """What each file did, the seconds of each stage and the bytes held; weights are made one at a time."""
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    files = open_files(body)
    seconds["open"], start = time.perf_counter() - start, time.perf_counter()
    loaded = chosen.load(base_of(body.model), files, REJECTIONS[body.rejection])
    seconds["match"], seconds["merge"] = time.perf_counter() - start, 0.0
    shapes = state_dict(body.model).shapes
    held = Counter({"files": sum(t.nbytes for f in {f.name: f for f in files}.values() for t in f.tensors.values())})
    for name, patches in loaded.patches.items():
        weight = made_weight(body.model, shapes[name])
        held["backups"] += weight.nbytes
        held["largest layer, f32"] = max(held["largest layer, f32"], 4 * weight.numel())
        seconds["merge"] += cpu.seconds(lambda w=weight, p=patches: chosen.merge(w, p))  # type: ignore[misc]
    fates = [_told(file, fate) for file, fate in zip(files, loaded.fates, strict=True)]
    return {"files": fates, "seconds": seconds, "bytes": dict(held), "weights": len(loaded.patches)}


def open_files(body: LoadCase) -> list[File]:
    """The files' tensors, read once for each path."""
    known = {path: opened(Path(path)) for path in dict.fromkeys(file.path or "" for file in body.files)}
    return [
        File(f.path or "", known[f.path or ""], f.strength, f.strength if f.text_strength is None else f.text_strength)
        for f in body.files
    ]


def made_weight(model: Model, shape: Shape) -> Tensor:
    return torch.full(shape, 0.01, dtype=DTYPES[model.dtype])


def _told(file: File, fate: Fate) -> dict[str, Any]:
    """A file's fate as plain data: by part the tensors, weights and kinds."""
    parts: dict[str, dict[str, Any]] = {}
    for patches in fate.patches.values():
        for target, (kind, tensors) in patches.items():
            part = parts.setdefault(PARTS[target.weight.partition(".")[0]], {"tensors": 0, "weights": 0, "kinds": []})
            part["tensors"] += len(tensors)
            part["weights"] += 1
            part["kinds"] = sorted({*part["kinds"], kind})
    for name, row in parts.items():
        row["strength"] = file.strength if name == "unet" else file.text_strength
    return {
        "file": file.name, "rejected": fate.rejected, "tensors": len(file.tensors), "parts": parts,
        "unmatched": sorted(fate.unmatched), "skipped": sorted({target.weight for target in fate.skipped}),
    }  # fmt: skip


def time_stages(body: LoadCase, ways: Sequence[str], seconds: float) -> dict[str, Any]:
    """Seconds of each stage and way, paired block by block, and the bytes of one whole pass of each way.

    Weights of one shape with as many patches take the same time: each such group is timed on one of its weights, and
    counts as often as it has members.
    """
    base, rejection, shapes = base_of(body.model), REJECTIONS[body.rejection], state_dict(body.model).shapes
    chosen = {way: loader(way) for way in ways}
    files = open_files(body)
    opening = sampled({"open": lambda: open_files(body)}, 0.0)
    matching = sampled({way: _match(way, base, files, rejection) for way in ways}, seconds, cpu_seconds)
    patches = loader("naive").load(base, files, rejection).patches
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, own in patches.items():
        groups.setdefault((shapes[name], *(p.kind for p in own)), []).append(name)
    merging = {way: [0.0] * MIN_BLOCKS for way in ways}
    for names in groups.values():
        weight = made_weight(body.model, shapes[names[0]])
        calls = {way: _merge(one, weight, patches[names[0]]) for way, one in chosen.items()}
        for way, samples in sampled(calls, 0.0).items():
            merging[way] = [a + len(names) * b for a, b in zip(merging[way], samples, strict=True)]
    return {
        "open": opening["open"], "match": matching, "merge": merging, "bytes": bytes_of(body, chosen[ways[-1]]),
        "weights": len(patches), "shapes": len(groups),
    }  # fmt: skip


def _match(way: str, base: Any, files: Sequence[File], rejection: Any) -> Callable[[], Loaded]:
    return lambda: loader(way).load(base, files, rejection)


def _merge(chosen: Loader, weight: Tensor, patches: Sequence[Patch]) -> Callable[[], Tensor]:
    return lambda: chosen.merge(weight, patches)


def bytes_of(body: LoadCase, chosen: Loader) -> dict[str, int]:
    """The allocator's peak of one whole pass that keeps every weight it replaces, and what of it was declared."""
    shapes = state_dict(body.model).shapes
    files = open_files(body)
    loaded = chosen.load(base_of(body.model), files, REJECTIONS[body.rejection])
    weights = {name: made_weight(body.model, shapes[name]) for name in loaded.patches}
    backups: dict[str, Tensor] = {}

    def merge_all() -> None:
        for name, patches in loaded.patches.items():
            backups[name], weights[name] = weights[name], chosen.merge(weights[name], patches)

    peak = cpu.peak_bytes(merge_all)
    return {
        "files": sum(tensor.nbytes for file in files for tensor in file.tensors.values()),
        "backups": sum(weight.nbytes for weight in backups.values()),
        "largest layer, f32": max(4 * weight.numel() for weight in weights.values()),
        "peak of merging": peak,
    }
