"""What a bench measures: single layers of the base models, a whole UNet's step, merges into narrow bases."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from msgspec.structs import replace

from fulldiff.cases.factors import lokr_for, lora
from fulldiff.cases.model import BenchCase, Case, DType, FactorDType, Input, Layer, MergeCase, RuntimeCase, StepCase
from fulldiff.cases.tables import TableRow, load_table, tokens
from fulldiff.harness.files.match import Match
from fulldiff.harness.subjects.names import AGAIN, NO_ADAPTER

Size = tuple[int, int]
SIZES: tuple[Size, ...] = ((512, 512), (1024, 1024), (1024, 1536))
CLIP = 77
DTYPES: tuple[DType, ...] = ("f32", "bf16")
FORMS = {"full w2": 0, "rank 16": 16}
FACTOR = 8
# The layer shapes of a quick bench: those with the most FLOPs, two thirds of SDXL's step.
SHAPES = 4
LAYER_WAYS = (NO_ADAPTER, AGAIN, "full-diff", "streamed", "runtime-lokr", "planned")
STEP_WAYS = (
    NO_ADAPTER, AGAIN, "full-diff-alive", "full-diff", "streamed", "runtime-lokr", "hybrid", "planned", "merged",
)  # fmt: skip
MODELS = ("sdxl", "sd15", "flux", "zimage")
MERGE_DTYPES: tuple[FactorDType, ...] = ("f16", "bf16", "f8_e4m3")
# ‖ΔW‖ / ‖W‖ of a merge, and how many adapters share it.
MERGE_SIZES, MERGE_ADAPTERS = (0.1, 0.01, 0.003, 0.001), 8


@dataclass(frozen=True)
class Workload:
    """One cell of the plan: what it is, for the report, and its case."""

    labels: dict[str, Any]
    case: Case


@dataclass(frozen=True)
class Lokr:
    """The adapter of a whole step: rank 0 is a full w2; without ``convolutions`` the attention blocks alone have it."""

    factor: int = FACTOR
    rank: int = 0
    convolutions: bool = True


ALL_LAYERS = Lokr()


@dataclass(frozen=True)
class Shape:
    """A distinct layer of a model: how often it occurs with so many tokens at each image size."""

    model: str
    layer: Layer
    counts: dict[tuple[int, Size], int]

    @property
    def flops(self) -> int:
        """FLOPs of all its layers at 1024 × 1024."""
        weight = self.layer.out * self.layer.inp // self.layer.groups
        for size in self.layer.kernel:
            weight *= size
        return sum(2 * weight * n * count for (n, size), count in self.counts.items() if size == (1024, 1024))


def shapes(model: str, sizes: Iterable[Size]) -> list[Shape]:
    """The distinct adaptable layers of a model's UNet or transformer, the most FLOPs first."""
    found: dict[Layer, dict[tuple[int, Size], int]] = {}
    for row in load_table(model):
        if row.part in ("unet", "transformer") and row.in_locon:
            counts = found.setdefault(plain(row), {})
            for size in sizes:
                key = (tokens(row, *size), size)
                counts[key] = counts.get(key, 0) + 1
    return sorted((Shape(model, layer, counts) for layer, counts in found.items()), key=lambda s: -s.flops)


def share(model: str, layers: Collection[str]) -> float:
    """The share of a step's FLOPs at 1024 × 1024 that the described layers carry."""
    flops = {describe(shape.layer): shape.flops for shape in shapes(model, SIZES)}
    return sum(count for name, count in flops.items() if name in layers) / sum(flops.values())


def plain(row: TableRow) -> Layer:
    """The row's layer, with a bias: nothing else tells to_out from to_q."""
    return replace(row.layer, bias=True)


def layers(
    models: Iterable[str], sizes: tuple[Size, ...], most: int | None, factors: Iterable[int] = (FACTOR,)
) -> Iterator[Workload]:
    """Each shape at 77 tokens and at its own token counts at each size, in both dtypes and forms."""
    for model in models:
        for shape in shapes(model, sizes)[:most]:
            for n in sorted({CLIP, *(n for n, _ in shape.counts)}):
                yield from lokrs(shape, n, factors)


def layers_at(counts: Iterable[int], most: int | None, factors: Iterable[int]) -> Iterator[Workload]:
    """SDXL's shapes at these token counts, whatever an image gives them: no share of a step."""
    for n, shape in product(counts, shapes("sdxl", SIZES)[:most]):
        yield from lokrs(Shape(shape.model, shape.layer, {}), n, factors)


def lokrs(shape: Shape, n: int, factors: Iterable[int]) -> Iterator[Workload]:
    """One shape with so many tokens in both dtypes and forms."""
    for factor, dtype, (form, rank) in product(factors, DTYPES, FORMS.items()):
        yield layer(shape, n, dtype, form, rank, factor)


def layer(shape: Shape, n: int, dtype: DType, form: str, rank: int, factor: int) -> Workload:
    """One shape with so many tokens."""
    described = describe(shape.layer)
    form = form if factor == FACTOR else f"{form}, factor {factor}"
    at = {f"{h}×{w}": count for (tokens_at, (h, w)), count in shape.counts.items() if tokens_at == n}
    body = RuntimeCase(shape.layer, (lokr_for(shape.layer, factor, rank, dtype=dtype),), image(shape.layer, n), dtype)
    labels = {"workload": "layer", "model": shape.model, "layer": described, "tokens": n, "dtype": dtype, "form": form}
    name = f"{shape.model}-{described.replace(' ', '-').replace('×', 'x')}-{n}-{dtype}-f{factor}-r{rank}"
    return Workload(labels | {"count_at": at if shape.counts else None}, Case(BenchCase(name, body, LAYER_WAYS), 1))


def file_layers(found: Match, n: int = 1024) -> Iterator[Workload]:
    """A file's own adapters on each distinct layer and form that they have, the most frequent first."""
    groups: dict[tuple[Layer, str], list[Any]] = {}
    for target in found.targets:
        groups.setdefault((target.layer, target.adapter.form), []).append(target)
    for (own, form), targets in sorted(groups.items(), key=lambda item: -len(item[1])):
        body = RuntimeCase(own, (targets[0].adapter,), image(own, n))
        labels = {"workload": "file", "model": found.base, "layer": describe(own), "tokens": n, "dtype": "f32"}
        name = f"{found.path.name}-{targets[0].name}-{n}"
        yield Workload(labels | {"form": form, "layers": len(targets)}, Case(BenchCase(name, body, LAYER_WAYS), 1))


def step(size: Size, dtype: DType, narrowed: int, lokr: Lokr) -> Workload:
    """A whole step of SDXL's UNet."""
    body = StepCase("sdxl", size, STEP_WAYS, dtype, narrowed, lokr.factor, lokr.rank, lokr.convolutions)
    adapted = "all 788 adaptable layers" if lokr.convolutions else "the 722 layers of its attention blocks"
    form = f"LoKr of factor {lokr.factor}, {f'rank {lokr.rank}' if lokr.rank else 'full w2'}, on {adapted}"
    labels = {"workload": "step", "model": "sdxl", "size": f"{size[0]}×{size[1]}", "dtype": dtype}
    return Workload(labels | {"narrowed": narrowed, "form": form}, Case(body, 1))


def merges() -> Iterator[Workload]:
    """Eight LoRAs of equal size merged into a 640 × 640 base, summed once and one by one."""
    spec = Layer("linear", 640, 640)
    for dtype in MERGE_DTYPES:
        for size in MERGE_SIZES:
            for one_by_one in (False, True):
                each = size / MERGE_ADAPTERS**0.5
                adapters = tuple(lora(640, 640, 16, strength=each) for _ in range(MERGE_ADAPTERS))
                body = MergeCase(spec, adapters, dtype, one_by_one=one_by_one)
                yield Workload(
                    {"workload": "merge", "dtype": dtype, "size": size, "one_by_one": one_by_one}, Case(body, 1)
                )


def image(own: Layer, n: int) -> Input:
    """n tokens; for a convolution an image with so many output positions, as square as n allows."""
    if own.kind == "linear":
        return Input((n, own.inp))
    height = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    return Input((1, own.inp, height * own.stride[0], n // height * own.stride[1]))


def describe(own: Layer) -> str:
    """``linear 1280×1280``, ``conv2d 640×320 3×3 /2``."""
    kernel = f" {'×'.join(map(str, own.kernel))}" if own.kernel else ""
    stride = f" /{own.stride[0]}" if own.kernel and max(own.stride) > 1 else ""
    return f"{own.kind} {own.out}×{own.inp}{kernel}{stride}"


def needed_bytes(body: StepCase) -> int:
    """Memory that a step needs at the most: the weights, all W' and a copy beside them, and the activations."""
    weights = 2.6e9 / body.narrowed**2 * (2 if body.dtype in ("bf16", "f16") else 4)
    return int(3 * weights + 1500 * body.size[0] * body.size[1] / body.narrowed)
