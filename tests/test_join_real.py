"""Joined files as a user has them: two real ones, the command, the worker's own check, toggles of a file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors import safe_open
from shared_files import shared
from test_join_model import QUERY, joined_file, lora, name_of
from torch import Tensor, nn
from written import values

from fulldiff.harness.convert import parts
from fulldiff.harness.files import stitching
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import read_header
from fulldiff.harness.files.fold import save
from fulldiff.harness.files.joining import plan
from fulldiff.harness.files.match import match
from fulldiff.harness.join import worker as join_worker
from fulldiff.harness.protocol import CheckSum, Part, TimeToggle
from fulldiff.harness.realise import module_for
from fulldiff.harness.subjects.joined_model import attach_layers, set_lora_diag


@pytest.mark.parametrize("which", [0, 1])
def test_toggled_real_files_are_each_alone_on_a_chain_of_layers(tmp_path: Path, which: int) -> None:
    """SD1.5's first text encoder layer and UNet block with random weights; all other layers hold one number."""
    paths = [shared("adapters", name) for name in ("analog_svd_rank4.safetensors", "lora_disney.safetensors")]
    out = tmp_path / "joined.safetensors"
    made = plan(paths, [1.0, 1.0], "sd15", "cloneofsimo")
    stitching.write(made, "cloneofsimo", out)
    rows = [layer.rows[0] for layer in made.layers]
    draw = random.Random(1)
    chain = [row for size in (320, 768) for row in [r for r in rows if r.weight_shape == (size, size)][:12]]

    def fresh() -> dict[str, nn.Module]:
        made = {name_of(row): join_worker.bare_module(row.layer, torch.zeros(1)) for row in rows}
        return made | {name_of(row): weights[name_of(row)] for row in chain}

    weights = {
        name_of(row): module_for(row.layer, values(draw, *row.weight_shape).float() * (3 / row.inp) ** 0.5, None)
        for row in chain
    }

    def run(layers: dict[str, nn.Module]) -> dict[int, Tensor]:
        ends = {}
        for size in (320, 768):
            x = values(random.Random(2), 4, size).float()
            for row in chain:
                x = nn.functional.gelu(layers[name_of(row)](x)) * 2 if row.inp == size else x
            ends[size] = x
        return ends

    layers = fresh()
    alone = attach_layers(layers, paths[which], "sd15")
    want = run(layers)
    alone.detach()
    bare = run(layers)
    attached = attach_layers(layers, out, "sd15")
    set_lora_diag(layers[name_of(rows[0])], [[1] * 4 + [0], [0] * 4 + [1]][which])
    got = run(layers)
    attached.detach()
    for size in (320, 768):
        effect = float((want[size] - bare[size]).norm() / bare[size].norm())
        error = float((got[size] - want[size]).norm() / want[size].norm())
        assert effect > 1e-3
        assert error < 1e-5


def test_toggle_of_many_modules_is_measured(tmp_path: Path) -> None:
    known = join_worker.toggle(TimeToggle(str(joined_file(tmp_path)), "sd15", 20))
    assert (known["layers"], known["files"], len(known["seconds"])) == (4, 2, 20)


def test_the_check_of_a_joined_file_finds_a_wrong_layer(tmp_path: Path) -> None:
    """By the worker's own comparison: right, a little wrong, missing."""
    path = tmp_path / "one.safetensors"
    save(path, "kohya", [lora(QUERY, 2, 0)])
    (own,) = parts(match(read_header(path), table("sd15")))[name_of(QUERY)]

    def at(strength: float) -> tuple[Part, ...]:
        return (Part(replace(own.adapter, strength=strength), own.shape),)

    assert join_worker.check(CheckSum(at(0.7), at(0.7))).outcome == "passed"
    assert join_worker.check(CheckSum(at(0.7), at(0.7 + 1e-12))).outcome == "wrong"
    assert join_worker.check(CheckSum(at(0.7) + at(0.2), at(0.9))).outcome == "passed"
    assert join_worker.check(CheckSum(at(0.7), ())).outcome == "wrong"


def test_two_real_files_join_and_load_again(tmp_path: Path) -> None:
    names = ("analog_svd_rank4.safetensors", "lora_disney.safetensors")
    paths = [shared("adapters", name) for name in names]
    out = tmp_path / "joined.safetensors"
    run = [
        sys.executable,
        "-m",
        "fulldiff.harness.cli.main",
        "join",
        *map(str, paths),
        "-o",
        str(out),
        "--model",
        "sd15",
    ]
    done = subprocess.run([*run, "--weights", "1,-0.7", "--threads", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "192 of 192 layers are the weighted sum" in done.stdout
    assert "joined: 192 layers of rank 5 in f32, as cloneofsimo" in done.stdout
    assert "token <s2> of lora_disney is <s1-1>" in done.stdout
    with safe_open(out, "pt") as joined, safe_open(paths[1], "pt") as second:
        assert torch.equal(joined.get_tensor("<s1-0>"), second.get_tensor("<s1>"))
        assert joined.metadata()["unet:0:rank"] == "5"
        assert json.loads(joined.metadata()["ljl"])["ranks"]["unet:143"] == [4, 1]
        assert joined.get_tensor("unet:5:up").shape == (320, 5)
    again = subprocess.run(run, capture_output=True, text=True)
    assert again.returncode == 2
