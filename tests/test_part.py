"""The oracle of a part of a large layer's channels agrees with the oracle of all."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from fulldiff.cases.factors import diff, dora, loha, lokr, lora, with_bias
from fulldiff.cases.model import Adapter, Case, Input, Layer, RuntimeCase
from fulldiff.harness.judge import judge, truth_of
from fulldiff.harness.part import part_of
from fulldiff.harness.realise import realise
from fulldiff.harness.subjects.base import Subject, replace_forward
from fulldiff.harness.subjects.registry import subject

LINEAR, CONV = Layer("linear", 12, 6), Layer("conv2d", 12, 6, (3, 3), (1, 1), (1, 1), (1, 1))
ADAPTERS = {
    "lora": (LINEAR, lora(12, 6, 2)),
    "full": (LINEAR, lokr((3, 2), (4, 3))),
    "low rank": (LINEAR, lokr((3, 2), (4, 3), w1_rank=1, w2_rank=2)),
    "locon": (CONV, lora(12, 6, 2, (3, 3), mid=True)),
    "tucker": (CONV, lokr((3, 2), (4, 3), (3, 3), w2_rank=2, tucker=True)),
    "loha": (LINEAR, loha(12, 6, 2)),
    "tucker loha": (CONV, loha(12, 6, 2, (3, 3), tucker=True)),
    "diff with bias": (LINEAR, with_bias(diff((12, 6)), 12)),
    "dora": (LINEAR, dora(lokr((3, 2), (4, 3)), (12, 1))),
    "dora over the rows": (LINEAR, dora(lora(12, 6, 2), (1, 6))),
}


EXPECTED = {"lora": 2, "loha": 2, "diff": 2, "lokr": 6}


def _body(layer: Layer, adapter: Adapter) -> RuntimeCase:
    shape = (2, 6, 4, 4) if layer.kernel else (5, 6)
    return RuntimeCase(layer, (adapter,), Input(shape), "f64", checked=2)


@pytest.mark.parametrize(("layer", "adapter"), ADAPTERS.values(), ids=ADAPTERS)
def test_part_has_the_whole_outputs_channels(layer: Layer, adapter: Adapter) -> None:
    body = _body(layer, adapter)
    material = realise(Case(body, 1), body)
    part = part_of(body, material, 2)
    whole = truth_of(body, material, subject("full-diff"))
    torch.testing.assert_close(truth_of(part.body, part.material, subject("full-diff")), part.of(whole))
    assert part.body.layer.out == (12 if adapter.factors.get("dora_scale") == (1, 6) else EXPECTED[adapter.kind])


class Broken(Subject):
    """Spoils one output channel, or returns one too few."""

    def __init__(self, spoiled: int | None) -> None:
        self.spoiled = spoiled

    def attach(self, module, adapters):  # type: ignore[no-untyped-def]
        run = subject("full-diff").attach(module, adapters)
        inner = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = inner(x).clone()
            if self.spoiled is None:
                return y[..., :-1]
            y[..., self.spoiled] += 1
            return y

        outer = replace_forward(module, forward)
        return lambda: (outer(), run())


@pytest.mark.parametrize(("spoiled", "outcome"), [(5, "wrong"), (None, "wrong"), (6, "passed")])
def test_judged_on_the_first_channels_of_every_w1_row(spoiled: int | None, outcome: str) -> None:
    case = Case(_body(LINEAR, lokr((3, 2), (4, 3))), 1)
    assert judge(case, Broken(spoiled), lambda stage: None).outcome == outcome


def test_whole_output_where_a_part_is_no_adapter_of_its_own() -> None:
    grouped = replace(CONV, groups=2, inp=12)
    body = replace(_body(grouped, lokr((3, 2), (4, 3), (3, 3))), input=Input((1, 12, 4, 4)))
    assert part_of(body, realise(Case(body, 1), body), 2).channels is None
