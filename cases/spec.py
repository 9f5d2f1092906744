"""The values that a case is made of: layers, adapters and inputs, none with a tensor in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

DType = Literal["f64", "f32", "bf16", "f16"]
# A file's factors may also be in fp8, which is widened on reading (to f32, exactly), never computed in.
FactorDType = Literal["f64", "f32", "bf16", "f16", "f8_e4m3", "f8_e5m2"]
Kind = Literal["linear", "conv1d", "conv2d", "conv3d"]
Values = Literal["normal", "exact", "special"]
Layout = Literal["contiguous", "transposed", "strided", "channels_last"]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
Shape = tuple[int, ...]

DTYPES: tuple[DType, ...] = get_args(DType)
SPATIAL_DIMS: dict[Kind, int] = {"linear": 0, "conv1d": 1, "conv2d": 2, "conv3d": 3}


class CaseError(ValueError):
    """A case that contradicts itself or cannot be read; the message names the field and value."""


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every case type: immutable, strict about unknown fields, short in JSON."""


class Layer(Value, frozen=True):
    """A base layer: sizes in features (linear) or channels (conv), one entry per spatial dim."""

    kind: Kind
    out: int
    inp: int
    kernel: Shape = ()
    stride: Shape = ()
    padding: Shape = ()
    dilation: Shape = ()
    padding_mode: PaddingMode = "zeros"
    groups: int = 1
    bias: bool = True

    def __post_init__(self) -> None:
        dims = SPATIAL_DIMS[self.kind]
        for field in ("kernel", "stride", "padding", "dilation"):
            if len(getattr(self, field)) != dims:
                raise CaseError(f"layer.{field} = {getattr(self, field)}: {self.kind} needs {dims}")
        if self.out % self.groups or self.inp % self.groups:
            raise CaseError(f"layer.groups = {self.groups} does not divide {self.out} and {self.inp}")

    @property
    def weight_shape(self) -> Shape:
        """(out, in / groups, *kernel), as torch stores it."""
        return (self.out, self.inp // self.groups, *self.kernel)


class Alpha(Value, frozen=True):
    """The ``alpha`` tensor of a file: its shape, dtype and value; ``absent`` means scale 1."""

    form: Literal["absent", "0d", "1", "1x1"] = "absent"
    value: float = 1.0
    dtype: Literal["f64", "f32", "bf16", "f16", "i64"] = "f32"

    @property
    def shape(self) -> Shape | None:
        """() , (1,) or (1, 1); None when the file has no alpha."""
        return {"absent": None, "0d": (), "1": (1,), "1x1": (1, 1)}[self.form]


class FileRef(Value, frozen=True):
    """Where an adapter's real tensors are: ``path``, and for each factor (and alpha) its tensor's name."""

    path: str
    tensors: Mapping[str, str]


class Adapter(Value, frozen=True):
    """One adapter on one layer: its kind, the names and shapes of its factors, and its strength.

    Factor names are the suffixes of LyCORIS and kohya files (``lokr_w1_a``, ``lora_down.weight``).
    The form (low rank, Tucker, …) follows from the names and shapes: see `form`. ``rows`` [start, end)
    are the output rows that the delta fills where it adapts a part of a fused layer (q of qkv); the
    other rows of the delta are zero.
    """

    kind: str
    factors: Mapping[str, Shape]
    alpha: Alpha = Alpha()
    strength: float = 1.0
    dtype: FactorDType = "f32"
    spelling: str = "lycoris"
    source: FileRef | None = None
    rows: tuple[int, int] | None = None

    @property
    def form(self) -> str:
        """A short reading of the factors, such as ``w1.2x2+w2_a.4x2+w2_b.2x3``."""
        sizes = ("x".join(map(str, shape)) or "0d" for shape in self.factors.values())
        names = (name.removeprefix(f"{self.kind}_").split(".")[0] for name in self.factors)
        return "+".join(f"{name}.{size}" for name, size in zip(names, sizes, strict=True))


class Input(Value, frozen=True):
    """The activation: shape (leading dims…, in) or (batch, in, *spatial), its layout in memory."""

    shape: Shape
    layout: Layout = "contiguous"


def numel(shape: Shape) -> int:
    """The number of elements of a shape; 1 for a 0-D one."""
    return math.prod(shape)
