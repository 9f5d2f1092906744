"""A joined adapter while the model runs: diagonals, scale, realised files, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from written import row_named, values

from fulldiff.cases.model import Layer
from fulldiff.cases.tables import TableRow
from fulldiff.harness.backends import cpu
from fulldiff.harness.files import stitching
from fulldiff.harness.files.container import FileError
from fulldiff.harness.files.fold import save
from fulldiff.harness.files.joining import plan
from fulldiff.harness.files.piece import Piece
from fulldiff.harness.realise import module_for
from fulldiff.harness.subjects.joined_model import (
    Attached,
    JoinError,
    attach,
    attach_layers,
    attached_to,
    realize_as_lora,
    set_lora_diag,
    tune_lora_scale,
)
from fulldiff.reference.layers import apply

UP, DOWN = "lora_up.weight", "lora_down.weight"
QUERY = row_named("sd15", "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q")
CONV = row_named("sd15", "conv_in")
POINT = row_named("sd15", "down_blocks.0.attentions.0.proj_in")
TEXT = row_named("sd15", "text_model.encoder.layers.0.self_attn.v_proj")
ROWS = (QUERY, CONV, POINT, TEXT)
RANKS = {QUERY.name: (2, 3), CONV.name: (2, 0), POINT.name: (0, 3), TEXT.name: (2, 3)}

Setup = tuple[Attached, dict[str, nn.Module], Path]


def name_of(row: TableRow) -> str:
    return f"{row.part}.{row.name}"


def lora(row: TableRow, rank: int, seed: int) -> Piece[Tensor]:
    draw = random.Random(f"{row.name}{seed}")
    out, inp, *kernel = row.weight_shape
    return Piece(
        (row,), "lora", {UP: values(draw, out, rank, *[1] * len(kernel)), DOWN: values(draw, rank, inp, *kernel)}
    )


def joined_file(folder: Path) -> Path:
    """Files ``one`` and ``two`` of ranks 2 and 3, each without one of the layers; weights 1 and -0.5."""
    paths = []
    for at, name in enumerate(("one", "two")):
        path = folder / f"{name}.safetensors"
        save(path, "kohya", [lora(row, RANKS[row.name][at], at) for row in ROWS if RANKS[row.name][at]])
        paths.append(path)
    stitching.write(plan(paths, [1.0, -0.5], "sd15", "kohya"), "kohya", folder / "joined.safetensors")
    return folder / "joined.safetensors"


def modules(dtype: torch.dtype = torch.float64) -> dict[str, nn.Module]:
    draw = random.Random(5)
    made = {}
    for row in ROWS:
        weight = values(draw, *row.weight_shape).to(dtype)
        made[name_of(row)] = module_for(row.layer, weight, values(draw, row.out).to(dtype) if row.bias else None)
    return made


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    path, layers = joined_file(tmp_path), modules()
    return attach_layers(layers, path, "sd15"), layers, path


def x_for(layer: Layer, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (3, layer.inp) if layer.kind == "linear" else (2, layer.inp, 4, 5)
    return values(random.Random(9), *shape).to(dtype)


def branch(row: TableRow, numbers: list[float]) -> Tensor:
    """The layer's delta for a number per rank, by outer products of the files' own factors."""
    total, at = torch.zeros(row.weight_shape, dtype=torch.float64), 0
    for file, weight in enumerate((1.0, -0.5)):
        rank = RANKS[row.name][file]
        if rank:
            t = lora(row, rank, file).tensors
            for k in range(rank):
                outer = torch.outer(t[UP].flatten(1)[:, k], t[DOWN][k].flatten())
                total += numbers[at + k] * weight * outer.reshape(row.weight_shape)
        at += (2, 3)[file]
    return total


def check(layers: dict[str, nn.Module], numbers: list[float]) -> None:
    """Every layer computes with these five numbers, those of a missing file unused."""
    for row in ROWS:
        module: Any = layers[name_of(row)]
        x = x_for(row.layer)
        want = apply(row.layer, module.weight + branch(row, numbers), module.bias, x)
        torch.testing.assert_close(module(x), want, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ([1, 1], [1, 1, 1, 1, 1]),
        ([1, 0], [1, 1, 0, 0, 0]),
        ((0, 2.5), [0, 0, 2.5, 2.5, 2.5]),
        ({"two": 1, "one": -3}, [-3, -3, 1, 1, 1]),
        ([1, 0, 2.5, -1, 0.25], [1, 0, 2.5, -1, 0.25]),
        (torch.tensor([0, 1, 0, 1, 0]), [0, 1, 0, 1, 0]),
        (torch.tensor([0.5, 2.0]).half(), [0.5, 0.5, 2, 2, 2]),
        (range(5), [0, 1, 2, 3, 4]),
    ],
)
def test_a_diagonal_weighs_each_rank_on_linear_and_conv(setup: Setup, given: Any, numbers: list[float]) -> None:
    attached, layers, _ = setup
    check(layers, [1] * 5)
    attached.set_diagonal(given)
    check(layers, numbers)
    attached.set_diagonal([1, 1])
    check(layers, [1] * 5)


def test_one_call_sets_unet_and_text_encoder(setup: Setup) -> None:
    _, layers, _ = setup
    set_lora_diag(layers[name_of(CONV)], [0, 1])
    tune_lora_scale(layers[name_of(TEXT)], -2)
    check(layers, [0, 0, -2, -2, -2])
    assert attached_to(layers[name_of(QUERY)]) is attached_to(layers[name_of(TEXT)])


def test_detached_layers_are_what_they_were(setup: Setup) -> None:
    attached, layers, path = setup
    attached.set_diagonal([3, 7])
    attached.detach()
    for name, fresh in modules().items():
        row = next(row for row in ROWS if name_of(row) == name)
        assert torch.equal(layers[name](x_for(row.layer)), fresh(x_for(row.layer)))
    attach_layers(layers, path, "sd15")
    check(layers, [1] * 5)


def test_realised_once_twice_and_again_is_the_same(setup: Setup, tmp_path: Path) -> None:
    """The original writes the scale into the factors, and s² is what tuning the loaded file to s gives."""
    attached, layers, _ = setup
    attached.set_diagonal([1, 0.5, 2, 0, -1])
    attached.tune(0.75)
    wanted = [0.75 * v for v in (1, 0.5, 2, 0, -1)]
    first, second, third = (tmp_path / f"{n}.safetensors" for n in range(3))
    realize_as_lora(layers[name_of(QUERY)], first)
    attached.realise(second)
    assert first.read_bytes() == second.read_bytes()
    check(layers, wanted)
    attached.detach()
    loaded = attach_layers(layers, first, "sd15")
    assert loaded.files == ("one", "two")
    check(layers, wanted)
    loaded.realise(third)
    assert third.read_bytes() == first.read_bytes()
    loaded.tune(0.75)
    check(layers, [0.75 * v for v in wanted])
    loaded.set_diagonal([0, 1])
    loaded.tune(1)
    check(layers, [0, 0, *wanted[2:]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, 1, 1], r"a diagonal of 3: .*v_proj has ranks \[2, 3\]; give 5 numbers .* or 2, one per file"),
        ({"one": 1}, r"two: give one number for each of one, two"),
        ({"one": 1, "two": 1, "three": 1}, r"three: give one number for each of one, two"),
        ([1, float("nan")], "the diagonal has nan: give finite numbers"),
        ([], "a diagonal of 0"),
    ],
)
def test_a_diagonal_that_does_not_fit_is_refused_and_changes_nothing(setup: Setup, given: Any, message: str) -> None:
    attached, layers, _ = setup
    attached.set_diagonal([1, 0])
    with pytest.raises(JoinError, match=message):
        attached.set_diagonal(given)
    with pytest.raises(JoinError, match="the scale is inf"):
        attached.tune(float("inf"))
    check(layers, [1, 1, 0, 0, 0])


def test_layers_of_unequal_ranks_take_one_number_per_file(tmp_path: Path) -> None:
    path = tmp_path / "uneven.safetensors"
    save(path, "kohya", [lora(QUERY, 2, 0), lora(TEXT, 1, 0)])
    out = tmp_path / "joined.safetensors"
    stitching.write(plan([path, path], [1.0, 1.0], "sd15", "kohya"), "kohya", out)
    layers = {name: module for name, module in modules().items() if name in (name_of(QUERY), name_of(TEXT))}
    attached = attach_layers(layers, out, "sd15")
    with pytest.raises(JoinError, match=r"a diagonal of 4: .* has other ranks .* give 2"):
        attached.set_diagonal([1, 1, 1, 1])
    attached.set_diagonal([1, -1])
    for row in (QUERY, TEXT):
        module: Any = layers[name_of(row)]
        bare = nn.functional.linear(x_for(row.layer), module.weight, module.bias)
        torch.testing.assert_close(module(x_for(row.layer)), bare, rtol=0, atol=1e-12)


def test_what_cannot_be_attached_is_refused_and_leaves_nothing(setup: Setup, tmp_path: Path) -> None:
    _, layers, path = setup
    fresh = modules()
    refusals: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: attach_layers(layers, path, "sd15"), JoinError, "has a joined adapter already: detach it"),
        (
            lambda: attach_layers({name_of(QUERY): fresh[name_of(QUERY)]}, path, "sd15"),
            JoinError,
            "give all its layers",
        ),
        (lambda: attach(nn.Linear(1, 1), path, "sd15"), JoinError, "v_proj: no text_encoder was given; pass models by"),
        (
            lambda: attach({"text_encoder": nn.Linear(1, 1)}, path, "sd15"),
            JoinError,
            "the text_encoder, a Linear, has no",
        ),
        (lambda: set_lora_diag(nn.Linear(1, 1), [1]), JoinError, "this Linear has no joined adapter; attach one first"),
        (lambda: attach(nn.Linear(1, 1), tmp_path / "none.safetensors", "sd15"), FileError, "none.safetensors"),
    ]
    for call, kind, message in refusals:
        with pytest.raises(kind, match=message):
            call()
    assert all("forward" not in module.__dict__ for module in fresh.values())


def test_setting_a_diagonal_allocates_no_more_the_thousandth_time(setup: Setup) -> None:
    attached, layers, _ = setup
    storage = [bank.values.data_ptr() for bank in attached.banks.values()]
    first = cpu.memory(lambda: attached.set_diagonal([1, 0]))
    for turn in range(1000):
        attached.set_diagonal([turn % 2, 1])
    last = cpu.memory(lambda: attached.set_diagonal([1, 0]))
    assert last.peak == first.peak
    assert last.peak < 2000
    assert [bank.values.data_ptr() for bank in attached.banks.values()] == storage
    check(layers, [1, 1, 0, 0, 0])


def test_inference_is_the_same_each_time_in_training_mode_too(setup: Setup) -> None:
    _, layers, _ = setup
    module, x = layers[name_of(QUERY)], x_for(QUERY.layer)
    assert torch.equal(module.train()(x), module(x))
    assert torch.equal(module.eval()(x), module(x))


@pytest.mark.parametrize("inner", ["", "text_model."])
def test_a_text_encoder_is_found_with_and_without_its_inner_model(tmp_path: Path, inner: str) -> None:
    path, text = tmp_path / "text.safetensors", nn.Module()
    save(path, "kohya", [lora(TEXT, 2, 0)])
    at = text
    for name in f"{inner}encoder.layers.0.self_attn".split("."):
        at.add_module(name, nn.Module())
        at = at.get_submodule(name)
    at.add_module("v_proj", modules()[name_of(TEXT)])
    attached = attach({"text_encoder": text}, path, "sd15")
    assert attached_to(text) is attached
    attached.detach()
    with pytest.raises(JoinError, match="this Module has no joined adapter"):
        attached_to(text)


def test_layers_of_several_dtypes_share_one_adapter(tmp_path: Path) -> None:
    layers = modules()
    layers[name_of(TEXT)] = layers[name_of(TEXT)].to(torch.bfloat16)
    attached = attach_layers(layers, joined_file(tmp_path), "sd15")
    assert len(attached.banks) == 2
    attached.set_diagonal([0, 0])
    x = x_for(TEXT.layer, torch.bfloat16)
    module: Any = layers[name_of(TEXT)]
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
