"""What the gate times: a few layers of SDXL, each with an adapter of another form, the cheap and telling first."""

from __future__ import annotations

from fulldiff.cases.factors import lokr_for, lora
from fulldiff.cases.model import Adapter, BenchCase, Case, Layer, RuntimeCase
from fulldiff.harness.bench import plan

TOKENS = 1024
LINEAR = Layer("linear", 1280, 1280)
WIDE = Layer("linear", 10240, 1280)
CONVOLUTION = Layer("conv2d", 320, 320, (3, 3), (1, 1), (1, 1), (1, 1))
RANK = 16


def cells(subject: str, most: int) -> dict[str, Case]:
    """The first ``most`` cells by name; names begin with the subject that is gated, whose bytes they are."""
    adapters: list[tuple[Layer, str, Adapter]] = [
        (LINEAR, "LoKr, full w2", lokr_for(LINEAR, plan.FACTOR)),
        (LINEAR, f"LoRA, rank {RANK}", lora(LINEAR.out, LINEAR.inp, RANK)),
        (CONVOLUTION, f"LoKr, rank {RANK}", lokr_for(CONVOLUTION, plan.FACTOR, RANK)),
        (WIDE, f"LoKr, rank {RANK}", lokr_for(WIDE, plan.FACTOR, RANK)),
        (CONVOLUTION, f"LoCon, rank {RANK}", lora(CONVOLUTION.out, CONVOLUTION.inp, RANK, CONVOLUTION.kernel)),
        (CONVOLUTION, "LoKr, full w2", lokr_for(CONVOLUTION, plan.FACTOR)),
    ]
    return {
        f"{subject}: {plan.describe(layer)}, {TOKENS} tokens, {form}": _case(layer, adapter)
        for layer, form, adapter in adapters[:most]
    }


def _case(layer: Layer, adapter: Adapter) -> Case:
    return Case(BenchCase("gate", RuntimeCase(layer, (adapter,), plan.image(layer, TOKENS)), ()), 1)
