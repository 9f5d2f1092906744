"""The weights of a base model as its checkpoint's state dict names them, made from its layer table.

The tables hold Linear and Conv layers. A UNet has normalisation layers besides, and the key maps of loaders name
layers that the architecture may have and a model lacks (a ResNet's shortcut, the last block's sampler): both follow
from the tables' paths. Names are those of the ComfyUI and Forge lineage: ``diffusion_model.…`` for the denoiser,
``clip_l.transformer.…`` and ``clip_g.transformer.…`` for the text encoders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from fulldiff.cases.model import Model, Shape
from fulldiff.cases.tables import LDM_PREFIX, TableError, TableRow, load_table

Rows = tuple[int, int]
ENCODERS = {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}
MODEL = "diffusion_model."
# Layers of the UNet architecture by diffusers and ldm path, as far as no layer of a table implies them.
OPTIONAL = (
    ("class_embedding.linear_1", "label_emb.0.0"),
    ("class_embedding.linear_2", "label_emb.0.2"),
    ("add_embedding.linear_1", "label_emb.0.0"),
    ("add_embedding.linear_2", "label_emb.0.2"),
)
# The samplers that the last block of a UNet would have.
LAST_SAMPLERS = {
    "sd15": (("down_blocks.3.downsamplers.0.conv", "input_blocks.12.0.op"),
             ("up_blocks.3.upsamplers.0.conv", "output_blocks.11.2.conv")),
    "sdxl": (("down_blocks.2.downsamplers.0.conv", "input_blocks.9.0.op"),
             ("up_blocks.2.upsamplers.0.conv", "output_blocks.8.1.conv")),
}  # fmt: skip
# The normalisation layers beside a layer: its ldm and diffusers ends, and theirs. The width is that of its input.
NORMS = (
    ("in_layers.2", "conv1", (("in_layers.0", "norm1"),)),
    ("out_layers.3", "conv2", (("out_layers.0", "norm2"),)),
    ("proj_in", "proj_in", (("norm", "norm"),)),
    ("attn1.to_q", "attn1.to_q", (("norm1", "norm1"), ("norm2", "norm2"), ("norm3", "norm3"))),
    ("out.2", "conv_out", (("out.0", "conv_norm_out"),)),
)


@dataclass
class StateDict:
    """Shapes by name: the ``denoiser``'s and the ``text`` encoders'; ``diffusers`` gives, for each layer of the
    architecture, its diffusers path, its weight's name and, of a fused weight, its rows."""

    denoiser: dict[str, Shape] = field(default_factory=dict)
    text: dict[str, Shape] = field(default_factory=dict)
    diffusers: list[tuple[str, str, Rows | None]] = field(default_factory=list)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Every weight's shape."""
        return self.denoiser | self.text


@cache
def state_dict(model: Model) -> StateDict:
    """The state dict of a table's model, or of those of its layers that ``model.layers`` names.

    Raises:
        TableError: there is no such table.
    """
    made = StateDict()
    rows = chosen_rows(model)
    for row in rows:
        if row.part in ENCODERS:
            _add_text(made, row, model.shrink)
        else:
            _add_layer(made, row, model.shrink)
    if rows and rows[0].part in ("unet", *ENCODERS):
        made.diffusers += _absent(model.name, rows)
    if any(row.part == "text_encoder" for row in rows):
        made.text["clip_l.transformer.text_projection.weight"] = _small((768, 768), model.shrink)
    return made


def chosen_rows(model: Model) -> tuple[TableRow, ...]:
    """The table's rows that the model has; a row's name is with its part (``unet.conv_in``)."""
    rows = load_table(model.name)
    if not model.layers:
        return rows
    known = {layer_name(row): row for row in rows}
    if unknown := sorted(set(model.layers) - known.keys()):
        raise TableError(f"model.layers: {model.name} has no {unknown[0]}; names are those of its table, with the part")
    return tuple(row for row in rows if layer_name(row) in model.layers)


def layer_name(row: TableRow) -> str:
    """A row's name with its part."""
    return f"{row.part}.{row.name}"


def shrunk(row: TableRow, shrink: int) -> Shape:
    """The weight's shape with features and channels divided by ``shrink``, at least 1."""
    return _small(row.weight_shape[:2], shrink) + row.weight_shape[2:]


def _small(sizes: Sequence[int], shrink: int) -> Shape:
    return tuple(max(1, size // shrink) for size in sizes)


def _add_text(made: StateDict, row: TableRow, shrink: int) -> None:
    name = f"{ENCODERS[row.part]}.transformer.{row.name}"
    made.text[f"{name}.weight"] = shrunk(row, shrink)


def _add_layer(made: StateDict, row: TableRow, shrink: int) -> None:
    """A layer of the denoiser, or a slice of a fused one; with the normalisation layers beside it."""
    path = MODEL + row.original.path.removeprefix(LDM_PREFIX)
    shape, weight = shrunk(row, shrink), f"{path}.weight"
    rows = _rows_of(row, shrink)
    if row.original.rows:
        shape = (max(made.denoiser.get(weight, (0,))[0], rows[1] if rows else 0), *shape[1:])
    made.denoiser[weight] = shape
    if row.bias:
        made.denoiser[f"{path}.bias"] = shape[:1]
    if rows or not row.original.rows:
        made.diffusers.append((row.name, weight, rows))
    for end, diffusers_end, norms in NORMS if row.part == "unet" else ():
        if path.endswith(end) and row.name.endswith(diffusers_end):
            _add_norms(made, path.removesuffix(end), row.name.removesuffix(diffusers_end), norms, shape[1])


def _add_norms(made: StateDict, path: str, name: str, norms: Iterable[tuple[str, str]], width: int) -> None:
    for end, diffusers_end in norms:
        for tensor in ("weight", "bias"):
            made.denoiser[f"{path}{end}.{tensor}"] = (width,)
        made.diffusers.append((f"{name}{diffusers_end}", f"{path}{end}.weight", None))


def _rows_of(row: TableRow, shrink: int) -> Rows | None:
    """The rows of a fused weight; None for a whole one, and for one whose order differs (its loaders swap it)."""
    if len(row.original.rows) != 1:
        return None
    start, end = row.original.rows[0]
    return (start // shrink, max(end // shrink, start // shrink + 1))


def _absent(model: str, rows: Sequence[TableRow]) -> Iterator[tuple[str, str, Rows | None]]:
    """What the architecture may have and no row is."""
    known = {row.name for row in rows}
    shortcuts = [_shortcut(row) for row in rows if row.part == "unet" and row.name.endswith(".conv1")]
    for name, path in (*shortcuts, *OPTIONAL, *LAST_SAMPLERS.get(model, ())):
        if name not in known:
            yield name, f"{MODEL}{path}.weight", None


def _shortcut(row: TableRow) -> tuple[str, str]:
    path = row.original.path.removeprefix(LDM_PREFIX)
    return row.name.replace(".conv1", ".conv_shortcut"), path.replace(".in_layers.2", ".skip_connection")
