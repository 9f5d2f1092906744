"""Reproductions for peers that load files: the script writes the tensors that the subject wrote, and loads them."""

from __future__ import annotations

import json
import pprint
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file
from torch import Tensor

from fulldiff.harness.files.metadata import CONFIG
from fulldiff.harness.files.writers import Writer
from fulldiff.harness.peers import templates
from fulldiff.harness.peers.templates import Template, literal
from fulldiff.harness.subjects.base import Adapter
from fulldiff.harness.subjects.peers import diffusers, lycoris_file, peft_file
from fulldiff.harness.subjects.peers.files import FILE, name_for

WIDTH = 112
IMPORTS = "import json\nimport tempfile\n\nimport {}\nfrom safetensors.torch import save_file\n"


def written(folder: Path) -> list[str]:
    """Lines that make a folder with what is in this one."""
    lines = ["folder = tempfile.mkdtemp()"]
    for path in sorted(folder.glob("*.safetensors")):
        tensors = [f'    "{name}": {literal(tensor)},' for name, tensor in load_file(path).items()]
        lines += ["save_file({", *tensors, f'}}, f"{{folder}}/{path.name}")']
    if (folder / CONFIG).exists():
        config = pprint.pformat(json.loads((folder / CONFIG).read_text()), width=WIDTH)
        lines += [f"config = {config}", f'json.dump(config, open(f"{{folder}}/{CONFIG}", "w"))']
    return "\n".join(lines).split("\n")


def file_of(write: Callable[[Path], None]) -> list[str]:
    """Lines that make what ``write`` puts into a folder."""
    with TemporaryDirectory() as folder:
        write(Path(folder))
        return written(Path(folder))


def model_lines(name: str) -> list[str]:
    """A model with the layer under a dotted name."""
    *parents, last = name.split(".")
    lines = ["at = model = nn.Module()"]
    if parents:
        lines += [f'for part in "{".".join(parents)}".split("."):', "    at.add_module(part, nn.Module())"]
        lines += ["    at = at.get_submodule(part)"]
    return [*lines, f'at.add_module("{last}", base)']


def peft(merge: bool) -> Template:
    """PEFT's two files per adapter; merged by `merge_and_unload`."""

    def steps(adapters: Sequence[Adapter], weight: Tensor) -> list[str]:
        name = name_for(weight)
        lines = model_lines(name)
        for n, adapter in enumerate(adapters):
            lines += file_of(partial(peft_file.write_file, weight=weight, adapter=adapter))
            call = "model.load_adapter(folder, " if n else "model = peft.PeftModel.from_pretrained(model, folder, "
            lines.append(f'{call}"a{n}")')
        lines += [f"model.base_model.set_adapter({[f'a{n}' for n in range(len(adapters))]})"]
        lines += [f'layer = model.base_model.model.get_submodule("{name}")']
        lines += [f'layer.set_scale("a{n}", {adapter.strength!r})' for n, adapter in enumerate(adapters)]
        last = f'model.merge_and_unload().get_submodule("{name}")(x)' if merge else "layer(x)"
        return [*lines, "model.eval()", f"return {last}"]

    return Template("peft", IMPORTS.format("peft"), steps)


def lycoris() -> Template:
    """One network per file, applied."""

    def steps(adapters: Sequence[Adapter], weight: Tensor) -> list[str]:
        lines = model_lines(name_for(weight))
        for adapter in adapters:
            lines += file_of(partial(_lycoris_file, weight=weight, adapter=adapter))
            lines += [
                f'file = f"{{folder}}/{FILE}"',
                f"network, _ = lycoris.create_lycoris_from_weights({adapter.strength!r}, file, model)",
                "network.apply_to()",
                "network.to(x.dtype).eval()",
            ]
        return [*lines, "return base(x)"]

    return Template("lycoris-lora", IMPORTS.format("lycoris"), steps)


def _lycoris_file(folder: Path, weight: Tensor, adapter: Adapter) -> None:
    lycoris_file.write_file(folder / FILE, weight, adapter)


def functional() -> Template:
    """`bypass_forward_diff` of each adapter's kind, added to the layer's output."""

    def steps(adapters: Sequence[Adapter], weight: Tensor) -> list[str]:
        conv = '{"stride": base.stride, "padding": base.padding, "dilation": base.dilation}'
        lines = ["y = bare = base(x)", f"options = {conv if weight.dim() > 2 else '{}'}"]
        for adapter in adapters:
            tensors = lycoris_file.arguments(adapter, weight)
            module, gamma = lycoris_file.MODULES[adapter.kind], lycoris_file.gamma_of(adapter)
            texts = ["None" if tensor is None else literal(tensor, weight.dtype) for tensor in tensors]
            lines += ["factors = [", *(f"    {text}," for text in texts), "]"]
            lines.append(f"call = lycoris.functional.{module}.bypass_forward_diff")
            lines.append(f"y = y + call(x, bare, *factors, gamma={gamma!r}, extra_args=options) * {adapter.strength!r}")
        return "\n".join([*lines, "return y"]).split("\n")

    modules = ", ".join(f"lycoris.functional.{name}" for name in lycoris_file.MODULES.values())
    return Template("lycoris-lora", f"import {modules}\n", steps)


def pipeline(subject: type[diffusers.Diffusers]) -> Template:
    """diffusers' pipelines with one tiny model, as the subject loads them."""

    def steps(adapters: Sequence[Adapter], weight: Tensor) -> list[str]:
        z_image = weight.dim() == 2 and all(adapter.kind == "lokr" for adapter in adapters)
        part, name = ("transformer", diffusers.Z_IMAGE_LINEAR) if z_image else ("unet", name_for(weight))
        lines = _z_image() if z_image else _unet()
        lines.append(f'model.set_submodule("{name}", base)')
        for n, adapter in enumerate(adapters):
            lines += _load(adapter, weight, subject.family, z_image, f'"a{n}"')
        names = [f"a{n}" for n in range(len(adapters))]
        lines.append(f"model.set_adapters({names}, {[adapter.strength for adapter in adapters]})")
        fuse = [f'pipe.fuse_lora(components=["{part}"], adapter_names={names})'] if subject.fuse else []
        return [*lines, "model.eval()", *fuse, f'return model.get_submodule("{name}")(x)']

    return Template("diffusers, peft, transformers", IMPORTS.format("diffusers"), steps)


def _load(adapter: Adapter, weight: Tensor, family: Writer, z_image: bool, name: str) -> list[str]:
    options = f'weight_name="{FILE}", adapter_name={name}'
    if adapter.kind == "lora":
        made = file_of(lambda folder: diffusers.write_lora(folder, weight, adapter, family))
    elif z_image:
        made = file_of(lambda folder: diffusers.write_z_image_lokr(folder, adapter))
    else:
        made = file_of(lambda folder: diffusers.write_unet_lokr(folder, weight, adapter))
        return [*made, f'model.load_lora_adapter(folder, prefix="unet", {options})']
    return [*made, f"pipe.load_lora_weights(folder, {options})"]


def _unet() -> list[str]:
    return [
        *_model("UNet2DConditionModel", diffusers.UNET),
        "pipe = diffusers.StableDiffusionPipeline(",
        "    vae=None, text_encoder=None, tokenizer=None, unet=model, scheduler=None, safety_checker=None,",
        "    feature_extractor=None, requires_safety_checker=False,",
        ")",
    ]


def _z_image() -> list[str]:
    model = _model("ZImageTransformer2DModel", diffusers.Z_IMAGE)
    return [*model, "pipe = diffusers.ZImagePipeline(None, None, None, None, model)"]


def _model(kind: str, options: Mapping[str, object]) -> list[str]:
    text = pprint.pformat(options, width=WIDTH, compact=True)
    return [*f"options = {text}".split("\n"), f"model = diffusers.{kind}(**options)"]


# Every peer's.
TEMPLATES: Mapping[str, Template] = {
    **templates.TEMPLATES,
    "peft-file": peft(merge=False),
    "peft-unloaded": peft(merge=True),
    "lycoris-file": lycoris(),
    "lycoris-functional": functional(),
    "diffusers": pipeline(diffusers.Diffusers),
    "diffusers-fused": pipeline(diffusers.DiffusersFused),
}
