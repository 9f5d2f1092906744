"""The text of a reproduction: what is the same for every peer, and the calls that put factors into each.

The calls are those of fulldiff's own subjects, so that a script shows what the subject showed.
"""

from __future__ import annotations

import math
import pprint
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter
from fulldiff.harness.subjects.peers import alpha_of
from fulldiff.harness.subjects.peers.lycoris import CLASSES, CORES
from fulldiff.harness.subjects.peers.peft import LORA

SCRIPT = '''"""{what}

Written by `fulldiff peers` from the case {id}.
It needs {needs}. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from math import inf, nan
from torch import nn
{imports}
warnings.simplefilter("ignore")
base = {layer}
{values}
x = {x}
# y = (W + ΔW) x in float64, and the errors that rounding explains: of each number, and their root mean square.
expected = {expected}
allowed = {allowed}
allowed_rms = {allowed_rms!r}


def run():
{steps}


try:
    with torch.no_grad():
        got = run().double()
except Exception as error:
    print("got", error)
    print("expected", expected.tolist())
    sys.exit(f"raised {{type(error).__name__}}")
print("got", got.tolist())
print("expected", expected.tolist())
asked = ~expected.isnan()
error = (got - expected).abs() if got.shape == expected.shape else torch.full(expected.shape, inf)
if not (error <= allowed)[asked].all() or error[asked].square().mean().sqrt() > allowed_rms:
    sys.exit("differs")
print("right", file=sys.stderr)
'''

WIDTH = 116


@dataclass(frozen=True)
class Template:
    """One peer's part of a script: its packages, its imports, and the body of ``run`` (adapters, base weight)."""

    needs: str
    imports: str
    steps: Callable[[Sequence[Adapter], Tensor], list[str]]


def literal(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    """The tensor in Python, every number exactly; rounded to a dtype if one is named."""
    made = tensor if dtype is None else tensor.to(dtype)
    if not made.numel():
        return f"torch.zeros({tuple(made.shape)}, dtype={made.dtype})"
    whole = bool((made.isfinite() & (made == made.round())).all())
    numbers = made.to(torch.int64 if whole else torch.float64).tolist()
    return f"torch.tensor({pprint.pformat(numbers, width=WIDTH, compact=True)}, dtype={made.dtype})"


def peft(merge: bool) -> Template:
    """PEFT on a model of one layer, unmerged or merged."""

    def steps(adapters: Sequence[Adapter], weight: Tensor) -> list[str]:
        lines = ["model = nn.Module()", "model.layer = base"]
        for number, adapter in enumerate(adapters):
            lines += _peft_adapter(f"a{number}", adapter, weight)
        names = [f"a{number}" for number in range(len(adapters))]
        merged = ["model.layer.merge()"] if merge else []
        return [*lines, f"model.layer.set_adapter({names})", "model.eval()", *merged, "return model.layer(x)"]

    return Template("peft", "import peft\n", steps)


def _peft_adapter(name: str, adapter: Adapter, weight: Tensor) -> list[str]:
    t, shape = adapter.tensors, tuple(weight.shape)
    rank, alpha = factors.rank(t), alpha_of(adapter)
    r, a = (1, 1.0) if rank is None else (rank, float(rank) if alpha is None else alpha)
    kind, scale, init = {
        "lora": ("LoraConfig", "lora_alpha", "init_lora_weights"),
        "lokr": ("LoKrConfig", "alpha", "init_weights"),
        "loha": ("LoHaConfig", "alpha", "init_weights"),
    }[adapter.kind]
    lines = [
        f'config = peft.{kind}(r={r}, {scale}={a!r}, target_modules=["layer"], {init}=False)',
        f'peft.inject_adapter_in_model(config, model, "{name}")',
        "layer = model.layer",
    ]
    if adapter.kind == "lora":
        filled = {f'layer.{own}["{name}"].weight': t[tensor] for tensor, own in LORA.items()}
    else:
        lines += [
            "# PEFT chooses sizes of its own; these are the file's.",
            "for own in layer.adapter_layer_names:",
            f'    if "{name}" in getattr(layer, own):',
            f'        del getattr(layer, own)["{name}"]',
            f'layer.create_adapter_parameters("{name}", {r}, {_peft_sizes(adapter, shape)})',
        ]
        filled = {f'layer.{tensor}["{name}"]': t[tensor] for tensor in sorted(t.keys() - {"alpha"})}
    lines += [f"{own}.data = {literal(tensor, weight.dtype)}.reshape({own}.shape)" for own, tensor in filled.items()]
    return [*lines, f'layer.set_scale("{name}", {adapter.strength!r})']


def _peft_sizes(adapter: Adapter, shape: tuple[int, ...]) -> str:
    t = adapter.tensors
    if adapter.kind == "loha":
        return str(shape if "hada_t1" in t else (shape[0], math.prod(shape[1:])))
    (up, uq), (vp, vq) = factors.w1_sizes(t), factors.w2_sizes(t, shape)
    flags = ", ".join(str(name in t) for name in ("lokr_w1", "lokr_w2", "lokr_t2"))
    return f"{((up, vp), (uq, vq), *shape[2:])}, {flags}"


def lycoris(bypass: bool, merge: bool) -> Template:
    """LyCORIS's modules, applied or merged one after the other."""

    def steps(adapters: Sequence[Adapter], weight: Tensor) -> list[str]:
        lines = []
        for adapter in adapters:
            lines += _lycoris_module(adapter, weight, bypass)
            lines.append(f"module.merge_to({adapter.strength!r})" if merge else "module.apply_to()")
        return [*lines, "return base(x)"]

    return Template("lycoris-lora", "from lycoris import modules\n", steps)


def _lycoris_module(adapter: Adapter, weight: Tensor, bypass: bool) -> list[str]:
    t, rank, alpha = adapter.tensors, factors.rank(adapter.tensors), alpha_of(adapter)
    more = f", full_matrix={rank is None}" if adapter.kind == "lokr" else ""
    lines = [
        f'module = modules.{CLASSES[adapter.kind]}("layer", base, {adapter.strength!r}, {rank or 1}, {alpha!r},',
        f"    use_tucker={bool(CORES & t.keys())}, bypass_mode={bypass}{more}).to(base.weight.dtype).eval()",
    ]
    names = sorted(t.keys() - {"alpha"})
    if adapter.kind != "lokr":
        return lines + [
            f"module.{name}.data = {literal(t[name], weight.dtype)}.reshape(module.{name}.shape)" for name in names
        ]
    vp, vq = factors.w2_sizes(t, weight.shape)
    shapes = {name: (vp, vq, *weight.shape[2:]) if name == "lokr_w2" else tuple(t[name].shape) for name in names}
    scale = 1.0 if rank is None else (alpha or rank) / rank
    return [
        *lines,
        "# LyCORIS chooses sizes of its own; these are the file's, with the flags its constructor sets for them.",
        'for own in [own for own in module._parameters if own.startswith("lokr_")]:',
        "    del module._parameters[own]",
        *(f"module.{name} = nn.Parameter({literal(t[name], weight.dtype)}.reshape({shapes[name]}))" for name in names),
        f"module.use_w1, module.use_w2, module.tucker = {'lokr_w1' in t}, {'lokr_w2' in t}, {'lokr_t2' in t}",
        f"module.scale = {scale!r}",
    ]


TEMPLATES: Mapping[str, Template] = {
    "peft": peft(merge=False),
    "peft-merged": peft(merge=True),
    "lycoris": lycoris(bypass=False, merge=False),
    "lycoris-bypass": lycoris(bypass=True, merge=False),
    "lycoris-merge": lycoris(bypass=False, merge=True),
}
