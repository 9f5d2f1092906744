"""What a subject is. To test your own implementation, subclass `Subject` and write `attach`.

    from fulldiff.harness.subjects.base import Subject

    class Mine(Subject):
        def attach(self, module, adapters):
            for adapter in adapters:
                mylib.apply(module, adapter.tensors, adapter.strength)
            return lambda: mylib.remove(module)

Then ``fulldiff conform --subject my_package.my_module:Mine``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

Detach = Callable[[], None]
Forward = Callable[[Tensor], Tensor]


class Refused(Exception):
    """The subject will not apply this adapter because it is invalid or ambiguous. Say why."""


class Unsupported(Exception):
    """The subject does not do this kind of adapter or layer. Say which."""


@dataclass(frozen=True)
class Adapter:
    """One adapter as its file gives it: tensors by suffix (``lokr_w1``, ``lora_down.weight``, …,
    ``alpha`` where the file has one), on the device, in the file's dtype; and the user's strength.

    ``rows`` [start, end) are the output rows that it adapts (q of a fused qkv), None for all.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    strength: float = 1.0
    rows: tuple[int, int] | None = None


class Subject(ABC):
    """An implementation under test."""

    policy: str = "default"
    """Its rule where implementations differ, on a scale or a DoRA behind others: one of reference.truth.POLICIES."""

    files: Sequence[str] = ()
    """Files beside its Python code that make it what it is: with another content it is another subject."""

    def arithmetic(self, kind: str, dtype: str) -> tuple[str, str]:
        """The dtypes that its error budget is made of: what it stores values in and what it sums in ("": f32).

        ``kind`` is the layer's and ``dtype`` the case's, which is the answer unless the subject says otherwise: an
        engine that holds convolution kernels in f16 whatever their dtype is allowed f16's roundings, by name.
        """
        return dtype, ""

    @abstractmethod
    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        """Make ``module`` (a torch.nn Linear or ConvNd) compute with the adapters; return the undo.

        Raise `Unsupported` for a kind it does not do, `Refused` for an adapter it will not apply.
        """

    def attach_model(self, model: nn.Module, adapters: Mapping[str, Sequence[Adapter]]) -> Detach:
        """Attach adapters to many layers of a model, by module name; return the undo of all."""
        undo = [self.attach(model.get_submodule(name), own) for name, own in adapters.items()]

        def detach() -> None:
            for each in reversed(undo):
                each()

        return detach

    def promised_bytes(self, module: nn.Module, adapters: Sequence[Adapter], x: Tensor) -> int | None:
        """Peak bytes above the bare layer's that one call allocates in f32 on the CPU.

        None: no promise. Called while attached; the harness holds the subject to the number.
        """
        return None

    def remark(self, module: nn.Module, adapters: Sequence[Adapter]) -> str:
        """What the result should say of how these adapters were applied: a fallback, for one. Else empty."""
        return ""


def replace_forward(module: nn.Module, forward: Forward) -> Detach:
    """Make ``module(x)`` call ``forward``; the returned undo puts back what was there."""
    before = module.__dict__.get("forward")
    module.forward = forward

    def detach() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return detach
