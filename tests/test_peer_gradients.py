"""The gradients of the factors that peers train, against finite differences (torch's gradcheck, float64).

A wrong one is named in `WRONG`, with the reason; its test fails once a newer peer is right. PEFT 0.21.2, LyCORIS 4.1.3.
DoRA is not here: PEFT takes its norm as a constant, as the paper proposes.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

RANK, OUT, INP = 2, 4, 6
KERNELS: dict[str, tuple[int, ...]] = {"linear": (), "conv1d": (3,), "conv2d": (3, 2), "conv3d": (2, 2, 2)}
LAYERS: dict[str, nn.Module] = {
    "linear": nn.Linear(INP, OUT),
    "conv1d": nn.Conv1d(INP, OUT, 3, padding=1),
    "conv2d": nn.Conv2d(INP, OUT, (3, 2), padding=1),
}
PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"init_lora_weights": False}),
    "loha": ("LoHaConfig", {"init_weights": False}),
    "loha tucker": ("LoHaConfig", {"init_weights": False, "use_effective_conv2d": True}),
    "lokr": ("LoKrConfig", {"init_weights": False, "decompose_factor": 2}),
    "lokr both": ("LoKrConfig", {"init_weights": False, "decompose_factor": 2, "decompose_both": True}),
}
WRONG = {
    ("peft", "loha tucker", "conv1d"): "w1_a's gradient is contracted with the other product's core",
    ("peft", "loha tucker", "conv2d"): "w1_a's gradient is contracted with the other product's core",
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def factors(kernel: tuple[int, ...]) -> Iterator[tuple[str, str, list[Tensor | None]]]:
    """Form, module of lycoris.functional, arguments in its order."""
    ones, core = (1,) * len(kernel), (RANK, RANK, *kernel)
    yield "lora", "locon", [random(RANK, INP, *kernel), random(OUT, RANK, *ones), None]
    yield "lokr", "lokr", [random(2, 3), None, None, random(2, 2, *kernel), None, None, None]
    yield "lokr low", "lokr", [random(2, 3), None, None, None, random(2, RANK), random(RANK, 2, *kernel), None]
    if kernel:
        yield "lora tucker", "locon", [random(RANK, INP, *ones), random(OUT, RANK, *ones), random(*core)]
        yield "lokr tucker", "lokr", [random(2, 3), None, None, None, random(RANK, 2), random(RANK, 2), random(*core)]


LYCORIS = [
    pytest.param(name, arguments, len(kernel), id=f"{form} {layer}")
    for layer, kernel in KERNELS.items()
    for form, name, arguments in factors(kernel)
]


def check(call: Any, given: list[Tensor]) -> None:
    assert gradcheck(call, [tensor.clone().requires_grad_() for tensor in given])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("form", PEFT)
def test_peft_s_gradients(form: str, layer: str) -> None:
    peft = pytest.importorskip("peft")
    holder, (config, options) = nn.Module(), PEFT[form]
    holder.add_module("layer", LAYERS[layer])
    peft.inject_adapter_in_model(getattr(peft, config)(r=RANK, target_modules=["layer"], **options), holder, "a")
    wrapped: Any = holder.double().eval().get_submodule("layer")
    names = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    x = random(2, INP, *[4] * (wrapped.weight.dim() - 2)) if layer != "linear" else random(2, INP)

    def call(*values: Tensor) -> Any:
        return functional_call(wrapped, dict(zip(names, values, strict=True)), (x,))

    given = [wrapped.get_parameter(name).detach() for name in names]
    assert given
    if ("peft", form, layer) in WRONG:
        with pytest.raises(GradcheckError, match="Jacobian mismatch"):
            check(call, given)
    else:
        check(call, given)


@pytest.mark.parametrize("function", ["diff_weight", "bypass_forward_diff"])
@pytest.mark.parametrize(("name", "arguments", "spatial"), LYCORIS)
def test_lycoris_s_functions_gradients(
    name: str, arguments: list[Tensor | None], spatial: int, function: str, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("lycoris.functional")
    own = getattr(import_module(f"lycoris.functional.{name}"), function)
    at, x = [n for n, value in enumerate(arguments) if value is not None], random(2, INP, *[4] * spatial)
    before = [] if function == "diff_weight" else [x, None]

    def call(*values: Tensor) -> Any:
        known = dict(zip(at, values, strict=True))
        more = {"extra_args": {"stride": 1}} if before and spatial else {}
        return own(*before, *(known.get(n) for n in range(len(arguments))), gamma=1.5, **more)

    check(call, [value for value in arguments if value is not None])


@pytest.mark.parametrize("tucker", [False, True])
def test_lycoris_s_loha_functions_take_no_number_as_gamma_in_training(tucker: bool) -> None:
    """`diff_weight(..., gamma=1.0)`, its own default, raises where a factor needs a gradient."""
    loha = pytest.importorskip("lycoris.functional.loha")
    kernel, cores = ((3,), [random(RANK, RANK, 3)] * 2) if tucker else ((), [None, None])
    side = (RANK, OUT) if tucker else (OUT, RANK)
    given = [random(RANK, INP), random(*side), random(RANK, INP), random(*side)]
    assert loha.diff_weight(*given, *cores).shape == (OUT, INP, *kernel)
    with pytest.raises(TypeError, match="save_for_backward can only save variables"):
        loha.diff_weight(*(tensor.requires_grad_() for tensor in given), *cores)
