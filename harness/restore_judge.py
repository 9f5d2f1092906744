"""Judging one restore case in the worker: after each change the output is that of what is attached then.

And after all is taken off, weight, bias and output are bit for bit what they were.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch
from torch import Tensor, nn

from fulldiff.cases.model import Case, RestoreCase, RuntimeCase
from fulldiff.harness.judge import Report, compare, conclude, loaded, same_bits
from fulldiff.harness.protocol import Claim, Judgement
from fulldiff.harness.realise import Material, module_for, realise
from fulldiff.harness.subjects.base import Detach, Refused, Subject, Unsupported


def judge(case: Case, subject: Subject, stage: Report) -> Judgement:
    """The judgement of one restore case."""
    body = case.body
    assert isinstance(body, RestoreCase)
    stage("generate")
    material = realise(Case(body.runtime, case.seed), body.runtime)
    run = Run(body.runtime, material, subject)
    try:
        for cycle in range(body.cycles):
            stage(f"subject: cycle {cycle + 1}")
            run.cycle(body.order, watch=cycle in (0, body.cycles - 1))
    except Refused as reason:
        return Judgement("refused", material.digest(), message=str(reason))
    except Unsupported as reason:
        return Judgement("unsupported", material.digest(), message=str(reason))
    return conclude(run.claims, material.digest())


class Run:
    """One module on which adapters come and go."""

    def __init__(self, body: RuntimeCase, material: Material, subject: Subject) -> None:
        self.body, self.material, self.subject = body, material, subject
        self.module = module_for(body.layer, material.weight, material.bias)
        self.bare = self.output()
        self.attached: dict[int, Detach] = {}
        self.claims: list[Claim] = []

    def cycle(self, order: tuple[int, ...], watch: bool) -> None:
        """Attach (i) and take off (−i) in order, then whatever is left; ``watch``: compare after each."""
        for event in order:
            self.change(event)
            if watch:
                self.claims += self.compare(f"output after {event:+d} of {order}")
        for index in list(self.attached):
            self.change(-index)
        self.claims.append(self.restored())

    def change(self, event: int) -> None:
        if event > 0:
            own = [loaded(self.body, self.material)[event - 1]]
            self.attached[event] = self.subject.attach(self.module, own)
        else:
            self.attached.pop(-event)()

    def compare(self, name: str) -> list[Claim]:
        """The claims about the output with what is attached now."""
        at = [index - 1 for index in self.attached]  # in the order of attaching: a DoRA may mind
        adapters = tuple(self.body.adapters[index] for index in at)
        body = msgspec.structs.replace(self.body, adapters=adapters)
        material = replace(self.material, adapters=tuple(self.material.adapters[index] for index in at))
        return compare(name, body, material, self.subject, self.output())

    def restored(self) -> Claim:
        """Base and output as they were, bit for bit."""
        now, was = bias_of(self.module), self.material.bias
        bias = (now is None) == (was is None) and (now is None or was is None or same_bits(now, was))
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        same = bias and same_bits(weight, self.material.weight) and same_bits(self.output(), self.bare)
        return Claim("the base is bit for bit what it was", same, 0.0 if same else 1.0)

    def output(self) -> Tensor:
        with torch.no_grad():
            made: Tensor = self.module(self.material.x).clone()
            return made


def bias_of(module: nn.Module) -> Tensor | None:
    """The module's bias, None where it has none."""
    bias = module.bias
    return bias if isinstance(bias, Tensor) else None
