"""From a case to tensors: generated from its seed or read from its file, cast once to its dtypes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from fulldiff.cases import factors
from fulldiff.cases import tensors as generator
from fulldiff.cases.model import Adapter, Case, CaseError, FileRef, Layer, Layout, RuntimeCase, Shape, Values
from fulldiff.reference.truth import Factors

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
}
CONVOLUTIONS: dict[str, Any] = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}


@dataclass(frozen=True)
class Material:
    """The tensors of one runtime case, in the dtypes that the subject gets."""

    weight: Tensor
    bias: Tensor | None
    adapters: tuple[Mapping[str, Tensor], ...]
    x: Tensor

    def digest(self) -> str:
        """A hash of every value: two results with the same digest were given the same tensors."""
        state = hashlib.blake2b(digest_size=8)
        parts = [self.weight, self.x, *([] if self.bias is None else [self.bias])]
        for tensor in [*parts, *(t for adapter in self.adapters for t in adapter.values())]:
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
            state.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        return state.hexdigest()


def realise(case: Case, body: RuntimeCase) -> Material:
    """All tensors of a runtime case."""
    values, seed, dtype = body.values, case.seed, DTYPES[body.dtype]
    weight, bias = _stored_base(body, dtype) if body.weights else _made_base(body, seed, dtype)
    adapters = realise_adapters(case, body)
    x = _cast(generator.activation(values, seed, "x", body.input.shape), dtype)
    return Material(weight, bias, adapters, lay_out(x, body.input.layout))


def realise_adapters(case: Case, body: RuntimeCase) -> tuple[Mapping[str, Tensor], ...]:
    """The tensors of the case's adapters alone."""
    return tuple(_adapter(case, body, index) for index in range(len(body.adapters)))


def _made_base(body: RuntimeCase, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    layer, values = body.layer, body.values
    bias = _cast(generator.base(values, seed, "bias", (layer.out,)), dtype) if layer.bias else None
    return _cast(_weight(values, seed, layer.weight_shape), dtype), bias


def _stored_base(body: RuntimeCase, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The base of a checkpoint: the tensors that make up the layer, joined by rows."""
    assert body.weights is not None
    stored = read(body.weights)
    parts = [tensor.to(dtype) for name, tensor in stored.items() if name.startswith("weight.")]
    biases = [tensor.to(dtype) for name, tensor in stored.items() if name.startswith("bias.")]
    weight = torch.cat(parts).reshape(body.layer.weight_shape)
    return weight, torch.cat(biases) if len(biases) == len(parts) else None


@lru_cache(maxsize=1)
def _weight(values: Values, seed: int, shape: Shape) -> generator.F64:
    """Kept for the next case: cells of a bench differ in dtype, form and tokens but not in the base."""
    return generator.base(values, seed, "weight", shape)


def _cast(values: generator.F64, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(values.shape).to(dtype)


def _adapter(case: Case, body: RuntimeCase, index: int) -> dict[str, Tensor]:
    adapter = body.adapters[index]
    if adapter.source is not None:
        return adapter_tensors(adapter)
    made = {name: _cast(_factor(case, body, index, name), DTYPES[adapter.dtype]) for name in adapter.factors}
    return made | _alpha(adapter)


def _factor(case: Case, body: RuntimeCase, index: int, name: str) -> generator.F64:
    adapter, stream = body.adapters[index], f"{index}.{name}"
    if name == "dora_scale":
        return generator.magnitude(body.values, case.seed, stream, adapter.factors[name])
    dense = name in factors.dense(adapter)
    return generator.factor(body.values, case.seed, stream, adapter.factors[name], dense)


def adapter_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """A file's adapter: its tensors, and the alpha of its metadata where no tensor gives one."""
    assert adapter.source is not None
    return _alpha(adapter) | read(adapter.source)


def _alpha(adapter: Adapter) -> dict[str, Tensor]:
    shape = adapter.alpha.shape
    if shape is None:
        return {}
    return {
        "alpha": torch.tensor(adapter.alpha.value, dtype=torch.float64).to(DTYPES[adapter.alpha.dtype]).reshape(shape)
    }


def read(source: FileRef) -> dict[str, Tensor]:
    """The tensors that ``source`` names, by factor, in the file's dtypes; fp8 as f32, which holds it exactly."""
    file, keys = _opened(source.path, Path(source.path).stat().st_mtime_ns)
    if absent := sorted(set(source.tensors.values()) - keys):
        raise CaseError(f"{source.path}: no tensor {', '.join(absent)}; was the file changed since?")
    return {factor: widened(file.get_tensor(name)) for factor, name in source.tensors.items()}


@lru_cache(maxsize=32)
def _opened(path: str, modified: int) -> tuple[Any, frozenset[str]]:
    """The open file and its names: reading the header of a large file for every layer would take longest."""
    file: Any = safe_open(path, framework="pt")
    return file, frozenset(file.keys())


def widened(tensor: Tensor) -> Tensor:
    """An fp8 tensor in f32: nothing computes in fp8. Any other as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def lay_out(x: Tensor, layout: Layout) -> Tensor:
    """The same values with another layout in memory."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "channels_last":
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return x.to(memory_format=formats[x.dim()])
    return x


def module_for(layer: Layer, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The torch.nn layer with copies of this weight and bias, without gradients."""
    module: Any
    if layer.kind == "linear":
        module = nn.Linear(layer.inp, layer.out, bias is not None, device="meta")
    else:
        module = CONVOLUTIONS[layer.kind](
            layer.inp, layer.out, layer.kernel, layer.stride, layer.padding, layer.dilation,
            layer.groups, bias is not None, layer.padding_mode, device="meta",
        )  # fmt: skip
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    module.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
    return module.eval()  # type: ignore[no-any-return]


def factors64(body: RuntimeCase, material: Material) -> list[Factors]:
    """The same adapters for the reference: the subject's rounded tensors, widened to float64."""
    return [
        Factors(a.kind, {name: t.to(torch.float64) for name, t in tensors.items()}, a.strength, rows=a.rows)
        for a, tensors in zip(body.adapters, material.adapters, strict=True)
    ]
