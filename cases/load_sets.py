"""Named load cases: the eight test sets of the pull request that proposed referential loading, and small ones.

The sets' files are those of SDXL with their true names and counts of modules: ``unet`` has 788, ``full`` 722 and the
264 of the text encoders, ``tiny`` 4; ``DMD2`` has unet's modules in another spelling (kohya's names of the original
layers); ``SD1.5`` is a LoRA of another model. The pull request counts 288 for the text encoders, which SDXL's two do
not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from msgspec.structs import replace

from fulldiff.cases import factors
from fulldiff.cases.load_names import LORA_SUFFIXES, SHRINK
from fulldiff.cases.model import Adapter, AdapterFile, Alpha, Case, LoadCase, Model, Shape
from fulldiff.cases.state_dicts import shrunk
from fulldiff.cases.tables import LDM_PREFIX, TableRow, aliases, load_table, underscored

SETS: dict[int, tuple[str, ...]] = {
    1: ("DMD2", "unet", "unet", "tiny", "SD1.5"),
    2: ("unet", "unet", "tiny", "SD1.5"),
    3: ("DMD2", "full", "full", "tiny"),
    4: ("unet", "unet", "tiny"),
    5: ("unet", "unet"),
    6: ("unet", "unet", "full"),
    7: ("unet", "full"),
    8: ("full",),
}
TINY = 4
HEAVY_LOADS = frozenset(f"load-set-{number}" for number in SETS)


def set_case(number: int, shrink: int = 1, rank: int = 1) -> Case:
    """One of the eight sets. Files of the same name in a set differ in their values: they are two files."""
    files = tuple(file_of(kind, shrink, rank, copy) for copy, kind in enumerate(SETS[number]))
    return Case(LoadCase(Model("sdxl", "f16", shrink=shrink), files), number)


def file_of(kind: str, shrink: int = 1, rank: int = 1, copy: int = 0) -> AdapterFile:
    """A file of a set as a LoRA; ``copy`` tells two of a kind apart, by their alphas."""
    return lora_file(rows_of(kind), kind == "DMD2", shrink, rank, copy)


def lora_file(rows: Iterable[TableRow], original: bool, shrink: int = 1, rank: int = 1, copy: int = 0) -> AdapterFile:
    """A kohya LoRA of these layers, by their diffusers or (``original``) ldm names."""
    modules = {}
    for row in rows:
        out, inp, *kernel = shrunk(row, shrink)
        alpha = Alpha("0d", rank + copy / 8)
        modules[kohya(row, original)] = factors.lora(out, inp, rank, tuple(kernel), alpha=alpha, dtype="f16")
    return AdapterFile(spelling="as named", modules=modules)


@cache
def rows_of(kind: str) -> tuple[TableRow, ...]:
    """The layers that a file of a set adapts."""
    if kind == "SD1.5":
        return tuple(row for row in load_table("sd15") if row.in_lora)
    rows = load_table("sdxl")
    if kind == "full":
        return tuple(row for row in rows if row.in_lora)
    unet = tuple(row for row in rows if row.part == "unet" and (row.in_lora or row.in_locon))
    return unet[:TINY] if kind == "tiny" else unet


def kohya(row: TableRow, original: bool) -> str:
    """A layer's kohya name."""
    if original:
        return "lora_unet_" + underscored(row.original.path.removeprefix(LDM_PREFIX))
    # The first encoder has two in SD1.5's key map and in SDXL's; files of SD1.5 say lora_te_.
    return aliases(row)[0]


@cache
def named_load_cases() -> Mapping[str, Case]:
    """The named cases of the suite ``load``."""
    sets = {f"load-set-{number}": set_case(number, SHRINK["sdxl"]) for number in SETS}
    return {**{f"load-{name}": Case(body, 1) for name, body in _small().items()}, **sets}


Q = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
FC = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
SMALL = Model("sdxl", "f32", (Q, FC), SHRINK["sdxl"])
Q_KOHYA = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
Q_LDM = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
Q_DIFFUSERS = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_q"
FC_KOHYA = "lora_te1_text_model_encoder_layers_0_mlp_fc1"


def _small() -> dict[str, LoadCase]:
    """One case for each thing that a faster loader must keep."""
    q = factors.lora(4, 4, 2, alpha=Alpha("0d", 1.0))
    fc = factors.lora(19, 4, 2)
    one, two = file({Q_KOHYA: q}), file({Q_LDM: q, FC_KOHYA: fc})
    peft = replace(q, spelling="peft")
    return {
        "one-file": load(one),
        "every-spelling": load(*(file({Q_DIFFUSERS: replace(q, spelling=spelling)}) for spelling in LORA_SUFFIXES)),
        "alias-known-then-later": load(one, file({Q_KOHYA: q, Q_LDM: q})),
        "alias-known-then-earlier": load(file({Q_LDM: q}), file({Q_DIFFUSERS: peft, Q_LDM: q})),
        "strengths": load(replace(one, strength=0.5), replace(two, strength=-1.0, text_strength=0.25)),
        "strength-0": load(replace(two, strength=0.0), replace(one, strength=0.0)),
        "same-file-twice": load(one, one),
        "same-file-at-two-strengths": load(replace(one, strength=0.4), replace(one, strength=0.6)),
        "12-unmatched": load(file({Q_KOHYA: q} | nonsense(4))),
        "13-unmatched": load(file({Q_KOHYA: q} | nonsense(4) | {"nothing": orphan("lora_down.weight")}), one),
        "text-tensors-beyond-the-limit": load(file(dict.fromkeys(TEXT, fc)), model=Model(
            "sdxl", "f32", tuple(f"text_encoder.text_model.encoder.layers.{n}.mlp.fc1" for n in range(7)), 160)),
        "orphan-alpha": load(file({Q_KOHYA: Adapter("lora", {}, Alpha("0d", 1.0)), FC_KOHYA: fc})),
        "orphan-down": load(file({Q_KOHYA: orphan("lora_down.weight"), FC_KOHYA: fc})),
        # Each is refused; stacked, the rank that one lacks would be made up for by the other.
        "ranks-do-not-fit": load(*(file({Q_KOHYA: wrong}) for wrong in (pair((4, 2), (1, 4)), pair((4, 1), (2, 4))))),
        "orphan-up": load(file({Q_KOHYA: orphan("lora_up.weight"), FC_KOHYA: fc})),
        "skipped": load(file({"lora_unet_class_embedding_linear_1": q, Q_KOHYA: q})),
        "fused-q": load(file({"transformer.transformer_blocks.0.attn.to_q": factors.lora(8, 8, 2)}), model=Model(
            "flux", "f32", tuple(f"transformer.transformer_blocks.0.attn.to_{n}" for n in "qkv"), SHRINK["flux"])),
    }  # fmt: skip


TEXT = tuple(f"lora_te1_text_model_encoder_layers_{n}_mlp_fc1" for n in range(7))


def load(*files: AdapterFile, model: Model = SMALL) -> LoadCase:
    return LoadCase(model, files)


def file(modules: Mapping[str, Adapter]) -> AdapterFile:
    return AdapterFile(spelling="as named", modules=modules)


def pair(up: Shape, down: Shape) -> Adapter:
    return Adapter("lora", {"lora_up.weight": up, "lora_down.weight": down})


def orphan(factor: str) -> Adapter:
    return Adapter("lora", {factor: (4, 4)})


def nonsense(count: int) -> dict[str, Adapter]:
    """Modules of three tensors each that no model has."""
    return {f"nothing_{n}": factors.lora(4, 4, 1, alpha=Alpha("0d", 1.0)) for n in range(count)}
