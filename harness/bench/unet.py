"""A whole UNet with random weights and a LoKr on its layers: one step, in every way. Needs diffusers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from fulldiff.cases import tensors as generator
from fulldiff.cases.factors import lokr_for
from fulldiff.cases.model import Case, StepCase
from fulldiff.cases.models.configs import SDXL_UNET
from fulldiff.harness.backends.base import Backend
from fulldiff.harness.bench.worker import Calls, begin, measured
from fulldiff.harness.judge import conclude
from fulldiff.harness.protocol import Claim
from fulldiff.harness.realise import DTYPES
from fulldiff.harness.subjects.base import Adapter, Detach, Subject
from fulldiff.harness.subjects.faulty import layer_of
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER
from fulldiff.harness.subjects.registry import subject

# ‖ΔW‖ of each layer beside ‖W‖: a delta of a usual adapter's size.
STRENGTH = 0.1
# How far the ways' outputs may be from the full diff's, as a share of what the adapter changes at all: they
# round differently at each of some thousand operations. Measured at an eighth and a quarter of the width: at
# most 8e-6, 0.05 and 0.007.
AGREEMENT = {"f32": 4e-5, "bf16": 0.2, "f16": 0.03}


def run(case: Case, seconds: float | None, backend: Backend) -> dict[str, Any]:
    """Samples, bytes and a check of each way; one model serves all, adapters attached and taken off."""
    body = case.body
    assert isinstance(body, StepCase)
    model = made(body).to(backend.device)
    adapters = adapters_of(model, body, backend.device)
    inputs = inputs_of(body, model, backend.device)
    stepper = Stepper(model, inputs, adapters)
    begun, outputs = {}, {}
    for way in body.ways:
        begun[way] = stepper.begin(way, backend)
        assert stepper.output is not None
        outputs[way] = stepper.output.double().cpu()
    found = measured(dict.fromkeys(body.ways, stepper.step), begun, seconds, backend, stepper.attach)
    return found | {"check": checks(outputs, body.dtype), "adapter_bytes": _bytes(adapters)}


class Stepper:
    """Keeps one way attached; changing the way is not part of a step's time."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], adapters: Mapping[str, list[Adapter]]) -> None:
        self.model, self.inputs, self.adapters = model, inputs, adapters
        self.way = NO_ADAPTER
        self.detach: Detach = nothing
        # Of the last step.
        self.output: Tensor | None = None
        # Kept while detached: what `planned` has chosen.
        self.subjects: dict[str, Subject] = {}

    def attach(self, way: str) -> None:
        """Take off what is attached, and attach the way."""
        if way == self.way:
            return
        self.detach()
        self.way, self.detach = way, nothing
        if way not in (NO_ADAPTER, AGAIN):
            own = self.subjects.setdefault(way, subject(way))
            self.detach = own.attach_model(self.model, self.adapters)

    def begin(self, way: str, backend: Backend) -> Calls:
        """Attach, and the first two steps."""
        self.attach(NO_ADAPTER)
        self.output = None
        return begin(lambda: self.attach(way), self.step, backend)

    def step(self) -> None:
        """One step of the model."""
        self.output = self.model(**self.inputs, return_dict=False)[0]


def nothing() -> None:
    """The undo of the bare model."""


def made(body: StepCase) -> nn.Module:
    """The model's UNet with its channels divided by ``narrowed``, random weights, in the case's dtype."""
    config = dict(SDXL_UNET)
    for name in ("block_out_channels", "cross_attention_dim"):
        value = config[name]
        config[name] = (
            [v // body.narrowed for v in value] if isinstance(value, list | tuple) else value // body.narrowed
        )
    if body.narrowed > 1:
        config["norm_num_groups"] = 8
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = UNet2DConditionModel(**config)
    model = model.to_empty(device="cpu").to(DTYPES[body.dtype]).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        _fill(name, parameter)
    assert isinstance(model, nn.Module)
    return model


def _fill(name: str, parameter: Tensor) -> None:
    """Weights of variance 1 / in, so that activations keep their size; norms 1, biases 0."""
    if parameter.dim() > 1:
        parameter.normal_(0, parameter[0].numel() ** -0.5)
    else:
        parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def targets(model: nn.Module, convolutions: bool) -> Iterator[tuple[str, nn.Module]]:
    """The layers that a trainer adapts: all Linear and Conv2d, or those of the attention blocks."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and (convolutions or ".attentions." in name):
            yield name, module


def adapters_of(model: nn.Module, body: StepCase, device: str) -> dict[str, list[Adapter]]:
    """A LoKr for each target, its tensors from the seed-to-tensor generator."""
    found = {}
    for index, (name, module) in enumerate(targets(model, body.convolutions)):
        spec = lokr_for(layer_of(module), body.factor, body.rank)
        t = {
            factor: torch.from_numpy(generator.factor("normal", index, factor, shape)).to(DTYPES[body.dtype]).to(device)
            for factor, shape in spec.factors.items()
        }
        found[name] = [Adapter("lokr", t, STRENGTH)]
    return found


def inputs_of(body: StepCase, model: nn.Module, device: str) -> dict[str, Any]:
    """One conditional step: latents, a text of 77 tokens, SDXL's size conditions."""
    config: Any = model.config
    dtype = DTYPES[body.dtype]
    height, width = (size // 8 for size in body.size)
    latents = torch.from_numpy(generator.activation("normal", 1, "latents", (1, 4, height, width)))
    text = torch.from_numpy(generator.activation("normal", 1, "text", (1, 77, config.cross_attention_dim)))
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "sample": latents.to(dtype).to(device),
        "timestep": torch.tensor(500, device=device),
        "encoder_hidden_states": text.to(dtype).to(device),
        "added_cond_kwargs": {
            "text_embeds": torch.zeros(1, pooled, dtype=dtype, device=device),
            "time_ids": torch.tensor([[*body.size, 0, 0, *body.size]], dtype=dtype, device=device),
        },
    }


def checks(outputs: Mapping[str, Tensor], dtype: str) -> dict[str, Any]:
    """Each way's output against the full diff's, as a share of what the adapter changes."""
    bare, reference = outputs[NO_ADAPTER], outputs["full-diff"]
    change = float((reference - bare).square().mean().sqrt())
    found = {}
    for way, output in outputs.items():
        if way not in (NO_ADAPTER, AGAIN, "full-diff"):
            error = float((output - reference).square().mean().sqrt()) / change
            used = error / AGREEMENT[dtype]
            claim = Claim(
                "agrees with the full diff", used <= 1, used, "", "", "", f"{error:.3g}", f"{AGREEMENT[dtype]}"
            )
            found[way] = conclude([claim], "")
    return found


def _bytes(adapters: Mapping[str, list[Adapter]]) -> int:
    return sum(t.nbytes for own in adapters.values() for adapter in own for t in adapter.tensors.values())
