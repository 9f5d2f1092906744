"""Subjects whose adapters are attached one after the other and taken off in any order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from fulldiff.harness.subjects.base import Adapter, Detach, Forward, Refused, Subject

ATTRIBUTE = "_fulldiff_stack"


@dataclass
class Stack:
    """What is attached to one module: its subject, each attachment's adapters, and what was there before."""

    subject: Stacked
    before: Forward | None
    attached: list[list[Adapter]] = field(default_factory=list)
    kept: object = None

    @property
    def adapters(self) -> list[Adapter]:
        """All adapters, in the order in which they were attached."""
        return [adapter for attachment in self.attached for adapter in attachment]


class Stacked(Subject):
    """Keeps a list per module, so that taking off the first adapter leaves the second at work."""

    @abstractmethod
    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        """The module's forward with all these adapters; ``base`` is the forward without any."""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        stack = module.__dict__.setdefault(ATTRIBUTE, Stack(self, module.__dict__.get("forward")))
        if stack.subject is not self:
            raise Refused(f"{type(stack.subject).__name__} has adapters on this layer: take them off first")
        attachment = list(adapters)
        stack.attached.append(attachment)

        def detach() -> None:
            stack.attached[:] = [other for other in stack.attached if other is not attachment]
            self.change(module, stack)

        try:
            self.change(module, stack)
        except BaseException:
            detach()
            raise
        return detach

    def change(self, module: nn.Module, stack: Stack) -> None:
        """Make the module compute with the stack's adapters; without any, be as it was."""
        restore(module, stack.before)
        if stack.attached:
            module.forward = self.forward(module, stack.adapters, module.forward)
        else:
            module.__dict__.pop(ATTRIBUTE, None)


def restore(module: nn.Module, before: Forward | None) -> None:
    """Put back the forward that an instance had, or its class's."""
    if before is not None:
        module.forward = before
    else:
        module.__dict__.pop("forward", None)
