"""PEFT from a file: adapter_config.json and adapter_model.safetensors, as `PeftModel.from_pretrained` loads them.

Where no config gives a LoKr's sizes and forms, PEFT could not have written the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fulldiff.harness.files import fold
from fulldiff.harness.subjects.base import Adapter, Unsupported
from fulldiff.harness.subjects.peers import library, on_the_whole_layer
from fulldiff.harness.subjects.peers.files import FileSubject, Session, copied, model_of, name_for, piece_of

FILE = "adapter_model.safetensors"


class PeftFile(FileSubject):
    """Loaded, active and unmerged."""

    policy = "peft"
    merge = False
    save = False

    def __init__(self) -> None:
        super().__init__()
        self.peft = library("peft", "peft")

    def open(self, base: nn.Module, adapters: Sequence[Adapter]) -> Session:
        return PeftSession(base, self)

    def check(self, module: nn.Module, adapter: Adapter) -> None:
        if adapter.kind not in ("lora", "lokr", "loha"):
            raise Unsupported(f"PEFT has no files of kind {adapter.kind}")
        on_the_whole_layer(adapter)
        if more := sorted({"diff_b", "lora_mid.weight"} & adapter.tensors.keys()):
            raise Unsupported(f"{adapter.kind} with {', '.join(more)}: PEFT's files have none")
        if "dora_scale" in adapter.tensors and (adapter.kind != "lora" or adapter.strength != 1):
            raise Unsupported("PEFT's DoRA is a LoRA's, and a strength that is not 1 is inside its norm: another rule")


class PeftUnloaded(PeftFile):
    """Loaded, and merged into the layer by `merge_and_unload`."""

    merge = True


class PeftSaved(PeftFile):
    """Loaded, saved by PEFT (`save_pretrained`) and loaded from there."""

    save = True


class PeftSession(Session):
    """A model of one layer, wrapped at the first adapter."""

    def __init__(self, base: nn.Module, subject: PeftFile) -> None:
        super().__init__(base)
        self.subject, self.name = subject, name_for(self.weight)
        self.model: Any = None
        self.layer: Any = None
        self.kind = ""

    def load(self, folder: Path, name: str, adapter: Adapter) -> None:
        if self.kind not in ("", adapter.kind):
            raise Unsupported("adapters of several kinds on one layer: another PeftModel")
        if self.subject.merge and self.layer is not None:
            raise Unsupported("another adapter after merge_and_unload")
        self.kind = adapter.kind
        write_file(folder, self.weight, adapter)
        if self.subject.save:
            first = self._loaded(None, copied(self.base), folder, name)
            first.save_pretrained(str(folder), selected_adapters=[name])
            folder = folder / name
        self.model = self._loaded(self.model, self.base, folder, name)

    def _loaded(self, model: Any, base: nn.Module, folder: Path, name: str) -> Any:
        """The model, or a new one of this layer, with the adapter in it."""
        peft = self.subject.peft
        made = model or peft.PeftModel(model_of(self.name, base), peft.PeftConfig.from_pretrained(str(folder)), name)
        result = made.load_adapter(str(folder), name)
        if result.unexpected_keys:
            raise Unsupported(f"PEFT makes no {', '.join(result.unexpected_keys)}")
        return made

    def activate(self) -> None:
        self.model.base_model.set_adapter(list(self.strengths))
        self.layer = self.model.base_model.model.get_submodule(self.name)
        for name, strength in self.strengths.items():
            self.layer.set_scale(name, strength)
        self.model.eval().requires_grad_(False)
        if self.subject.merge:
            self.layer = self.model.merge_and_unload().get_submodule(self.name)

    def delete(self, name: str) -> None:
        if not self.subject.merge:
            self.model.delete_adapter(name)
        elif self.strengths:
            raise Unsupported("merge_and_unload keeps no adapter to take off")

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made


def write_file(folder: Path, weight: Tensor, adapter: Adapter) -> None:
    """The adapter as PEFT's two files, for a layer of this weight."""
    fold.save(folder / FILE, "peft", [piece_of(weight, adapter)])
