"""diffusers: an adapter's file loaded into a tiny model of a real class, the layer in the place of one of its own.

A LoRA goes into Stable Diffusion's UNet from a kohya file (`load_lora_weights`). A LoKr's road depends on the layer:
Z-Image's loader for a linear one (ai-toolkit's names, with alpha), which has no convolutions; `load_lora_adapter` of
the UNet for those (diffusers' names, alpha folded in as that loader wants it).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from fulldiff.harness.files import fold
from fulldiff.harness.files.writers import Writer
from fulldiff.harness.subjects.base import Adapter, Unsupported
from fulldiff.harness.subjects.peers import library, on_the_whole_layer
from fulldiff.harness.subjects.peers.files import FILE, FileSubject, Session, name_for, piece_of, wide

Z_IMAGE_LINEAR = "layers.0.attention.to_q"
UNET: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": (4,), "layers_per_block": 1, "cross_attention_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",),
    "attention_head_dim": 2, "norm_num_groups": 2,
}  # fmt: skip
Z_IMAGE: dict[str, Any] = {
    "in_channels": 4, "dim": 8, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 1, "n_kv_heads": 1,
    "cap_feat_dim": 8, "axes_dims": [2, 2, 4], "axes_lens": [8, 8, 8],
}  # fmt: skip


class Diffusers(FileSubject):
    """Loaded and active, each at its weight (`set_adapters`)."""

    policy = "diffusers"
    family: Writer = "kohya"
    fuse = False
    save = False

    def __init__(self) -> None:
        super().__init__()
        self.library = library("diffusers", "diffusers peft transformers accelerate")
        library("peft", "peft")
        self.library.utils.logging.set_verbosity_error()

    def open(self, base: nn.Module, adapters: Sequence[Adapter]) -> Session:
        z_image = isinstance(base, nn.Linear) and all(adapter.kind == "lokr" for adapter in adapters)
        return ZImageSession(base, self) if z_image else UNetSession(base, self)

    def check(self, module: nn.Module, adapter: Adapter) -> None:
        if adapter.kind not in ("lora", "lokr"):
            raise Unsupported(f"diffusers has no loader for {adapter.kind}")
        on_the_whole_layer(adapter)
        if "diff_b" in adapter.tensors:
            raise Unsupported("a bias delta: no names for it")
        if "dora_scale" in adapter.tensors:
            self.check_dora(module, adapter)

    def check_dora(self, module: nn.Module, adapter: Adapter) -> None:
        """Unsupported where PEFT's rule for the strength counts, or the magnitude has no place."""
        if adapter.kind == "lokr":
            raise Unsupported("a LoKr with dora_scale: no names for it")
        if adapter.strength != 1:
            raise Unsupported("DoRA at a strength that is not 1: PEFT's is inside the norm, another rule")
        if self.family == "diffusers" and not isinstance(module, nn.Linear):
            raise Unsupported("DoRA on a convolution: its magnitude has other axes in diffusers' files")


class DiffusersFused(Diffusers):
    """Fused into the weights (`fuse_lora`), `unfuse_lora` before a change; a LoRA's file in diffusers' names."""

    family = "diffusers"
    fuse = True


class DiffusersSaved(Diffusers):
    """Loaded, saved by diffusers (`save_lora_adapter`) and loaded from there."""

    save = True


class PipelineSession(Session):
    """A pipeline with one tiny model in which the layer sits under ``name``."""

    def __init__(self, base: nn.Module, subject: Diffusers, pipeline: Any, part: str, name: str) -> None:
        super().__init__(base)
        self.subject, self.pipeline, self.part, self.name = subject, pipeline, part, name
        self.model: Any = getattr(pipeline, part)
        self.model.set_submodule(name, base)
        self.fused = False

    def load(self, folder: Path, name: str, adapter: Adapter) -> None:
        self.unfuse()
        self.load_file(folder, name, adapter)
        if self.subject.save:
            self.model.save_lora_adapter(str(folder), name, weight_name=FILE)
            self.model.delete_adapters(name)
            self.model.load_lora_adapter(str(folder), prefix=None, weight_name=FILE, adapter_name=name)

    @abstractmethod
    def load_file(self, folder: Path, name: str, adapter: Adapter) -> None:
        """Write the file that the pipeline loads, and load it."""

    def activate(self) -> None:
        self.unfuse()
        self.model.set_adapters(list(self.strengths), list(self.strengths.values()))
        self.model.eval().requires_grad_(False)
        if self.subject.fuse:
            self.pipeline.fuse_lora(components=[self.part], adapter_names=list(self.strengths))
            self.fused = True

    def delete(self, name: str) -> None:
        self.unfuse()
        self.model.delete_adapters(name)

    def unfuse(self) -> None:
        """The weights as they were, before adapters change."""
        if self.fused:
            self.pipeline.unfuse_lora(components=[self.part])
            self.fused = False

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.model.get_submodule(self.name)(x)
        return made


class UNetSession(PipelineSession):
    """Stable Diffusion 1.5's pipeline with nothing in it but a UNet of one block each way."""

    def __init__(self, base: nn.Module, subject: Diffusers) -> None:
        diffusers = subject.library
        pipeline = diffusers.StableDiffusionPipeline(
            vae=None, text_encoder=None, tokenizer=None, unet=diffusers.UNet2DConditionModel(**UNET),
            scheduler=None, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip
        assert isinstance(base.weight, Tensor)
        super().__init__(base, subject, pipeline, "unet", name_for(base.weight))

    def load_file(self, folder: Path, name: str, adapter: Adapter) -> None:
        options = {"weight_name": FILE, "adapter_name": name}
        if adapter.kind == "lora":
            write_lora(folder, self.weight, adapter, self.subject.family)
            self.pipeline.load_lora_weights(str(folder), **options)
        else:
            write_unet_lokr(folder, self.weight, adapter)
            self.model.load_lora_adapter(str(folder), prefix="unet", **options)


class ZImageSession(PipelineSession):
    """Z-Image's pipeline with nothing in it but a transformer of one layer."""

    def __init__(self, base: nn.Module, subject: Diffusers) -> None:
        diffusers = subject.library
        model = diffusers.ZImageTransformer2DModel(**Z_IMAGE)
        pipeline = diffusers.ZImagePipeline(None, None, None, None, model)
        super().__init__(base, subject, pipeline, "transformer", Z_IMAGE_LINEAR)

    def load_file(self, folder: Path, name: str, adapter: Adapter) -> None:
        if adapter.kind != "lokr":
            raise Unsupported("adapters of several kinds on one layer")
        write_z_image_lokr(folder, adapter)
        self.pipeline.load_lora_weights(str(folder), weight_name=FILE, adapter_name=name)


def write_lora(folder: Path, weight: Tensor, adapter: Adapter, family: Writer) -> None:
    """A LoRA in kohya's names, alpha as it is, or in diffusers', its scale in lora_B."""
    piece = piece_of(weight, adapter)
    fold.save(folder / FILE, family, [piece if family == "kohya" else wide(piece)])


def write_unet_lokr(folder: Path, weight: Tensor, adapter: Adapter) -> None:
    """A LoKr in diffusers' names, its scale in w1."""
    factors = fold.scaled(wide(piece_of(weight, adapter))).tensors
    save_file({f"unet.{name_for(weight)}.{key}": t.contiguous() for key, t in factors.items()}, folder / FILE)


def write_z_image_lokr(folder: Path, adapter: Adapter) -> None:
    """A LoKr in ai-toolkit's names, alpha as it is."""
    tensors = {f"diffusion_model.{Z_IMAGE_LINEAR}.{key}": t.contiguous() for key, t in adapter.tensors.items()}
    save_file(tensors, folder / FILE)
