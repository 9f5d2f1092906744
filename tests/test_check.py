"""`fulldiff check` and `fulldiff convert` on small files, as a user runs them, and on a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shared_files import shared
from torch import Tensor
from typer.testing import CliRunner

from fulldiff.harness.cli.main import app
from fulldiff.harness.convert import parts
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import read_header
from fulldiff.harness.files.match import match
from fulldiff.harness.protocol import Compare
from fulldiff.harness.rewriting import compare

Tensors = dict[str, Tensor]
Q = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
K = Q.replace("to_q", "to_k")


def _values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _lora(prefix: str, rank: int = 4, alpha: float = 2.0) -> Tensors:
    return {
        f"{prefix}.lora_down.weight": _values(rank, 320),
        f"{prefix}.lora_up.weight": _values(320, rank),
        f"{prefix}.alpha": torch.tensor(alpha),
    }


def _run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, " ".join(done.output.split())


def _check(folder: Path, tensors: Tensors, *more: object) -> tuple[int, str, dict[str, Any]]:
    path, out = folder / "adapter.safetensors", folder / "report.json"
    save_file(tensors, path)
    code, text = _run("check", path, "--model", "sd15", "--json", out, *more)
    return code, text, json.loads(out.read_text())


def test_a_sound_file_passes(tmp_path: Path) -> None:
    code, text, report = _check(tmp_path, _lora(Q) | _lora(K))
    assert code == 0, text
    assert "verdict: passed; every tensor is accounted for and usable" in text
    assert report["tensors"] == {"unet": {"matched": 6}}
    assert [layer["outcome"] for layer in report["layers"]] == ["passed", "passed"]
    assert report["bytes"]["full_diff_all_layers"] == 2 * 320 * 320 * 4
    assert report["bytes"]["factors"] == 2 * (2 * 4 * 320 * 4 + 4)
    norm = torch.linalg.matrix_norm(0.5 * _values(320, 4).double() @ _values(4, 320).double())
    assert report["layers"][0]["norm"] == pytest.approx(float(norm))


def test_a_wrong_subject_fails_and_its_worst_layer_is_named(tmp_path: Path) -> None:
    code, text, report = _check(tmp_path, _lora(Q) | _lora(K, alpha=4.0), "--subject", "fault:scale-twice")
    assert code == 1
    assert "FAILED, fault:scale-twice is wrong on 1 of 2 layers" in text
    assert "worst lora layer: down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q" in text
    assert sorted(layer["outcome"] for layer in report["layers"]) == ["passed", "wrong"]


def test_a_tensor_with_nan_is_named_and_its_layer_not_applied(tmp_path: Path) -> None:
    tensors = _lora(Q) | _lora(K)
    tensors[f"{K}.lora_up.weight"][3, 1] = torch.nan
    code, text, report = _check(tmp_path, tensors)
    assert code == 2
    assert report["not_finite"] == [f"{K}.lora_up.weight"]
    assert f"not finite: {K}.lora_up.weight" in text
    assert "passed on what is usable" in text


def test_what_cannot_be_used_is_said_by_name(tmp_path: Path) -> None:
    orphan = {f"{K}.lora_up.weight": _values(320, 4), "lora_unet_nowhere.lora_up.weight": _values(8, 4)}
    code, text, report = _check(tmp_path, _lora(Q) | orphan)
    assert code == 2
    assert f"refused {K} (1 tensors): orphan lora_up.weight" in text
    assert "PARTLY USABLE" in text or "passed on what is usable" in text
    assert len(report["refused"]) + len(report["unmatched"]) == 2


def test_odd_alphas_and_spikes_are_pointed_out(tmp_path: Path) -> None:
    tensors = _lora(Q) | _lora(K, alpha=40.0)
    tensors[f"{Q}.lora_up.weight"][:, 0] *= 1000
    code, text, report = _check(tmp_path, tensors)
    assert code == 0
    assert report["alpha_over_rank_spread"] == 20
    assert "alpha over rank differs 20-fold" in text
    assert "spectral spike: in 1 layers" in text


def test_the_header_alone_tells_what_matches(tmp_path: Path) -> None:
    tensors = _lora(Q)
    tensors[f"{Q}.lora_up.weight"][0, 0] = torch.nan  # not read
    code, text, report = _check(tmp_path, tensors, "--header")
    assert code == 0
    assert "header only, nothing was computed" in text
    assert report["layers"] == []


def test_a_diff_and_a_lora_on_one_layer_are_judged_as_their_sum(tmp_path: Path) -> None:
    code, text, report = _check(tmp_path, _lora(Q) | {f"{Q}.diff": _values(320, 320)})
    assert code == 0, text
    (layer,) = report["layers"]
    assert layer["kind"] == "lora + diff"
    assert "materialised" in layer["message"]


def test_a_checkpoint_is_a_base_with_its_own_weights(tmp_path: Path) -> None:
    base = tmp_path / "unet.safetensors"
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    save_file({f"{name}.weight": _values(320, 320)}, base)
    save_file(_lora(Q), tmp_path / "a.safetensors")
    code, text = _run("check", tmp_path / "a.safetensors", "--model", base, "--weights")
    assert code == 0, text
    assert "1 passed" in text
    save_file({f"{name}.weight": torch.full((320, 320), torch.nan)}, base)
    code, text = _run("check", tmp_path / "a.safetensors", "--model", base, "--weights")
    assert "verdict: passed" not in text or code != 0


def test_weights_of_a_table_are_refused(tmp_path: Path) -> None:
    save_file(_lora(Q), tmp_path / "a.safetensors")
    code, text = _run("check", tmp_path / "a.safetensors", "--model", "sd15", "--weights")
    assert code == 2
    assert "sd15 is a table of names and shapes" in text


@pytest.mark.parametrize("family", ["lycoris", "diffusers", "peft", "comfyui", "cloneofsimo"])
def test_converted_files_have_the_same_deltas(tmp_path: Path, family: str) -> None:
    path, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({name: t.half() for name, t in (_lora(Q) | _lora(K)).items()}, path)
    code, text = _run("convert", path, "--to", family, "--model", "sd15", "-o", out)
    assert code == 0, text
    assert "2 of 2 layers have the same delta" in text
    assert set(load_file(out)) != set(load_file(path)) or family == "kohya"
    assert not list(tmp_path.glob("*.partial*"))


def test_converting_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(_lora(Q), path)
    code, text = _run("convert", path, "--to", "peft", "--model", "sd15", "-o", path)
    assert code == 2
    assert "exists" in text


def test_two_files_that_differ_are_told_apart(tmp_path: Path) -> None:
    def found(name: str, tensors: Tensors) -> Any:
        save_file(tensors, tmp_path / name)
        (own,) = parts(match(read_header(tmp_path / name), table("sd15"))).values()
        return own

    one, moved = found("one.safetensors", _lora(Q)), found("two.safetensors", _lora(Q, alpha=2.001))
    assert compare(Compare(one, one)).outcome == "passed"
    assert compare(Compare(one, moved)).outcome == "wrong"
    assert compare(Compare(one, ())).outcome == "wrong"


def test_a_real_adapter_passes() -> None:
    path = shared("adapters", "lora_disney.safetensors")
    code, text = _run("check", path, "--model", "sd15")
    assert code == 0, text
    assert "lora 192 cloneofsimo f32 1 1 192 passed" in text, text
    assert "skipped <s1>, <s2>: a learned token's embedding" in text
