"""A ggml graph: tensors with data, operations, and computing it.

Sizes are in ggml's order, fastest dimension first: a torch tensor (a, b, c) is [c, b, a, 1] here. Before
anything is computed the device is asked about every node, and a "no" raises `Unsupported`: computing it all
the same gives wrong values without an error.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fulldiff.harness.backends import ggml
from fulldiff.harness.backends.ggml import BF16, BYTES, F16, F32
from fulldiff.harness.subjects.base import Unsupported
from fulldiff.harness.subjects.ggml.session import Session

Node = int
TYPES = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
CODES = {dtype: code for code, dtype in TYPES.items()}
SIZE = 8192


@dataclass
class Graph:
    """One graph on a session's devices; use as a context manager, which frees everything."""

    session: Session
    size: int = SIZE
    compute_bytes: int = 0
    _inputs: dict[int, int] = field(default_factory=dict)
    _data: list[tuple[Node, Tensor]] = field(default_factory=list)
    _home: list[Node] = field(default_factory=list)
    _free: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call = self.session.library.call
        self.context = self._context(self.size, self.size)
        self.graph = self.call.ggml_new_graph_custom(self.context, self.size, False)

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        for free in reversed(self._free):
            free()

    # Tensors

    def tensor(self, data: Tensor, *sizes: int, place: int = 0) -> Node:
        """A tensor with data, on the device of that place; its sizes those of ``data`` unless given."""
        code = CODES[data.dtype]
        shape = _four(sizes or tuple(reversed(data.shape)))
        assert math.prod(shape) == data.numel()
        if place not in self._inputs:
            self._inputs[place] = self._context(256, 0)
        node: Node = self.call.ggml_new_tensor_4d(self._inputs[place], code, *shape)
        self._data.append((node, data.contiguous()))
        return node

    def room(self, *sizes: int) -> Node:
        """An f32 tensor to write into, part of the compute buffer."""
        node: Node = self.call.ggml_new_tensor_4d(self.context, F32, *_four(sizes))
        self.call.ggml_set_output(node)
        self._home.append(node)
        return node

    def sizes(self, node: Node) -> list[int]:
        """The four sizes."""
        return list(ggml.head(node).ne)

    # Operations

    def reshape(self, a: Node, *sizes: int) -> Node:
        return self._node(self.call.ggml_reshape_4d(self.context, a, *_four(sizes)))

    def permute(self, a: Node, *order: int) -> Node:
        """A view whose dimension i is a's dimension order[i]."""
        places = [order.index(dim) for dim in range(4)]
        return self._node(self.call.ggml_permute(self.context, a, *places))

    def cont(self, a: Node) -> Node:
        return self._node(self.call.ggml_cont(self.context, a))

    def transpose(self, a: Node) -> Node:
        return self._node(self.call.ggml_transpose(self.context, a))

    def cast(self, a: Node, code: int) -> Node:
        return self._node(self.call.ggml_cast(self.context, a, code))

    def view(self, a: Node, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Node:
        """A view with sizes, and strides of the dimensions after the first and an offset in elements."""
        width, four = BYTES[ggml.head(a).type], _four(sizes)
        given = list(strides) + [strides[-1] * four[len(strides)] if strides else four[0]] * (3 - len(strides))
        return self._node(self.call.ggml_view_4d(self.context, a, *four, *(n * width for n in given), offset * width))

    def add(self, a: Node, b: Node) -> Node:
        return self._node(self.call.ggml_add(self.context, a, b))

    def add_into(self, a: Node, b: Node) -> Node:
        """a += b, at this point of the order."""
        return self._at_home(self.call.ggml_add_inplace(self.context, a, b))

    def mul(self, a: Node, b: Node) -> Node:
        return self._node(self.call.ggml_mul(self.context, a, b))

    def scale(self, a: Node, factor: float) -> Node:
        return self._node(self.call.ggml_scale(self.context, a, factor))

    def repeat(self, a: Node, *sizes: int) -> Node:
        return self._node(self.call.ggml_repeat_4d(self.context, a, *_four(sizes)))

    def copy(self, a: Node, b: Node) -> Node:
        """b = a, at this point of the order."""
        return self._at_home(self.call.ggml_cpy(self.context, a, b))

    def mul_mat(self, a: Node, b: Node) -> Node:
        """[m, n, …] from a [d, m, …] and b [d, n, …]."""
        node = self._node(self.call.ggml_mul_mat(self.context, a, b))
        if self.session.precise:
            self.call.ggml_mul_mat_set_prec(node, ggml.PRECISE)
        return node

    def expand(self, node: Node) -> Node:
        """Put the node, and what it needs, into the order of computing now."""
        self.call.ggml_build_forward_expand(self.graph, node)
        return node

    # Computing

    def compute(self, result: Node) -> Tensor:
        """The result in f32 with ggml's four sizes reversed; `compute_bytes` is then the compute buffer's size."""
        self.call.ggml_set_output(result)
        self.expand(result)
        self._ask()
        self._upload()
        self._run()
        y = torch.empty(tuple(reversed(self.sizes(result))), dtype=torch.float32)
        self.call.ggml_backend_tensor_get(result, ctypes.c_void_p(y.data_ptr()), 0, y.nbytes)
        return y

    def measure(self) -> int:
        """The compute buffer of the graph so far in bytes, without computing it; 0 if it cannot be had."""
        self._ask()
        self._upload()
        _, size = self._allocated()
        return size

    def nodes(self) -> Iterator[Node]:
        """The nodes in the order of computing."""
        for index in range(self.call.ggml_graph_n_nodes(self.graph)):
            yield self.call.ggml_graph_node(self.graph, index)

    def _ask(self) -> None:
        for node in self.nodes():
            devices = [place.device for place in self.session.places]
            words = f"{self.call.ggml_op_desc(node).decode()} of {self.sizes(node)}"
            if not any(self.call.ggml_backend_dev_supports_op(device.pointer, node) for device in devices):
                raise Unsupported(f"{self.session.describe()} says that it cannot do {words}")
            if self.call.ggml_nbytes(node) > self.session.bytes:
                size = self.call.ggml_nbytes(node)
                raise Unsupported(f"{words} has {size:,} bytes, the device's storage buffers {self.session.bytes:,}")

    def _upload(self) -> None:
        for place, context in self._inputs.items():
            self._allocate(place, context)
        for node, data in self._data:
            self.call.ggml_backend_tensor_set(node, ctypes.c_void_p(data.data_ptr()), 0, data.nbytes)

    def _allocate(self, place: int, context: int) -> None:
        chosen = self.session.places[place]
        largest = self.call.ggml_backend_buft_get_max_size(chosen.buffers)
        if too_large := [t.nbytes for _, t in self._data if t.nbytes > min(largest, self.session.bytes)]:
            raise Unsupported(f"a tensor of {max(too_large):,} bytes: {chosen.device.name} takes fewer")
        buffer = self.call.ggml_backend_alloc_ctx_tensors(context, chosen.backend)
        if not buffer:
            raise MemoryError(f"ggml: out of memory for the weights on {chosen.device.name}")
        self._free.append(lambda: self.call.ggml_backend_buffer_free(buffer))
        if len(self.session.places) > 1:
            self.call.ggml_backend_buffer_set_usage(buffer, ggml.WEIGHTS)

    def _run(self) -> None:
        handle, self.compute_bytes = self._allocated()
        if len(self.session.places) > 1:
            status = self.call.ggml_backend_sched_graph_compute(handle, self.graph)
        else:
            status = self.call.ggml_backend_graph_compute(self.session.places[0].backend, self.graph)
        if status:
            raise RuntimeError(f"ggml's graph ended with status {status}")

    def _allocated(self) -> tuple[int, int]:
        """The allocator or scheduler with the graph in its buffers, and their size in bytes."""
        call = self.call
        if len(self.session.places) > 1:
            return self._scheduled()
        needed = self.session.needed(self.graph)
        handle = self.session.allocator(needed)
        if not call.ggml_gallocr_alloc_graph(handle, self.graph):
            raise MemoryError(f"ggml: out of memory for the compute buffer on {self.session.places[0].device.name}")
        return handle, needed

    def _scheduled(self) -> tuple[int, int]:
        places, call = self.session.places, self.call
        backends = (ctypes.c_void_p * len(places))(*(place.backend for place in places))
        # Not freed, for the reason that `Session.allocator` gives.
        handle = call.ggml_backend_sched_new(backends, None, len(places), self.size, False, False)
        for node in self._home:
            call.ggml_backend_sched_set_tensor_backend(handle, node, places[0].backend)
        if not call.ggml_backend_sched_alloc_graph(handle, self.graph):
            raise MemoryError("ggml: out of memory for the compute buffers")
        return handle, sum(call.ggml_backend_sched_get_buffer_size(handle, place.backend) for place in places)

    def _context(self, tensors: int, graph: int) -> int:
        context = self.session.library.context(tensors, graph)
        self._free.append(lambda: self.call.ggml_free(context))
        return context

    def _at_home(self, pointer: int | None) -> Node:
        """A node that writes into another tensor, on the first device, where that tensor is."""
        self._home.append(self._node(pointer))
        return self.expand(self._home[-1])

    def _node(self, pointer: int | None) -> Node:
        if not pointer:
            raise RuntimeError("ggml made no tensor")
        return pointer


def _four(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes, 1, 1, 1, 1)[:4]
