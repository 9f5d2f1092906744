"""Our subjects on LoHa, diff, DoRA and fused parts: what is made whole is said, what is wrong is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulldiff.cases.catalogue import CATALOGUE, HEAVY
from fulldiff.cases.model import RuntimeCase
from fulldiff.harness.judge import judge
from fulldiff.harness.realise import factors64, realise
from fulldiff.harness.subjects import loha
from fulldiff.harness.subjects.base import Adapter, Refused, Unsupported
from fulldiff.harness.subjects.registry import subject
from fulldiff.reference.truth import Factors, Truth

SUBJECTS = ("full-diff", "runtime-lokr")
DIFF = {"diff": torch.ones(4, 6)}
LORA = {"lora_up.weight": torch.ones(4, 1), "lora_down.weight": torch.ones(1, 6)}


def counting(*shape: int) -> Tensor:
    """1, 2, 3 … with every third negative, in float64."""
    values = torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.where(values % 3 == 0, -values, values).reshape(shape)


def hada(out: int, inp: int, rank: int, kernel: tuple[int, ...] = (), tucker: bool = False) -> dict[str, Tensor]:
    t: dict[str, Tensor] = {}
    for number in (1, 2):
        t[f"hada_w{number}_a"] = counting(rank, out) if tucker else counting(out, rank)
        t[f"hada_w{number}_b"] = counting(rank, inp if tucker else inp * torch.Size(kernel).numel()) * number
        if tucker:
            t[f"hada_t{number}"] = counting(rank, rank, *kernel) - number
    return t


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "tucker"), [((), False), ((3,), False), ((2, 2), False), ((3,), True)])
def test_a_loha_is_a_lora_of_its_rank_squared(rank: int, kernel: tuple[int, ...], tucker: bool) -> None:
    """Exactly: whole numbers in float64."""
    shape = (3, 5, *kernel)
    t = hada(3, 5, rank, kernel, tucker) | {"alpha": torch.tensor(2.0 * rank)}
    lora = loha.as_lora(Adapter("loha", t, 0.5), shape, torch.float64)
    assert lora.tensors["lora_down.weight"].shape[0] == rank**2
    weight = torch.zeros(shape, dtype=torch.float64)
    want = Truth().delta(Factors("loha", t, 0.5), weight)
    assert want.any()
    assert torch.equal(Truth().delta(Factors("lora", lora.tensors, lora.strength), weight), want)


@pytest.mark.parametrize(
    ("out", "inp", "rank", "cheaper"),
    [(640, 640, 4, True), (640, 640, 17, True), (640, 640, 18, False), (8, 8, 2, False), (9, 9, 2, True)],
)
def test_a_loha_runs_as_a_lora_below_half_the_layer_s_size(out: int, inp: int, rank: int, cheaper: bool) -> None:
    """r²·(in + out) against in·out multiplications a token."""
    assert loha.is_cheaper(Adapter("loha", hada(out, inp, rank)), (out, inp)) is cheaper


NAMED = {
    "loha-of-high-rank": "materialised: LoHa, cheaper whole than as a LoRA of its rank squared",
    "d12-dora-in": "materialised: DoRA of a lora",
    "d12-dora-lokr-out": "materialised: DoRA of a lokr",
    "d10-diff-and-lora": "materialised: diff",
    "four-kinds": "materialised: DoRA of a lora, diff",
    "bias-delta-alone": "",
    "d9-qkv-qv": "",
    "d1-low-rank": "",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_result_says_what_was_made_whole(name: str) -> None:
    found = judge(CATALOGUE[name], subject("runtime-lokr"), lambda stage: None)
    assert (found.outcome, found.message) == ("passed", NAMED[name])


def run(name: str, module: nn.Module, adapter: Adapter, x: Tensor) -> Tensor:
    with torch.no_grad():
        detach = subject(name).attach(module, [adapter])
        y: Tensor = module(x).clone()
        detach()
    return y


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_part_of_a_grouped_convolution(name: str) -> None:
    """Rows 1 and 2 of four, which lie in two groups; the input channels are 1 and 10."""
    module = nn.Conv1d(2, 4, 1, groups=2, bias=False)
    nn.init.zeros_(module.weight)
    t = {"lora_up.weight": torch.tensor([[[3.0]], [[5.0]]]), "lora_down.weight": torch.tensor([[[2.0]]])}
    y = run(name, module, Adapter("lora", t, rows=(1, 3)), torch.tensor([[[1.0], [10.0]]]))
    assert y.flatten().tolist() == [0, 6, 100, 0]


BAD: dict[str, tuple[type[Exception], Adapter, str]] = {
    "rows beyond the layer": (Refused, Adapter("diff", DIFF, rows=(2, 6)), "rows 2 to 6"),
    "magnitude of no size": (
        Refused,
        Adapter("lora", LORA | {"dora_scale": torch.ones(5)}),
        r"dora_scale is \(5,\)",
    ),
    "norm layer": (Unsupported, Adapter("diff", {"w_norm": torch.ones(4)}), "w_norm"),
    "DoRA of a diff": (Unsupported, Adapter("diff", DIFF | {"dora_scale": torch.ones(4)}), "dora_scale"),
    "another kind": (Unsupported, Adapter("oft", {}), "'oft'"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", SUBJECTS)
def test_what_does_not_fit_is_refused_by_name(name: str, case: str) -> None:
    kind, adapter, named = BAD[case]
    with pytest.raises(kind, match=named):
        run(name, nn.Linear(6, 4), adapter, torch.ones(1, 6))


def delta_of(body: RuntimeCase, case: Any) -> bool:
    """Whether the adapters change anything at all."""
    material = realise(case, body)
    weight, truth = material.weight.double(), Truth()
    adapters = factors64(body, material)
    return any(bool(truth.delta(a, weight).any()) or "diff_b" in a.tensors for a in adapters if a.strength)


def test_the_catalogue_s_adapters_change_something() -> None:
    """A delta of zeros would pass any subject."""
    at_zero = ("strength-0", "strength-0-dora")
    bodies = {name: case for name, case in CATALOGUE.items() if name not in (*HEAVY, *at_zero)}
    idle = [n for n, case in bodies.items() if isinstance(case.body, RuntimeCase) and not delta_of(case.body, case)]
    assert idle == []
