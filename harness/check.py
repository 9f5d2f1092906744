"""`fulldiff check FILE`: what an adapter file holds, what of it fits a model, and whether a subject applies it right.

The manager reads headers only; each layer's tensors are read, looked at and judged by a worker, one layer
at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fulldiff.cases.model import Case, FileRef, Input, RuntimeCase, numel
from fulldiff.cases.tables import models
from fulldiff.harness.files.base import Base, table
from fulldiff.harness.files.checkpoint import checkpoint
from fulldiff.harness.files.container import Header, read_header
from fulldiff.harness.files.match import Match, Target, match
from fulldiff.harness.manager import Worker
from fulldiff.harness.protocol import Facts, Judge, Judgement
from fulldiff.harness.search import FINE

# The input of each judgement, and how many channels of each w1 row the oracle computes.
TOKENS, CHANNELS = 4, 16
# The tokens of the largest workspace shown: SDXL's longest sequence at 1024×1024.
WORKSPACE_TOKENS = 4096
# alpha over rank that differs more than this among a file's layers is worth a look.
SPREAD = 8.0
LIMIT = 600.0
F32 = 4


@dataclass(frozen=True)
class Checked:
    """One layer: its targets (several where families are mixed), the judgement, and the tensors' facts."""

    targets: tuple[Target, ...]
    judgement: Judgement
    facts: Facts

    @property
    def name(self) -> str:
        return self.targets[0].name

    @property
    def kind(self) -> str:
        """``lora``, ``dora lokr``, ``lora + diff``, …"""
        kinds = ("dora " * ("dora_scale" in t.adapter.factors) + t.adapter.kind for t in self.targets)
        return " + ".join(kinds)


@dataclass(frozen=True)
class Report:
    """All that is known of a file: the match, and each layer judged (none if only the header was read)."""

    header: Header
    match: Match
    subject: str
    layers: tuple[Checked, ...] = ()

    @property
    def not_finite(self) -> list[str]:
        """The tensors with NaN or infinity."""
        return [name for layer in self.layers for name in layer.facts.not_finite]

    @property
    def wrong(self) -> list[Checked]:
        """Layers that the subject computes wrong, or not at all."""
        return [layer for layer in self.layers if layer.judgement.outcome not in FINE]

    @property
    def untaken(self) -> list[Checked]:
        """Layers that the subject says it does not apply, though the file is sound."""
        return [c for c in self.layers if c.judgement.outcome in ("refused", "unsupported") and not c.facts.not_finite]

    @property
    def whole(self) -> bool:
        """Whether every tensor is of use: none unmatched, refused or not finite."""
        return not (self.match.unmatched or self.match.refused or self.not_finite)

    @property
    def spread(self) -> float:
        """The largest |alpha over rank| of the file's layers over the smallest; 1 where all are equal."""
        scales = [abs(s) for layer in self.layers for s in layer.facts.scales if s]
        return max(scales) / min(scales) if scales else 1.0

    @property
    def full_diff_bytes(self) -> tuple[int, int]:
        """Bytes of all layers' ΔW in f32, and of the largest alone."""
        sizes = [F32 * numel(target.layer.weight_shape) for target in _first_of_each(self.match.targets)]
        return sum(sizes), max(sizes, default=0)

    @property
    def factor_bytes(self) -> int:
        """Bytes of the matched tensors, as they are stored."""
        refs = (target.adapter.source for target in self.match.targets)
        names = {name for ref in refs if ref for name in ref.tensors.values()}
        return sum(self.header.tensors[name].end - self.header.tensors[name].begin for name in names)

    @property
    def workspace(self) -> int | None:
        """The largest workspace that the subject promises at `WORKSPACE_TOKENS`; None: it promises none."""
        return max((c.facts.workspace for c in self.layers if c.facts.workspace is not None), default=None)


def base_of(model: str) -> tuple[Base, Header | None]:
    """A layer table by name, or a checkpoint's header by path.

    Raises:
        FileError: the checkpoint cannot be read or has no layers.
    """
    if model in models():
        return table(model), None
    header = read_header(Path(model))
    return checkpoint(header), header


def read(path: Path, base: Base) -> Report:
    """The file's header matched to the base; raises FileError where nothing fits."""
    header = read_header(path)
    return Report(header, match(header, base), "")


def count(report: Report) -> int:
    """How many layers there are to judge."""
    return len(groups(report.match.targets))


def judge(report: Report, worker: Worker, subject: str, weights: Header | None, advance: Callable[[], None]) -> Report:
    """The report with every layer judged; layers of one shape follow each other and share a base weight."""
    ordered = sorted(groups(report.match.targets), key=lambda g: (g[0].layer.weight_shape, g[0].name))
    layers = []
    for group in ordered:
        layers.append(_judge(group, worker, subject, weights))
        advance()
    return Report(report.header, report.match, subject, tuple(layers))


def _judge(group: tuple[Target, ...], worker: Worker, subject: str, weights: Header | None) -> Checked:
    case = Case(runtime_case(group, weights), 1)
    answer = worker.ask(Judge(case, subject, WORKSPACE_TOKENS, LIMIT))
    assert answer.judgement is not None
    return Checked(group, answer.judgement, answer.facts or Facts())


def runtime_case(group: tuple[Target, ...], weights: Header | None) -> RuntimeCase:
    """The case of one layer with the file's own factors, on few tokens (a small image)."""
    layer = group[0].layer
    adapters = tuple(target.adapter for target in group)
    base = _weights(group[0], weights) if weights else None
    return RuntimeCase(layer, adapters, _input(group[0]), checked=CHANNELS, weights=base)


def _input(target: Target) -> Input:
    layer = target.layer
    if layer.kind == "linear":
        return Input((TOKENS, layer.inp))
    sizes = (max(2 * s, d * (k - 1) + 1) for s, d, k in zip(layer.stride, layer.dilation, layer.kernel, strict=True))
    return Input((1, layer.inp, *sizes))


def _weights(target: Target, header: Header) -> FileRef:
    """Where the checkpoint has the layer's weight and bias."""
    named = {f"weight.{at}": name for at, name in enumerate(target.weights)}
    biases = [name.removesuffix("weight") + "bias" for name in target.weights]
    found = {f"bias.{at}": name for at, name in enumerate(biases) if name in header.tensors}
    return FileRef(str(header.path.resolve()), named | found)


def groups(targets: Iterable[Target]) -> list[tuple[Target, ...]]:
    """The targets of each layer."""
    found: dict[str, list[Target]] = {}
    for target in targets:
        found.setdefault(target.name, []).append(target)
    return [tuple(group) for group in found.values()]


def _first_of_each(targets: Iterable[Target]) -> list[Target]:
    return [group[0] for group in groups(targets)]


def outcomes(layers: Iterable[Checked]) -> Counter[str]:
    """How many layers ended how."""
    return Counter(layer.judgement.outcome for layer in layers)
