"""The two ways in which a joined LoRA runs: its factors beside the layer, or W' written into a scratch at each call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fulldiff.harness.files.joining import DOWN, MID, UP
from fulldiff.harness.subjects import ljl
from fulldiff.harness.subjects.ljl import Branch, Shared

LINEAR = nn.Linear(12, 8)
LAYERS = {
    "linear": LINEAR,
    "linear to more": nn.Linear(12, 20),
    "conv1d": nn.Conv1d(12, 8, 3, padding=1, stride=2),
    "conv2d grouped": nn.Conv2d(12, 8, (3, 2), groups=4, padding=1, padding_mode="circular"),
    "conv3d": nn.Conv3d(12, 8, (1, 2, 2), dilation=(1, 2, 1)),
}
RANK = 5


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def branch(layer: nn.Module, dtype: torch.dtype = torch.float64, core: bool = False) -> Branch:
    layer.to(dtype).requires_grad_(False)
    kernel = layer.weight.shape[2:]
    t = {UP: seeded(layer.weight.shape[0], RANK), DOWN: seeded(RANK, layer.weight.shape[1], *kernel)}
    if core:
        t |= {DOWN: seeded(RANK, layer.weight.shape[1], *[1] * len(kernel)), MID: seeded(RANK, RANK, *kernel)}
    t = {name: tensor.to(dtype) for name, tensor in t.items()}
    return Branch(layer, t, Shared(), torch.ones(RANK, dtype=dtype))


def input_of(layer: nn.Module, tokens: int) -> Tensor:
    positions = (tokens,) if isinstance(layer, nn.Linear) else (2, 12, *[tokens] * (layer.weight.dim() - 2))
    return seeded(*positions, *([12] if isinstance(layer, nn.Linear) else [])).double()


def is_written(own: Branch, x: Tensor) -> bool:
    """Whether a call wrote W' into the scratch."""
    own.shared.streamed.scratch.clear()
    own.over(own.module.forward)(x)
    return bool(own.shared.streamed.scratch)


@pytest.mark.parametrize("name", LAYERS)
def test_both_ways_give_the_same_and_follow_the_diagonal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, outputs = LAYERS[name], []
    own, x = branch(layer), input_of(layer, 6)
    for written in (False, True):
        monkeypatch.setattr(Branch, "_is_written", lambda *_, written=written: written)
        run, results = own.over(layer.forward), []
        for numbers in ([1.0] * RANK, [2.5, 0, -1, 1, 0], [0.0] * RANK):
            own.diagonal.copy_(torch.tensor(numbers))
            results.append(run(x))
        assert is_written(own, x) == written
        outputs.append(results)
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    torch.testing.assert_close(outputs[1][2], layer(x), rtol=0, atol=0)
    assert (outputs[1][0] - outputs[1][1]).abs().max() > 0.1


def test_few_tokens_run_beside_the_layer_and_many_through_the_scratch() -> None:
    own = branch(LINEAR)
    # 5 (12 + 8) multiplications a token against 5 · 12 · 8.
    assert [is_written(own, input_of(LINEAR, tokens)) for tokens in (1, 4, 5, 100)] == [False, False, True, True]


def test_where_it_matters_both_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ljl, "FEW", 0)
    own, x = branch(LINEAR), input_of(LINEAR, 5)
    for faster in (True, False):
        tries = iter([faster])
        monkeypatch.setattr(ljl, "is_faster", lambda one, other, tries=tries: next(tries))
        own.shared.faster.clear()
        assert is_written(own, x) is faster
        assert is_written(own, x) is faster  # no second try


@pytest.mark.parametrize("why", ["narrow", "core", "training", "another forward", "another class"])
def test_the_scratch_is_not_for(why: str) -> None:
    layer = nn.Conv2d(12, 8, 3) if why == "core" else nn.Linear(12, 8)
    if why == "another class":
        layer = type("Quantised", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x)})(12, 8)
    own = branch(layer, torch.bfloat16 if why == "narrow" else torch.float64, core=why == "core")
    x = input_of(layer, 100 if why != "core" else 20).to(layer.weight.dtype)
    if why == "training":
        x.requires_grad_()
    if why == "another forward":
        before = layer.forward
        layer.forward = lambda x: before(x)
    assert not is_written(own, x)
