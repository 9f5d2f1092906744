"""What a join writes, planned from the files' headers alone: layers, blocks, tensors, tokens and metadata.

A block is what one file adapts of one layer: its ranks are a span of the joined layer's. A layer that a file
does not adapt has no block of it. Nothing is read but headers; `fulldiff.harness.files.stitching` has the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fulldiff.cases.model import Adapter, FactorDType, Shape
from fulldiff.cases.tables import LDM_PREFIX, TableRow
from fulldiff.harness.files.adapters import WIDTHS
from fulldiff.harness.files.base import Span, table
from fulldiff.harness.files.container import FileError, Header, read_header
from fulldiff.harness.files.match import Match, Target, matched
from fulldiff.harness.files.names import is_embedding
from fulldiff.harness.files.writers import HOLDS, WRITERS, Writer

UP, DOWN, MID, ALPHA = "lora_up.weight", "lora_down.weight", "lora_mid.weight", "alpha"
LORA = frozenset((UP, DOWN, MID, "scale"))
EMBED = "<embed>"
# fp8 is widened: nothing computes in it. The others are kept as they are.
KEPT: dict[FactorDType, FactorDType] = {"f8_e4m3": "f32", "f8_e5m2": "f32"}


@dataclass(frozen=True)
class Block:
    """One file's adapter in a joined layer. ``ranges`` are its up's rows, where a fused layer was split."""

    file: int
    adapter: Adapter
    weight: float
    ranges: tuple[Span, ...] = ()

    @property
    def rank(self) -> int:
        """How many of the layer's ranks are this block's."""
        return self.adapter.factors[DOWN][0]


@dataclass(frozen=True)
class JoinedLayer:
    """One layer of the joined file: its blocks in the order of the files, and the dtype of its factors.

    ``core`` says that the kernel is in a mid factor: block by block on its diagonal.
    """

    rows: tuple[TableRow, ...]
    stored: bool
    blocks: tuple[Block, ...]
    dtype: FactorDType
    core: bool

    @property
    def name(self) -> str:
        """The layer's name with its part, ``unet.conv_in``; a fused one's is its path in the original checkpoint."""
        row = self.rows[0]
        return row.original.path.removeprefix(LDM_PREFIX) if self.stored else f"{row.part}.{row.name}"

    @property
    def shape(self) -> Shape:
        """The weight's (out, in / groups, *kernel)."""
        return (sum(row.out for row in self.rows), *self.rows[0].weight_shape[1:])

    @property
    def rank(self) -> int:
        """Σr."""
        return sum(block.rank for block in self.blocks)

    def ranks(self, files: int) -> list[int]:
        """The ranks of each file's blocks, 0 where it has none."""
        return [sum(block.rank for block in self.blocks if block.file == file) for file in range(files)]

    def shapes(self) -> dict[str, Shape]:
        """The factors' shapes."""
        out, inp, *kernel = self.shape
        ones = (1,) * len(kernel)
        shapes: dict[str, Shape] = {UP: (out, self.rank, *ones)}
        shapes[DOWN] = (self.rank, inp, *(ones if self.core else kernel))
        return shapes | ({MID: (self.rank, self.rank, *kernel)} if self.core else {})


@dataclass(frozen=True)
class Token:
    """A learned token's embedding: where it is, and its name in the joined file."""

    file: int
    tensor: str
    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Plan:
    """A whole join: ``names`` are the files', each once; ``left_out`` says why a tensor is not in it."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    layers: tuple[JoinedLayer, ...]
    tokens: tuple[Token, ...]
    matches: tuple[Match, ...]
    headers: tuple[Header, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """One file, read and matched."""

    header: Header
    match: Match


def plan(
    paths: Sequence[Path], weights: Sequence[float], model: str, family: Writer, dtype: FactorDType | None = None
) -> Plan:
    """Everything that a join of these files will write, in ``family``'s names.

    Args:
        dtype: what all factors are written in; None keeps each layer's own (its widest file's).

    Raises:
        FileError: a file cannot be read or joined whole; the message says which module of it and why.
        TableError: there is no table of this model.
    """
    if len(paths) != len(weights):
        raise FileError(f"{len(paths)} files and {len(weights)} weights: give one weight for each file, in order")
    sources = [source(path, model) for path in paths]
    blocks = [list(_blocks(at, s.match, w)) for at, (s, w) in enumerate(zip(sources, weights, strict=True))]
    layers = tuple(_layers(blocks, family, dtype))
    return Plan(
        tuple(distinct(paths)), tuple(weights), layers, tuple(_tokens([s.header for s in sources])),
        tuple(s.match for s in sources), tuple(s.header for s in sources), dict(_left_out(sources)),
    )  # fmt: skip


def source(path: Path, model: str) -> Source:
    """One file matched whole to the model's table; one with embeddings alone is whole too."""
    header = read_header(path)
    found = matched(header, table(model))
    bad = [f"{r.tensors[0]}: {r.reason}" for r in found.refused]
    bad += [f"{name}: {model} has no such layer" for name in found.unmatched]
    bad += [f"{target.module}: {reason}" for target in found.targets if (reason := _unjoinable(target))]
    if bad:
        more = f" ({len(bad) - 1} more)" if len(bad) > 1 else ""
        raise FileError(f"{path}: cannot be joined on {model}: {bad[0]}{more}; leave the file out, or mend it")
    if not found.targets and not any(is_token(header, name) for name in header.tensors):
        raise FileError(f"{path}: has no LoRA and no learned token; leave it out")
    return Source(header, found)


def family_of(paths: Sequence[Path], model: str) -> Writer:
    """The family of names that all these files have, where it can hold them together; else kohya's."""
    targets = [target for path in paths for target in source(path, model).match.targets]
    families: set[str] = {target.adapter.spelling for target in targets}
    parts = {row.part for target in targets for row in target.rows}
    only = next((family for family in WRITERS if {family} == families), None)
    return only if only and (only != "peft" or len(parts) == 1) else "kohya"


def _unjoinable(target: Target) -> str:
    """Why a target is not a LoRA that can be joined; empty where it is."""
    adapter = target.adapter
    other = sorted(set(adapter.factors) - LORA)
    if adapter.kind != "lora":
        return f"a {adapter.kind} has no rank to join by; only LoRAs (up, down, mid) are joined"
    if other:
        return f"a LoRA with {', '.join(other)} is no plain sum of ranks; only up, down, mid and alpha are joined"
    return "it adapts a part of a stored layer; split it first (fulldiff convert)" if adapter.rows else ""


def is_token(header: Header, name: str) -> bool:
    """Whether a tensor is a learned token's embedding."""
    return header.metadata.get(name) == EMBED or is_embedding(name)


def _blocks(file: int, found: Match, weight: float) -> Iterator[tuple[Target, Block]]:
    for target in found.targets:
        yield target, Block(file, target.adapter, weight)


def _layers(
    files: Sequence[Sequence[tuple[Target, Block]]], family: Writer, dtype: FactorDType | None
) -> Iterator[JoinedLayer]:
    """The joined layers, part by part in the table's order. A fused layer stays whole where all files have it so."""
    pairs = [pair for file in files for pair in file]
    split = {path for target, _ in pairs if (path := _split_path(target, family))}
    found: dict[tuple[str, int, bool], tuple[tuple[TableRow, ...], list[Block]]] = {}
    for target, block in pairs:
        for rows, stored, own in _pieces(target, block, split):
            found.setdefault((rows[0].part, rows[0].order, stored), (rows, []))[1].append(own)
    for (_, _, stored), (rows, blocks) in sorted(found.items(), key=lambda item: item[0]):
        yield _layer(rows, stored, blocks, family, dtype)


def _split_path(target: Target, family: Writer) -> str:
    """The original checkpoint's tensor whose layers are to be written one by one; empty where it stays whole."""
    original = target.rows[0].original
    whole = is_stored(target) and family in ("kohya", "comfyui")
    return original.path if original.rows and not whole else ""


def is_stored(target: Target) -> bool:
    """Whether the target is a tensor of the original checkpoint, whose rows the layers share or reorder."""
    original = target.rows[0].original
    return bool(original.rows) and target.name == original.path.removeprefix(LDM_PREFIX)


def _pieces(target: Target, block: Block, split: set[str]) -> Iterator[tuple[tuple[TableRow, ...], bool, Block]]:
    """The block on each layer that is written: of a split fused layer, each slice has its rows of up."""
    if not is_stored(target):
        yield target.rows, False, block
    elif target.rows[0].original.path not in split:
        yield target.rows, True, block
    else:
        for row in target.rows:
            yield (row,), False, replace(block, ranges=row.original.rows)


def _layer(
    rows: tuple[TableRow, ...], stored: bool, blocks: Sequence[Block], family: Writer, dtype: FactorDType | None
) -> JoinedLayer:
    core = MID in HOLDS[family] and all(MID in block.adapter.factors for block in blocks)
    return JoinedLayer(rows, stored, tuple(blocks), dtype or widest([b.adapter.dtype for b in blocks]), core)


def widest(dtypes: Iterable[FactorDType]) -> FactorDType:
    """The narrowest dtype that holds all of these: f32 for f16 with bf16, and for fp8."""
    known = {KEPT.get(dtype, dtype) for dtype in dtypes}
    return "f32" if {"f16", "bf16"} <= known <= {"f16", "bf16"} else max(known, key=lambda dtype: WIDTHS[dtype])


def _tokens(headers: Sequence[Header]) -> Iterator[Token]:
    """Every file's learned tokens, named as the original join names them."""
    for file, header in enumerate(headers):
        for at, name in enumerate(sorted(name for name in header.tensors if is_token(header, name))):
            info = header.tensors[name]
            yield Token(file, name, f"<s{file}-{at}>", info.dtype, info.shape)


def _left_out(sources: Sequence[Source]) -> Iterator[tuple[str, str]]:
    """What the files hold that the joined one does not: orphan alphas and the like."""
    for known in sources:
        for skipped in known.match.skipped:
            if not is_token(known.header, skipped.tensor):
                yield f"{known.header.path.name}: {skipped.tensor}", skipped.reason


def distinct(paths: Sequence[Path]) -> list[str]:
    """A name for each file, the shortest that tells it from the others: stem, folder and stem, or with a number."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}/{path.stem}" for path in paths]
    return names if len(set(names)) == len(names) else [f"{name}#{at}" for at, name in enumerate(names)]
