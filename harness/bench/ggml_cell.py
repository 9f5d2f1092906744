"""One cell of the Vulkan bench in a process of its own: ``python -m fulldiff.harness.bench.ggml_cell`` < spec.

A crash of the engine ends that cell alone. The spec is a `LayerSpec` or `ChainSpec` as JSON; the answer, the last
line of stdout, a `Measured`. ``compute_bytes`` is ggml's own metric, what its users see as "compute buffer":
the memory of all that is computed, without weights, factors and input.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn

from fulldiff.cases.model import Case, RuntimeCase
from fulldiff.harness.backends.ggml import F32
from fulldiff.harness.judge import loaded, truth_of
from fulldiff.harness.realise import Material, module_for, realise
from fulldiff.harness.subjects.base import Adapter, Unsupported
from fulldiff.harness.subjects.ggml import runtime
from fulldiff.harness.subjects.ggml.delta import delta
from fulldiff.harness.subjects.ggml.graph import Graph, Node
from fulldiff.harness.subjects.ggml.layer import Layer
from fulldiff.harness.subjects.ggml.session import session
from fulldiff.harness.subjects.ggml.subject import Ggml
from fulldiff.harness.subjects.registry import subject

CHECKED_TOKENS = 64


class LayerSpec(msgspec.Struct, frozen=True, tag="layer"):
    """One layer: the subject, without its adapters where ``bare``, called so many times."""

    case: Case
    subject: str
    bare: bool = False
    calls: int = 3


class ChainSpec(msgspec.Struct, frozen=True, tag="chain"):
    """Equal linear layers in a row, f16 weights, one LoKr each; ``way``: none, all-alive, per-layer or runtime."""

    backend: str
    way: str
    layers: int
    width: int = 1024
    tokens: int = 256
    factor: int = 16


class Measured(msgspec.Struct, frozen=True):
    """Bytes of the compute buffer, seconds of each call, the RMS error over the RMS of what it is compared with."""

    compute_bytes: int = 0
    seconds: list[float] = []
    error: float = 0.0
    device: str = ""
    unsupported: str = ""


def measure_layer(spec: LayerSpec) -> Measured:
    """The compute buffer, the times, and the error of the delta alone (of the base, where bare)."""
    body, made = spec.case.body, subject(spec.subject)
    assert isinstance(body, RuntimeCase) and isinstance(made, Ggml)
    if spec.bare:
        body = msgspec.structs.replace(body, adapters=())
    material = realise(spec.case, body)
    adapters = loaded(body, material)
    module = module_for(body.layer, material.weight, material.bias)
    seconds = [_timed(lambda: made.forward(module, adapters, material.x)) for _ in range(spec.calls)]
    size = made.compute_bytes
    checked = material if spec.bare else _delta_alone(material)
    got = made.forward(module_for(body.layer, checked.weight, checked.bias), adapters, checked.x)
    return Measured(size, seconds, _error(body, checked, made, got), made.session.describe())


def measure_chain(spec: ChainSpec) -> Measured:
    """The compute buffer of the whole chain, and its output's error."""
    where = session(spec.backend, True)
    generator = torch.Generator().manual_seed(1)
    weights = [_random(generator, spec.width, spec.width).half() for _ in range(spec.layers)]
    adapters = [_adapter(generator, spec) for _ in range(spec.layers)]
    x = torch.randn(spec.tokens, spec.width, generator=generator)
    with Graph(where) as g:
        made = build(g, spec, weights, adapters, x)
        start = time.perf_counter()
        y = g.compute(made)
        seconds = [time.perf_counter() - start]
        want = _chained(weights, adapters if spec.way != "none" else [], x)
        error = float((y.reshape(want.shape) - want).norm() / want.norm())
        return Measured(g.compute_bytes, seconds, error, where.describe())


def build(g: Graph, spec: ChainSpec, weights: list[Tensor], adapters: list[Adapter], x: Tensor) -> Node:
    """The chain's last output.

    All-alive is what ggml makes of the finished chain by itself: it walks depth-first from the last output, so
    every W' is made before the first activation. The other ways put each layer in order when it is built.
    """
    h = g.tensor(x)
    for weight, adapter in zip(weights, adapters, strict=True):
        held = g.tensor(weight)
        if spec.way in ("all-alive", "per-layer"):
            change = delta(g, adapter, weight.shape, 1.0)
            held = g.add(held, change)
        h = _runtime(g, weight, held, adapter, h, spec) if spec.way == "runtime" else g.mul_mat(held, h)
        if spec.way != "all-alive":
            g.expand(h)
    return h


def _runtime(g: Graph, weight: Tensor, held: Node, adapter: Adapter, h: Node, spec: ChainSpec) -> Node:
    module = nn.Linear(spec.width, spec.width, bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    layer = Layer(g, module, None, h, spec.width, spec.tokens, F32)
    ((start, block),) = runtime.contributions(layer, adapter)
    g.expand(block.node)
    y = g.expand(g.mul_mat(held, h))
    return g.reshape(layer.add_into(y, block, start), spec.width, spec.tokens)


def _adapter(generator: torch.Generator, spec: ChainSpec) -> Adapter:
    inner = spec.width // spec.factor
    w1, w2 = _random(generator, spec.factor, spec.factor), _random(generator, inner, inner)
    return Adapter("lokr", {"lokr_w1": w1, "lokr_w2": w2 / 2})


def _random(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)


def _chained(weights: list[Tensor], adapters: list[Adapter], x: Tensor) -> Tensor:
    h: Tensor = x.double()
    for at, weight in enumerate(weights):
        whole = weight.double()
        if adapters:
            t = adapters[at].tensors
            whole = whole + torch.kron(t["lokr_w1"].double(), t["lokr_w2"].double())
        h = h.matmul(whole.T)
    return h


def _delta_alone(material: Material) -> Material:
    bias = None if material.bias is None else torch.zeros_like(material.bias)
    return Material(torch.zeros_like(material.weight), bias, material.adapters, material.x)


def _error(body: RuntimeCase, material: Material, made: Ggml, got: Tensor) -> float:
    """Against the float64 oracle; of a linear layer the first tokens only."""
    if body.layer.kind == "linear":
        width = material.x.shape[-1]
        material = Material(
            material.weight, material.bias, material.adapters, material.x.reshape(-1, width)[:CHECKED_TOKENS]
        )
        got = got.reshape(-1, got.shape[-1])[:CHECKED_TOKENS]
    want = truth_of(body, material, made)
    return float((got.double() - want).norm() / want.norm())


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Read the spec, print what was measured."""
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=LayerSpec | ChainSpec)
    try:
        with torch.no_grad():
            made = measure_layer(spec) if isinstance(spec, LayerSpec) else measure_chain(spec)
    except Unsupported as reason:
        made = Measured(unsupported=str(reason))
    print(msgspec.json.encode(made).decode())


if __name__ == "__main__":
    main()
