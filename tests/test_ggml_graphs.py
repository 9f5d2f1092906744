"""ggml's graphs, each in a process of its own: what is asked, how it is split, what it holds, where it aborts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from vulkan_here import BACKENDS, needs_cpu

NB10 = """
import torch
from fulldiff.harness.subjects.ggml.graph import Graph
from fulldiff.harness.subjects.ggml.session import session
with Graph(session("cpu", True)) as g:
    y = g.mul_mat(g.tensor(torch.ones(4, 8)), g.transpose(g.tensor(torch.ones(8, 3))))
    g._ask()
    print("supported", flush=True)
    g.compute(y)
"""


@needs_cpu
def test_a_transposed_operand_is_called_supported_and_then_aborts() -> None:
    done = subprocess.run([sys.executable, "-c", NB10], capture_output=True, text=True)
    assert "supported" in done.stdout
    assert done.returncode != 0 and "nb10" in done.stderr


MEASURE = """
import json, sys, torch
from fulldiff.harness.bench import ggml_cell as cell
from fulldiff.harness.subjects.base import Adapter
from fulldiff.harness.subjects.ggml.graph import Graph
from fulldiff.harness.subjects.ggml.layer import layer
from fulldiff.harness.subjects.ggml.session import session
from fulldiff.harness.subjects.ggml.subject import Ggml
backend, sizes = sys.argv[1], {}
tensors = {"lokr_w1": torch.zeros(16, 16), "lokr_w2": torch.zeros(80, 80)}
subject, module = Ggml(backend), torch.nn.Linear(1280, 1280, bias=False).requires_grad_(False)
for name, adapters in (("none", []), ("runtime", [Adapter("lokr", tensors)])):
    with Graph(subject.session) as g:
        made = layer(g, module, torch.zeros(4096, 1280))
        g.expand(subject.output(made, adapters))
        sizes[name] = g.measure()
weight, small = torch.zeros(1024, 1024).half(), {"lokr_w1": torch.zeros(16, 16), "lokr_w2": torch.zeros(64, 64)}
for way in ("none", "all-alive", "per-layer", "runtime"):
    for layers in (4, 16):
        with Graph(subject.session) as g:
            spec = cell.ChainSpec(backend, way, layers)
            adapters = [Adapter("lokr", small)] * layers
            g.expand(cell.build(g, spec, [weight] * layers, adapters, torch.zeros(256, 1024)))
            sizes[f"{way}/{layers}"] = g.measure()
print(json.dumps(sizes))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_compute_buffers_are_those_of_the_pull_request_s_claim_to_the_byte(backend: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, backend], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert (sizes["none"], sizes["runtime"]) == (20_971_520, 41_943_040)
    chains = {
        way: [sizes[f"{way}/{n}"] / 2**20 for n in (4, 16)] for way in ("none", "all-alive", "per-layer", "runtime")
    }
    assert chains == {"none": [2, 2], "all-alive": [12, 36], "per-layer": [8, 8], "runtime": [3, 3]}


ASKED = """
import sys, torch
from fulldiff.harness.subjects.base import Adapter, Unsupported
from fulldiff.harness.subjects.ggml.graph import Graph
from fulldiff.harness.subjects.ggml.layer import layer
from fulldiff.harness.subjects.ggml.subject import Ggml
subject = Ggml(sys.argv[1])
call, asked, computed = subject.session.library.call, [], []
asks, compute = call.ggml_backend_dev_supports_op, call.ggml_backend_graph_compute
call.ggml_backend_graph_compute = lambda *a: computed.append(1) or compute(*a)
module = torch.nn.Conv2d(6, 8, 3, padding=1).requires_grad_(False)
adapter = Adapter("lokr", {"lokr_w1": torch.ones(2, 3), "lokr_w2_a": torch.ones(4, 2), "lokr_w2_b": torch.ones(2, 18)})

def run(refused):
    call.ggml_backend_dev_supports_op = lambda device, node: asked.append(node) or len(asked) - 1 != refused
    asked.clear()
    with Graph(subject.session) as g:
        made = layer(g, module, torch.ones(2, 6, 5, 5))
        try:
            g.compute(subject.output(made, [adapter]))
        except Unsupported as reason:
            assert "says that it cannot do" in str(reason), reason
        return asked == list(g.nodes())

assert run(None) and len(computed) == 1
for node in range(len(asked)):
    run(node)
    assert len(asked) == node + 1
assert len(computed) == 1
print("refused each of", node + 1)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_device_is_asked_about_every_node_and_a_no_computes_nothing(backend: str) -> None:
    done = subprocess.run([sys.executable, "-c", ASKED, backend], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert "refused each of" in done.stdout


PRIME = """
import dataclasses, math, torch
from fulldiff.harness.subjects.base import Adapter
from fulldiff.harness.subjects.ggml.graph import Graph
from fulldiff.harness.subjects.ggml.layer import layer
from fulldiff.harness.subjects.ggml.subject import Ggml
subject, few = Ggml("cpu"), 1024
whole = subject.session
for module, x, shape in (
    (torch.nn.Linear(12, 8), torch.randn(4099, 12), (4, 4)),
    (torch.nn.Conv2d(12, 8, (1, 2)), torch.randn(31, 12, 7, 8), (4, 4, 1, 2)),
):
    module.requires_grad_(False)
    adapter = Adapter("lokr", {"lokr_w1": torch.randn(2, 3), "lokr_w2": torch.randn(shape)})
    outputs, columns = [], []
    for limit in (whole.columns, few):
        subject.session = dataclasses.replace(whole, columns=limit)
        with Graph(subject.session) as g:
            outputs.append(g.compute(subject.output(layer(g, module, x), [adapter])))
            products = [node for node in g.nodes() if g.call.ggml_op_desc(node) == b"MUL_MAT"]
            columns.append([max(g.sizes(node)[:2]) for node in products])
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-5)
    assert max(columns[0]) > few >= max(columns[1]), columns
    assert len(columns[1]) <= sum(math.ceil(count / few) + 1 for count in columns[0])
"""


@needs_cpu
def test_a_prime_number_of_tokens_takes_at_most_one_part_more_than_the_limit_asks_for() -> None:
    done = subprocess.run([sys.executable, "-c", PRIME], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
