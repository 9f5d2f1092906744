"""A finding as a script that needs only the peer: layer, factors and input in numbers, and what is right.

Made in the worker, from the tensors of the case. The base weight is zero where the peer is wrong then too.
"""

from __future__ import annotations

from textwrap import indent

from torch import Tensor

from fulldiff.cases.model import Case, Layer, Layout, RuntimeCase, case_id
from fulldiff.harness.judge import loaded
from fulldiff.harness.peers.diagnosis import forward, is_right, materials, rounding
from fulldiff.harness.peers.file_templates import TEMPLATES
from fulldiff.harness.peers.templates import SCRIPT, literal
from fulldiff.harness.realise import Material
from fulldiff.harness.subjects.base import Subject, Unsupported
from fulldiff.reference.truth import POLICIES, Truth

# How a layout other than the contiguous one is made from contiguous numbers.
LAYOUTS = {
    "contiguous": "",
    "transposed": ".transpose(-1, -2).contiguous().transpose(-1, -2)",
    "strided": ".repeat_interleave(2, -1)[..., ::2]",
    "channels_last": ".to(memory_format=torch.channels_last{})",
}


def script(case: Case, peer: str, subject: Subject, what: str) -> str:
    """The text of the script; ``what`` is its title. Raises Unsupported for a peer that has no template."""
    if peer not in TEMPLATES:
        raise Unsupported(f"no template of a reproduction for {peer}: add one to harness/peers/templates.py")
    template, body = TEMPLATES[peer], case.body
    assert isinstance(body, RuntimeCase)
    material = showing(case, body, subject)
    want = forward(Truth(POLICIES[subject.policy]), body, material)
    assert want is not None
    steps = template.steps(loaded(body, material), material.weight)
    return SCRIPT.format(
        what=what,
        id=case_id(case),
        needs=f"torch and {template.needs}",
        imports=template.imports,
        layer=f"{layer(body.layer)}.to({material.weight.dtype}).eval().requires_grad_(False)",
        values="\n".join(_base(material)),
        x=literal(material.x) + _layout(material.x, body.input.layout),
        expected=literal(want),
        allowed=_allowed(body, material, subject),
        steps=indent("\n".join(steps), "    "),
    )


def showing(case: Case, body: RuntimeCase, subject: Subject) -> Material:
    """The tensors that show it: those with a base of zeros, unless the subject is right with them."""
    whole, bare = materials(case, body)
    try:
        return whole if is_right(body, bare, subject) else bare
    except Exception:  # whatever a subject raises shows there
        return bare


def _layout(x: Tensor, layout: Layout) -> str:
    """What makes the layout of contiguous numbers; nothing to transpose in one dimension."""
    if x.dim() == 1 and layout == "transposed":
        return ""
    return LAYOUTS[layout].format("_3d" if x.dim() == 5 else "")


def _allowed(body: RuntimeCase, material: Material, subject: Subject) -> float:
    """The largest error that rounding explains; none where all numbers are exact."""
    arithmetic = subject.arithmetic(body.layer.kind, body.dtype)
    errors = rounding(Truth(POLICIES[subject.policy]), body, material, arithmetic)
    return 0.0 if body.values == "exact" or not errors.numel() else float(errors.max())


def layer(own: Layer) -> str:
    """The torch.nn layer in Python."""
    if own.kind == "linear":
        return f"nn.Linear({own.inp}, {own.out}, bias={own.bias})"
    more = f"dilation={own.dilation}, groups={own.groups}, bias={own.bias}, padding_mode={own.padding_mode!r}"
    name = own.kind.replace("conv", "Conv")
    return f"nn.{name}({own.inp}, {own.out}, {own.kernel}, stride={own.stride}, padding={own.padding}, {more})"


def _base(material: Material) -> list[str]:
    parts = {"weight": material.weight} | ({} if material.bias is None else {"bias": material.bias})
    return [
        f"base.{name}.data = {literal(tensor)}" if tensor.any() else f"nn.init.zeros_(base.{name})"
        for name, tensor in parts.items()
    ]
