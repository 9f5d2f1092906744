"""The case: a plain value that says everything needed to run one comparison.

A case is a header (schema version, suite, one seed) and one typed body per suite. It has a JSON
form (`encode`, `decode`) and a readable stable id (`case_id`). Tensors are never stored: they are
made from the seed by `fulldiff.cases.tensors`, or read from the adapter file a `FileRef` names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from fulldiff.cases.spec import (
    DTYPES,
    SPATIAL_DIMS,
    Adapter,
    Alpha,
    CaseError,
    DType,
    FactorDType,
    FileRef,
    Input,
    Kind,
    Layer,
    Layout,
    PaddingMode,
    Shape,
    Value,
    Values,
    numel,
)

__all__ = [
    "DTYPES", "SCHEMA", "SPATIAL_DIMS", "Adapter", "AdapterFile", "Alpha", "BenchCase", "Body", "Case", "CaseError",
    "DType", "FactorDType", "FileRef", "Input", "JoinCase", "Kind", "Layer", "Layout", "LoadCase", "MergeCase",
    "Model", "PaddingMode", "RestoreCase", "RuntimeCase", "Shape", "StepCase", "Value", "Values", "case_id", "decode",
    "encode", "numel",
]  # fmt: skip

SCHEMA = 1


class RuntimeCase(Value, frozen=True, tag="runtime", tag_field="suite"):
    """y = (W + ΔW) x for one layer, one or more adapters and one input, all in ``dtype``.

    ``checked`` spares a float64 oracle the size of a large layer: not 0, only the first so many output
    channels of every row of w1 are compared (of a LoRA: the first so many); the subject computes all.
    ``weights`` is where the base's own weight is (``weight.0``, … in row order, ``bias`` likewise); None
    makes one from the seed.
    """

    layer: Layer
    adapters: tuple[Adapter, ...]
    input: Input
    dtype: DType = "f32"
    values: Values = "normal"
    checked: int = 0
    weights: FileRef | None = None

    def __post_init__(self) -> None:
        for adapter in self.adapters:
            if self.values == "exact" and "dora_scale" in adapter.factors:
                raise CaseError("values = exact with dora_scale: a quotient by a norm is not exact")
            if adapter.rows and not 0 <= adapter.rows[0] < adapter.rows[1] <= self.layer.out:
                raise CaseError(f"adapter.rows = {adapter.rows}: the layer has rows 0 to {self.layer.out}")


class Model(Value, frozen=True):
    """A base model: one of the layer tables or a checkpoint's path, and the dtype of its weights.

    ``layers`` are those of the table that it has (named with their part, ``unet.conv_in``), none for all;
    features and channels are divided by ``shrink``, for cases that must be quick.
    """

    name: str
    dtype: DType = "f32"
    layers: tuple[str, ...] = ()
    shrink: int = 1


class AdapterFile(Value, frozen=True):
    """One adapter file: a real ``path``, or the adapters to write (layer name → adapter).

    ``tokens`` learned token embeddings (768,) are written beside the adapters.
    """

    strength: float = 1.0
    text_strength: float | None = None
    path: str | None = None
    spelling: str = "kohya"
    modules: Mapping[str, Adapter] = {}
    tokens: int = 0


class LoadCase(Value, frozen=True, tag="load", tag_field="suite"):
    """Several adapter files onto one model; every loader must reach the same patches.

    A file's ``text_strength`` is the text encoders', None for the same. With the spelling ``as named`` the keys
    of its ``modules`` are the modules' names as the file has them, of this model, another or none.
    """

    model: Model
    files: tuple[AdapterFile, ...]
    rejection: str = "12-tensors"


class JoinCase(Value, frozen=True, tag="join", tag_field="suite"):
    """Several files into one of rank Σr, with a weight per file and a run-time diagonal and scale.

    Layers are named with their part (``unet.conv_in``). ``diagonal`` is one number per file, or one per rank:
    those of the first file's ranks, then the second's; then a file has one rank in all its modules.
    ``model.dtype`` is what the model runs in. A file's weight is here alone: its own strengths are 1.
    """

    model: Model
    files: tuple[AdapterFile, ...]
    weights: tuple[float, ...]
    diagonal: tuple[float, ...] | None = None
    scale: float = 1.0
    values: Values = "normal"

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.files):
            raise CaseError(f"weights = {self.weights}: {len(self.files)} files need one each")
        if any((file.strength, file.text_strength) != (1.0, None) for file in self.files):
            raise CaseError("files.strength: a join case gives each file's strength in weights")


class RestoreCase(Value, frozen=True, tag="restore", tag_field="suite"):
    """Attach and detach in ``order`` (+i attaches adapter i-1, -i detaches it): W must come back."""

    runtime: RuntimeCase
    order: tuple[int, ...]
    cycles: int = 1


class MergeCase(Value, frozen=True, tag="merge", tag_field="suite"):
    """ΔW into the base's own dtype: cast(W + ΔW), all adapters summed once or one by one."""

    layer: Layer
    adapters: tuple[Adapter, ...]
    dtype: FactorDType = "bf16"
    values: Values = "normal"
    one_by_one: bool = False


class BenchCase(Value, frozen=True, tag="bench", tag_field="suite"):
    """A workload to time: one layer with its adapters and input, in several ways."""

    label: str
    runtime: RuntimeCase
    ways: tuple[str, ...]


class StepCase(Value, frozen=True, tag="step", tag_field="suite"):
    """A workload to time: one step of a whole UNet with random weights, a LoKr on each of its layers.

    ``size`` is the image's height and width in pixels; ``narrowed`` divides all channel counts of ``model``
    (1: its real size); ``convolutions`` adapts every layer, else the attention blocks only.
    """

    model: str
    size: tuple[int, int]
    ways: tuple[str, ...]
    dtype: DType = "f32"
    narrowed: int = 1
    factor: int = 8
    rank: int = 0
    convolutions: bool = True


Body = RuntimeCase | LoadCase | JoinCase | RestoreCase | MergeCase | BenchCase | StepCase


class Case(Value, frozen=True):
    """A whole case: what to run (`body`) and the one ``seed`` all its tensors come from."""

    body: Body
    seed: int = 0
    schema: int = SCHEMA

    @property
    def suite(self) -> str:
        """The promise under test: runtime, load, join, restore, merge (or bench)."""
        return str(type(self.body).__struct_config__.tag)


_decoder = msgspec.json.Decoder(Case)


def encode(case: Case) -> bytes:
    """The JSON form of a case, keys in the order of the types."""
    return msgspec.json.encode(case)


def decode(text: bytes | str) -> Case:
    """The case in ``text``; raises `CaseError` naming the field at fault."""
    try:
        case = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CaseError(f"not a fulldiff case: {error}") from error
    if case.schema != SCHEMA:
        raise CaseError(f"case schema {case.schema} is not {SCHEMA}: use the fulldiff that wrote it")
    return case


def case_id(case: Case) -> str:
    """A readable id, stable across runs and machines; its tail is a hash of the whole case."""
    digest = hashlib.blake2b(msgspec.json.encode(case, order="deterministic"), digest_size=5)
    return "/".join((case.suite, *_describe(case.body), digest.hexdigest()))


def _describe(body: Body) -> tuple[str, ...]:
    if isinstance(body, RuntimeCase):
        adapters = "&".join(f"{a.kind}[{a.form}]{_describe_rows(a)}" for a in body.adapters) or "bare"
        return (_describe_layer(body.layer), adapters, _describe_input(body), body.values)
    if isinstance(body, MergeCase):
        adapters = "&".join(f"{a.kind}[{a.form}]" for a in body.adapters)
        return (_describe_layer(body.layer), adapters, body.dtype, body.values)
    if isinstance(body, RestoreCase):
        return (*_describe(body.runtime), f"x{body.cycles}")
    if isinstance(body, BenchCase):
        return (body.label,)
    if isinstance(body, StepCase):
        size = "x".join(map(str, body.size))
        return (f"{body.model}-unet-{body.narrowed}", f"{size}-{body.dtype}", f"f{body.factor}-r{body.rank}")
    return (body.model.name, f"{len(body.files)}files")


def _describe_rows(adapter: Adapter) -> str:
    return "" if adapter.rows is None else f"@{adapter.rows[0]}-{adapter.rows[1]}"


def _describe_layer(layer: Layer) -> str:
    parts = [f"{layer.kind}-{layer.out}x{layer.inp}"]
    if layer.kernel:
        parts.append("k" + "x".join(map(str, layer.kernel)))
    for letter, values, default in (
        ("s", layer.stride, 1),
        ("p", layer.padding, 0),
        ("d", layer.dilation, 1),
    ):
        if any(value != default for value in values):
            parts.append(letter + "x".join(map(str, values)))
    if layer.padding_mode != "zeros":
        parts.append(layer.padding_mode)
    if layer.groups > 1:
        parts.append(f"g{layer.groups}")
    return "-".join(parts)


def _describe_input(body: RuntimeCase) -> str:
    shape = "x".join(map(str, body.input.shape))
    layout = "" if body.input.layout == "contiguous" else f"-{body.input.layout}"
    return f"{body.dtype}-{shape}{layout}"
