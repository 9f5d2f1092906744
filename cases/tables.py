"""The layer tables of the known base models, and the names adapter files give to their layers.

A table (``models/*.csv``, written by ``models/make_tables.py``, which describes the columns) has
one row per Linear or Conv layer. An adapter file names a layer in one of several families:
`aliases` gives a row's names in all of them. One name may mean several rows: original checkpoints
fuse q, k and v into one tensor, and each of these rows is a slice of it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import ceil, prod
from typing import Any, Literal

import msgspec

from fulldiff.cases.model import Kind, Layer, Shape

Part = Literal["unet", "transformer", "text_encoder", "text_encoder_2"]
Group = Literal["attention", "feed_forward", "projection", "modulation", "resnet", "sampler", "io_embed"]

PIXELS_PER_LATENT = 8
CLIP_TEXT = 77
# The longest prompt of the models whose transformer reads a language model's states.
LONG_TEXT = 512

KOHYA_TEXT_PREFIXES: dict[str, dict[str, str]] = {
    "sd15": {"text_encoder": "lora_te_"},
    "sdxl": {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"},
    "flux": {"text_encoder": "lora_te1_"},
}
LDM_PREFIX = "model.diffusion_model."
REMEDY = "write the table anew: python -m fulldiff.cases.models.make_tables"
ORIGINAL = re.compile(r"(?P<path>[^\[]+)(?:\[(?:(?P<transposed>T)|(?P<rows>[\d:+]+))\])?")


class TableError(ValueError):
    """A table that is missing or cannot be read; the message names the file, row and remedy."""


class Original(msgspec.Struct, frozen=True):
    """Where a layer's weight is in the original checkpoint.

    ``rows`` are the row ranges [start, end) of the stored tensor that make up the layer, in the
    layer's order; empty means all rows. ``transposed`` means stored as (in, out).
    """

    path: str
    rows: tuple[tuple[int, int], ...] = ()
    transposed: bool = False


class TableRow(msgspec.Struct, frozen=True):
    """One layer of one base model. Sizes are features (linear) or channels (conv)."""

    model: str
    order: int
    part: Part
    name: str
    original_name: str
    kind: Kind
    out: int
    inp: int = msgspec.field(name="in")
    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int
    bias: bool
    group: Group
    in_lora: bool
    in_locon: bool
    tokens: str

    @property
    def layer(self) -> Layer:
        """The row as the layer of a case."""
        return Layer(
            kind=self.kind,
            out=self.out,
            inp=self.inp,
            kernel=self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias,
        )

    @property
    def weight_shape(self) -> Shape:
        """(out, in / groups, *kernel), as torch stores it."""
        return (self.out, self.inp // self.groups, *self.kernel)

    @property
    def parameters(self) -> int:
        """Elements of the weight, which are those of a full diff (the bias not counted)."""
        return prod(self.weight_shape)

    @property
    def parameters_per_rank(self) -> int:
        """Elements that one unit of LoRA rank adds: a row of down and a column of up."""
        return self.out + self.parameters // self.out

    @property
    def original(self) -> Original:
        """``original_name`` taken apart.

        Raises:
            TableError: the name's suffix is none of ``[a:b]``, ``[a:b+c:d]`` and ``[T]``.
        """
        found = ORIGINAL.fullmatch(self.original_name)
        if not found:
            raise TableError(
                f"{self.model}.csv: {self.name}: original_name {self.original_name!r} should end "
                f"in [a:b], [a:b+c:d], [T] or nothing: {REMEDY}"
            )
        return Original(found["path"], row_ranges(found["rows"]), bool(found["transposed"]))


def row_ranges(text: str | None) -> tuple[tuple[int, int], ...]:
    """``3072:6144+0:3072`` as ((3072, 6144), (0, 3072))."""
    ranges = (part.split(":") for part in text.split("+")) if text else ()
    return tuple((int(start), int(end)) for start, end in ranges)


def models() -> tuple[str, ...]:
    """The base models that have a table, by name, sorted."""
    tables = files(__package__).joinpath("models").iterdir()
    return tuple(sorted(f.name.removesuffix(".csv") for f in tables if f.name.endswith(".csv")))


@cache
def load_table(model: str) -> tuple[TableRow, ...]:
    """Every layer of ``model`` in table order; read once per process.

    Raises:
        TableError: there is no such table, or one of its rows cannot be read.
    """
    if model not in models():
        raise TableError(f"no layer table for model {model!r}: choose from {', '.join(models())}")
    text = files(__package__).joinpath("models", f"{model}.csv").read_text(encoding="utf-8")
    lines = csv.DictReader(text.splitlines())
    return tuple(read_row(model, number, line) for number, line in enumerate(lines, start=2))


def read_row(model: str, line: int, columns: Mapping[str, str]) -> TableRow:
    """One CSV line as a row; ``line`` counts from 1, the header included, for the message."""
    try:
        sizes: dict[str, Any] = {
            axis: [int(size) for size in columns[axis].split("x") if size]
            for axis in ("kernel", "stride", "padding", "dilation")
        }
        return msgspec.convert({**columns, **sizes, "model": model}, TableRow, strict=False)
    except (KeyError, ValueError, AttributeError) as error:
        raise TableError(f"{model}.csv, line {line}: {error}: {REMEDY}") from error


def aliases(row: TableRow) -> tuple[str, ...]:
    """The names adapter files give to ``row``, without suffixes such as ``.lora_up.weight``.

    kohya (diffusers path and original path), LyCORIS, diffusers (dotted, bare, with ``processor``)
    and the original path dotted. Names of a fused layer are shared by all rows that are its slices.
    """
    if row.part == "unet":
        return unet_aliases(row)
    if row.part == "transformer":
        return transformer_aliases(row)
    prefix = KOHYA_TEXT_PREFIXES[row.model][row.part]
    return (prefix + underscored(row.name), f"{row.part}.{row.name}")


def unet_aliases(row: TableRow) -> tuple[str, ...]:
    """A UNet layer's names; the original path is ldm's."""
    ldm = row.original.path.removeprefix(LDM_PREFIX)
    processor = row.name.replace(".to_", ".processor.to_").replace("to_out.0", "to_out")
    names = (
        f"lora_unet_{underscored(row.name)}",
        f"lora_unet_{underscored(ldm)}",
        f"lycoris_{underscored(row.name)}",
        f"unet.{row.name}",
        row.name,
        f"unet.{processor}",
        processor,
        f"diffusion_model.{ldm}",
    )
    return tuple(dict.fromkeys(names))


def transformer_aliases(row: TableRow) -> tuple[str, ...]:
    """A diffusion transformer layer's names; some trainers put BFL's prefix before either path."""
    original = row.original.path
    names = (
        f"lora_unet_{underscored(original)}",
        f"lora_unet_{underscored(row.name)}",
        f"lora_transformer_{underscored(row.name)}",
        f"lycoris_{underscored(row.name)}",
        f"transformer.{row.name}",
        row.name,
        f"diffusion_model.{original}",
        f"diffusion_model.{row.name}",
        original,
    )
    return tuple(dict.fromkeys(names))


def underscored(path: str) -> str:
    """A dotted path as kohya and LyCORIS write it."""
    return path.replace(".", "_")


def tokens(row: TableRow, height: int, width: int) -> int:
    """Positions of the layer's output for one image of ``height`` × ``width`` pixels (batch 1).

    Tokens of a linear layer, output pixels of a convolution. A text counts in full: 77 tokens for
    CLIP and the UNets, 512 for the transformers. Z-Image itself then pads the image and the text to
    multiples of 32, which is not counted here.

    Raises:
        ValueError: the model cannot make an image of that size.
    """
    text = LONG_TEXT if row.part == "transformer" else CLIP_TEXT
    counts = {"one": 1, "text": text}
    terms = row.tokens.split("+")
    return sum(counts.get(term) or image_tokens(row, term, height, width) for term in terms)


def image_tokens(row: TableRow, term: str, height: int, width: int) -> int:
    """Positions of ``spatial/F``; a UNet's strided convolutions round odd sizes up."""
    factor = int(term.removeprefix("spatial/"))
    step = PIXELS_PER_LATENT * (factor if row.part == "transformer" else 1)
    if min(height, width) < 1 or height % step or width % step:
        raise ValueError(
            f"{row.model}: an image of {height} x {width} pixels is impossible: give a height and "
            f"a width that are positive multiples of {step}"
        )
    return prod(ceil(size // PIXELS_PER_LATENT / factor) for size in (height, width))
