"""LyCORIS from a file (`create_lycoris_from_weights`), and its functional API.

The functions take their factors as arguments. All document gamma as "normally alpha/rank", but the LoKr's divide by
the rank themselves: they get alpha. The strength multiplies what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from fulldiff.harness.files import fold
from fulldiff.harness.files.peft_config import CORES, decompose_factor, split_sorted
from fulldiff.harness.files.piece import UnspellableError
from fulldiff.harness.subjects import factors
from fulldiff.harness.subjects.base import Adapter, Detach, Forward, Subject, Unsupported
from fulldiff.harness.subjects.peers import alpha_of, check, library, on_the_whole_layer
from fulldiff.harness.subjects.peers.files import FILE, copied, model_of, name_for, piece_of
from fulldiff.harness.subjects.stacked import Stacked

# Each function's arguments, in order.
ARGUMENTS = {
    "lora": ("lora_down.weight", "lora_up.weight", "lora_mid.weight"),
    "loha": ("hada_w1_b", "hada_w1_a", "hada_w2_b", "hada_w2_a", "hada_t1", "hada_t2"),
    "lokr": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
}
MODULES = {"lora": "locon", "loha": "loha", "lokr": "lokr"}


class LycorisFile(Subject):
    """A network per adapter, from its file; applied with `apply_to`, taken off with `restore`."""

    policy = "lycoris"
    save = False

    def __init__(self) -> None:
        self.lycoris = library("lycoris", "lycoris-lora")

    def arithmetic(self, kind: str, dtype: str) -> tuple[str, str]:
        """It reads a file's factors into parameters of f32."""
        return "f32" if dtype == "f64" else dtype, ""

    def attach(self, module: nn.Module, adapters: Sequence[Adapter]) -> Detach:
        for adapter in adapters:
            self.check(module, adapter)
        weight: Any = module.weight  # a full module takes it off the layer
        networks = [self.network(module, weight, adapter) for adapter in adapters]

        def detach() -> None:
            for network in reversed(networks):
                network.restore()

        return detach

    def check(self, module: Any, adapter: Adapter) -> None:
        """Unsupported where LyCORIS writes no such file."""
        factors.check(adapter)
        on_the_whole_layer(adapter)
        if "diff_b" in adapter.tensors and adapter.kind != "diff":
            raise Unsupported(f"{adapter.kind} with diff_b: LyCORIS has it in its full modules alone")
        if float(adapter.tensors.get("scale", 1)) == 0:
            raise Unsupported("a scale of 0: it is written as alpha 0, which is scale 1 by LyCORIS's rule")
        if adapter.tensors.get("dora_scale", module.weight).dim() == 1:
            raise Unsupported("a dora_scale without the weight's axes: LyCORIS writes them")
        if adapter.kind == "lokr":
            sizes = factors.w1_sizes(adapter.tensors), factors.w2_sizes(adapter.tensors, module.weight.shape)
            if decompose_factor([sizes], split_sorted) is None:
                raise Unsupported("LyCORIS's factorisation of this layer gives no such w1 and w2")
            check_forms(adapter, *sizes)

    def network(self, module: nn.Module, weight: Tensor, adapter: Adapter) -> Any:
        """LyCORIS's network of one adapter, applied."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / FILE
            write_file(path, weight, adapter)
            if self.save:
                self.loaded(copied(module), weight, path, adapter.strength).save_weights(str(path), None, {})
            return self.loaded(module, weight, path, adapter.strength)

    def loaded(self, module: nn.Module, weight: Tensor, path: Path, strength: float) -> Any:
        """The network of a file, applied to the layer, in its weight's dtype."""
        model = model_of(name_for(weight), module)
        network, _ = self.lycoris.create_lycoris_from_weights(strength, str(path), model)
        network.apply_to()
        return network.to(weight.dtype).requires_grad_(False).eval()


class LycorisSaved(LycorisFile):
    """Loaded, saved by LyCORIS (`save_weights`) and loaded from there."""

    save = True


def check_forms(adapter: Adapter, w1: tuple[int, int], w2: tuple[int, int]) -> None:
    """Unsupported: forms that LyCORIS does not write, for it keeps a factor whole from half its size on."""
    rank, t = factors.rank(adapter.tensors), adapter.tensors
    if rank is None:
        return
    whole = {"w1": 2 * rank >= max(w1), "w2": 2 * rank >= max(w2)}
    for name, is_whole in whole.items():
        if is_whole and f"lokr_{name}_a" in t:
            raise Unsupported(f"{name} of rank {rank}: LyCORIS keeps it whole at its size")
    if "lokr_w2" in t and not whole["w2"]:
        raise Unsupported(f"w2 whole at rank {rank}: LyCORIS decomposes it at its size")


def write_file(path: Path, weight: Tensor, adapter: Adapter) -> None:
    """The adapter as LyCORIS's file, for a layer of this weight."""
    try:
        fold.save(path, "lycoris", [piece_of(weight, adapter)])
    except UnspellableError as error:
        raise Unsupported(str(error)) from error


class LycorisFunctional(Stacked):
    """The sum of the layer's output and each adapter's `bypass_forward_diff`."""

    policy = "lycoris"

    def __init__(self) -> None:
        self.functions = {
            kind: library(f"lycoris.functional.{name}", "lycoris-lora").bypass_forward_diff
            for kind, name in MODULES.items()
        }

    def forward(self, module: nn.Module, adapters: Sequence[Adapter], base: Forward) -> Forward:
        added = [self.added(module, adapter) for adapter in adapters]

        def forward(x: Tensor) -> Tensor:
            y = base(x)
            return sum((each(x, y) for each in added), start=y)

        return forward

    def added(self, module: Any, adapter: Adapter) -> Callable[[Tensor, Tensor], Tensor]:
        """(input, base output) → what one adapter adds."""
        check(adapter, tuple(MODULES))
        options = {}
        if not isinstance(module, nn.Linear):
            if module.padding_mode != "zeros" or module.groups > 1:
                raise Unsupported("groups, or padding that is not zeros: its functions take a plain convolution's")
            options = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
        weights = arguments(adapter, module.weight)
        typed = [None if weight is None else weight.to(module.weight.dtype) for weight in weights]
        call, gamma = self.functions[adapter.kind], gamma_of(adapter)

        def add(x: Tensor, y: Tensor) -> Tensor:
            made: Tensor = call(x, y, *typed, gamma=gamma, extra_args=options)
            return made * adapter.strength

        return add


def arguments(adapter: Adapter, weight: Tensor) -> list[Tensor | None]:
    """The factors in the order of the kind's function, None for those that are not there."""
    shaped = _with_kernel(adapter, weight)
    return [shaped.get(name) for name in ARGUMENTS[adapter.kind]]


def _with_kernel(adapter: Adapter, weight: Tensor) -> dict[str, Tensor]:
    """The factors with the kernel's axes, which files flatten and the functions want."""
    made, kernel = dict(adapter.tensors), weight.shape[2:]
    if not kernel:
        return made
    ones = (1,) * len(kernel)
    for name, factor in adapter.tensors.items():
        if name in ("hada_w1_b", "hada_w2_b", "lokr_w2_b") and not CORES & made.keys():
            made[name] = factor.reshape(factor.shape[0], -1, *kernel)
        elif name == "lokr_w2":
            made[name] = factor.reshape(*factor.shape[:2], *kernel)
        elif name in ("lora_up.weight", "lora_down.weight") and factor.dim() == 2:
            made[name] = factor.reshape(*factor.shape, *ones)
    return made


def gamma_of(adapter: Adapter) -> float:
    """alpha for a LoKr, alpha / rank for the others; 1 for two full factors, which have neither."""
    rank, alpha = factors.rank(adapter.tensors), alpha_of(adapter)
    if rank is None:
        return 1.0
    known = float(rank) if alpha is None else alpha
    return known if adapter.kind == "lokr" else known / rank
