"""A LoKr file: matched to SDXL's layers, checked with its own factors, refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from fulldiff.harness.bench.run import check_file
from fulldiff.harness.files.container import FileError
from fulldiff.harness.files.match import read

LAYER = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"


def test_a_lokr_file_is_matched_and_judged_with_its_own_factors(tmp_path: Path) -> None:
    path = tmp_path / "lokr.safetensors"
    tensors = {"lokr_w1": torch.ones(8, 8), "lokr_w2_a": torch.ones(80, 4), "lokr_w2_b": torch.ones(4, 80) / 80}
    file = {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    save_file(file | {f"{LAYER}.alpha": torch.tensor(2.0), "stray": torch.ones(1)}, path)
    found = read(path, "sdxl")
    assert [target.name for target in found.targets] == ["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"]
    assert found.unmatched == ("stray",)
    (result,) = check_file(found, tmp_path, Console(quiet=True))
    assert result.judgement.outcome == "passed"


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}"])
def test_what_is_no_adapter_file_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    with pytest.raises(FileError, match=r"broken\.safetensors"):
        read(path, "sdxl")
