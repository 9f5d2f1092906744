"""Write the layer tables of the known base models from their public configurations.

    python -m fulldiff.cases.models.make_tables [MODEL ...]    write sdxl.csv, sd15.csv, …
    python -m fulldiff.cases.models.make_tables --check        exit with 1 if a table here differs

Needs the extra ``tables`` (diffusers, transformers); no network and no weights. Each model is built
on torch's meta device and run once on inputs without values, so that the token count of every layer
is observed, not guessed. A table has one row per Linear or Conv, in the order of the module walk:

order          position among the Linear and Conv layers of its part
part           unet, transformer, text_encoder or text_encoder_2
name           path in the diffusers model
original_name  path in the original checkpoint (ldm, BFL). A suffix says which part of the stored
               tensor is this layer: ``[a:b]`` its rows a to b, ``[a:b+c:d]`` those row ranges one
               after the other, ``[T]`` the transpose
kind, out, in, kernel, stride, padding, dilation, groups, bias    as torch has them
group          attention, feed_forward, projection, modulation, resnet, sampler or io_embed
in_lora        the layer is in kohya's standard set (transformer blocks and text encoder blocks)
in_locon       the layer is in the set with convolutions (also ResNets and samplers)
tokens         output positions: ``spatial/F`` (latent height/F × width/F), ``text`` (the prompt),
               ``spatial/F+text`` (both, joined), ``one`` (a vector)
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fulldiff.cases.models.configs import CLIP_G, CLIP_L, FLUX, SD15_UNET, SDXL_UNET, ZIMAGE
from fulldiff.cases.models.original_names import (
    CLIP_G_NAMES,
    FLUX_NAMES,
    ZIMAGE_NAMES,
    replaced,
    unet_original,
)

FOLDER = Path(__file__).parent
COLUMNS = (
    *("order", "part", "name", "original_name"),
    *("kind", "out", "in", "kernel", "stride", "padding", "dilation", "groups", "bias"),
    *("group", "in_lora", "in_locon", "tokens"),
)

# Chosen so that no two formulas of tokens() give the same count.
LATENT = (128, 96)
CLIP_TEXT, LONG_TEXT = 77, 512
FACTORS = (1, 2, 4, 8)


def library(name: str) -> Any:
    """Import ``name``, or exit with 2 saying how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = f"make_tables.py: {error.name} is missing: pip install 'fulldiff[tables]'"
        print(text, file=sys.stderr)
        raise SystemExit(2) from error


# How each model is built and run. Everything is on the meta device: shapes only.


def unet(config: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """A UNet and a call that runs it."""
    torch = library("torch")
    model = library("diffusers").UNet2DConditionModel(**config)
    text = torch.empty(1, CLIP_TEXT, config["cross_attention_dim"])
    added = {"text_embeds": torch.empty(1, 1280), "time_ids": torch.empty(1, 6)}
    return model, lambda: model(torch.empty(1, 4, *LATENT), torch.empty(1), text, added_cond_kwargs=added)


def flux(config: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """The Flux transformer, which gets its latent packed two by two, and a call that runs it."""
    empty = library("torch").empty
    model = library("diffusers").FluxTransformer2DModel(**config)
    image = LATENT[0] * LATENT[1] // 4
    return model, lambda: model(
        empty(1, image, 64), empty(1, LONG_TEXT, 4096), empty(1, 768), empty(1),
        empty(image, 3), empty(LONG_TEXT, 3), empty(1),
    )  # fmt: skip


def zimage(config: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """The Z-Image transformer and a call that runs it."""
    empty = library("torch").empty
    model = library("diffusers").ZImageTransformer2DModel(**config)
    return model, lambda: model([empty(16, 1, *LATENT)], empty(1), [empty(LONG_TEXT, 2560)])


def clip(config: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """A CLIP text encoder (with its projection if the config has one) and a call that runs it."""
    transformers, torch = library("transformers"), library("torch")
    projected = "projection_dim" in config
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    model = kind(transformers.CLIPTextConfig(vocab_size=49408, **config))
    return model, lambda: model(torch.zeros(1, CLIP_TEXT, dtype=torch.long))


EMBEDDERS = "conditioner.embedders"
Part = tuple[str, Callable[[], tuple[Any, Callable[[], Any]]], Callable[[str], str]]
MODELS: dict[str, tuple[Part, ...]] = {
    "sdxl": (
        ("unet", lambda: unet(SDXL_UNET), unet_original(SDXL_UNET)),
        ("text_encoder", lambda: clip(CLIP_L), replaced((), f"{EMBEDDERS}.0.transformer.")),
        ("text_encoder_2", lambda: clip(CLIP_G), replaced(CLIP_G_NAMES, f"{EMBEDDERS}.1.model.")),
    ),
    "sd15": (
        ("unet", lambda: unet(SD15_UNET), unet_original(SD15_UNET)),
        ("text_encoder", lambda: clip(CLIP_L), replaced((), "cond_stage_model.transformer.")),
    ),
    "flux": (
        ("transformer", lambda: flux(FLUX), replaced(FLUX_NAMES)),
        ("text_encoder", lambda: clip(CLIP_L), replaced(())),
    ),
    "zimage": (("transformer", lambda: zimage(ZIMAGE), replaced(ZIMAGE_NAMES)),),
}

GROUPS = (
    (r"(proj_in|blocks\.\d+\.proj_out|attentions\.\d+\.proj_out)$", "projection"),
    (r"(norm\w*\.linear|adaLN_modulation\.\d)$", "modulation"),
    (r"\.(ff|ff_context|mlp|feed_forward)\.|proj_mlp$", "feed_forward"),
    (r"\.(attn\d?|self_attn|attention)\.", "attention"),
    (r"\.resnets\.", "resnet"),
    (r"samplers\.", "sampler"),
)
BLOCK = re.compile(r"(^|\.)(attentions|\w*transformer_blocks|layers|\w+_refiner)\.\d+\.")


def group(name: str) -> str:
    """The coarse role of a layer; what no rule names is an input, output or embedding layer."""
    if name.startswith("t_embedder"):
        return "io_embed"
    return next((role for pattern, role in GROUPS if re.search(pattern, name)), "io_embed")


def tokens(positions: int) -> str:
    """The formula that gives ``positions`` for `LATENT` and the text lengths."""
    if positions == 1:
        return "one"
    if positions in (CLIP_TEXT, LONG_TEXT):
        return "text"
    for factor in FACTORS:
        image = LATENT[0] * LATENT[1] // factor**2
        if positions in (image, image + LONG_TEXT):
            return f"spatial/{factor}" + ("" if positions == image else "+text")
    raise SystemExit(f"make_tables.py: no formula gives {positions} positions: extend tokens()")


def observed(layers: dict[str, Any], run: Callable[[], Any]) -> dict[str, int]:
    """Output positions (pixels or tokens, batch excluded) of each layer in one run of the model."""
    seen: dict[str, int] = {}

    def note(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, _: Any, output: Any) -> None:
            seen[name] = output.numel() // weight_shape(module)[0]

        return hook

    hooks = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def weight_shape(module: Any) -> tuple[int, ...]:
    """(out, in / groups, *kernel)."""
    return tuple(module.weight.shape)


def module_columns(module: Any) -> dict[str, Any]:
    """The columns that a Linear or Conv module states itself; sizes per axis joined by ``x``."""
    out, inp, *kernel = weight_shape(module)
    groups = getattr(module, "groups", 1)
    axes = ("stride", "padding", "dilation")
    return {
        "kind": f"conv{len(kernel)}d" if kernel else "linear",
        "out": out,
        "in": inp * groups,
        "kernel": "x".join(map(str, kernel)),
        **{axis: "x".join(map(str, getattr(module, axis, ()))) for axis in axes},
        "groups": groups,
        "bias": int(module.bias is not None),
    }


def part_rows(part: Part) -> Iterator[dict[str, Any]]:
    """The rows of one part of a model, in the order of its module walk."""
    torch = library("torch")
    name, build, original = part
    with torch.device("meta"), torch.no_grad():
        model, run = build()
        kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
        layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, kinds)}
        positions = observed(layers, run)
    for order, (path, layer) in enumerate(layers.items()):
        public = published(name, path)
        yield {
            "order": order,
            "part": name,
            "name": public,
            "original_name": original(public),
            **module_columns(layer),
            **role_columns(public),
            "tokens": tokens(positions[path]),
        }


def published(part: str, path: str) -> str:
    """The path in published weights: transformers 5 dropped ``text_model.`` from CLIPTextModel."""
    bare = part.startswith("text_encoder") and path.startswith("encoder.")
    return f"text_model.{path}" if bare else path


def role_columns(name: str) -> dict[str, Any]:
    """The columns that follow from a layer's path: its group and the sets it belongs to."""
    role = group(name)
    convolutional = role in ("resnet", "sampler")
    in_lora = bool(BLOCK.search(name)) and not convolutional
    return {"group": role, "in_lora": int(in_lora), "in_locon": int(in_lora or convolutional)}


def table(model: str) -> str:
    """The CSV text of one model's table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for part in MODELS[model]:
        writer.writerows(part_rows(part))
    return text.getvalue()


def main() -> int:
    """Write or check the tables named on the command line; 1 if a checked table differs."""
    parser = argparse.ArgumentParser(description="Write the layer tables of known base models.")
    parser.add_argument("models", nargs="*", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--check", action="store_true", help="compare with the tree, write nothing")
    options = parser.parse_args()
    if unknown := set(options.models) - MODELS.keys():
        parser.error(f"no model {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    stale = 0
    for model in options.models or MODELS:
        path, text = FOLDER / f"{model}.csv", table(model)
        if not options.check:
            path.write_text(text, encoding="utf-8", newline="\n")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale += 1
            print(f"{path.name} differs from what make_tables.py gives: run make_tables.py {model}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
