"""A finding as a script that needs only the peer: layer, factors and input in numbers, and what is right.

Made in the worker, from the tensors of the case. The base weight is zero where the peer is wrong then too.
"""

from __future__ import annotations

from textwrap import indent

from torch import Tensor

from fulldiff.cases.model import Case, Layer, Layout, RuntimeCase, case_id
from fulldiff.harness.judge import loaded, truth_of
from fulldiff.harness.peers.diagnosis import Part, compared, materials
from fulldiff.harness.peers.file_templates import TEMPLATES
from fulldiff.harness.peers.templates import SCRIPT, literal
from fulldiff.harness.realise import Material
from fulldiff.harness.subjects.base import Subject, Unsupported

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
    material, part = showing(case, body, subject)
    want = part.want if part else truth_of(body, material, subject)
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
        allowed=_allowed(part),
        allowed_rms=part.allowed_rms if part else 0.0,
        steps=indent("\n".join(steps), "    "),
    )


def showing(case: Case, body: RuntimeCase, subject: Subject) -> tuple[Material, Part | None]:
    """The tensors that show it, with a base of zeros if those do, and what the subject gives if it gives anything."""
    whole, bare = materials(case, body)
    for material in (bare, whole):
        try:
            part = compared(body, material, subject)
        except Exception:  # whatever a subject raises shows there
            return material, None
        if not part.right:
            return material, part
    return whole, part


def _layout(x: Tensor, layout: Layout) -> str:
    """What makes the layout of contiguous numbers; nothing to transpose in one dimension."""
    if x.dim() == 1 and layout == "transposed":
        return ""
    return LAYOUTS[layout].format("_3d" if x.dim() == 5 else "")


def _allowed(part: Part | None) -> str:
    """The largest error that rounding explains; for each element where the largest of all would hide a wrong one."""
    if part is None or not part.allowed.numel():
        return "0.0"
    most = float(part.allowed.max())
    if part.got.shape != part.want.shape:
        return repr(most)
    shown = (part.got - part.want).abs() > most
    return repr(most) if shown.any() or part.got[~part.want.isnan()].isnan().any() else literal(part.allowed)


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
