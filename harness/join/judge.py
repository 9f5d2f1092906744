"""Judging one join case in the worker: the product is compared, never the factors.

What is claimed: the joined file holds the weighted sum on every layer that any file adapts, and on no other; every
learned token is in it; on layers it computes with the diagonal and the scale that are set, and without them again
when they are set back; realised, the file holds what ran, and realised once more the same; taken off, the layers
are what they were.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fulldiff.cases import tensors as generator
from fulldiff.cases.model import Case, FactorDType, JoinCase
from fulldiff.harness.files.joining import widest
from fulldiff.harness.join.effect import ranks
from fulldiff.harness.join.files import adapters_of, parts_of_files, rows_of, tokens_of, write_files
from fulldiff.harness.judge import conclude
from fulldiff.harness.protocol import Claim, Judgement
from fulldiff.harness.realise import DTYPES, module_for
from fulldiff.harness.subjects.base import Refused, Unsupported
from fulldiff.harness.subjects.joiner import Joiner, Running
from fulldiff.reference.bounds import SMALLEST, UNIT_ROUNDOFF, Budget, budget
from fulldiff.reference.factors import Factors
from fulldiff.reference.join import DOWN, MID, UP, Join, Part, Setting
from fulldiff.reference.layers import apply
from fulldiff.reference.truth import Truth

# Roundings of a joined file: the factor that took the scale, and a down that took a mid factor; each file that is
# written anew rounds once more. 1 % for the sums in float64 and products of errors.
ROUNDINGS = 2 * 1.01
REWRITTEN = 3 * 1.01
# The oracle's own sums, in float64: of a joined file and of its parts.
ORACLE = 64 * UNIT_ROUNDOFF["f64"]
TOKENS, SIDE = 3, 4


@dataclass(frozen=True)
class Ground:
    """What a case is judged by: its files and, by layer, what they hold, and the dtype that it is kept in."""

    case: Case
    body: JoinCase
    paths: list[Path]
    parts: dict[str, list[Part]]
    dtypes: dict[str, FactorDType]
    sums: dict[tuple[str, bool], Tensor] = field(default_factory=dict)

    @property
    def setting(self) -> Setting:
        """The diagonal and scale that the case sets."""
        numbers = self.body.diagonal or [1.0] * len(self.paths)
        return Setting(numbers, ranks(self.parts, len(self.paths)), self.body.scale)

    @property
    def still(self) -> Setting:
        """Nothing set: every number 1."""
        return replace(self.setting, numbers=[1.0] * len(self.paths), scale=1.0)

    def sum(self, layer: str, setting: Setting) -> Tensor:
        """The layer's delta under the case's setting, or with nothing set."""
        known = (layer, setting == self.still)
        if known not in self.sums:
            shape, parts = rows_of(self.body.model.name)[layer].weight_shape, self.parts[layer]
            self.sums[known] = Join().joined(parts, shape) if known[1] else Join().running(parts, setting, shape)
        return self.sums[known]


def judge(case: Case, subject: Joiner, stage: Callable[[str], None]) -> Judgement:
    """The judgement of one join case; ``stage`` is told what is about to run, for crash reports."""
    assert isinstance(case.body, JoinCase)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        stage("generate")
        ground = _ground(case, case.body, folder)
        try:
            claims = list(_claims(ground, subject, folder, stage))
        except Refused as reason:
            return Judgement("refused", message=str(reason))
        except Unsupported as reason:
            return Judgement("unsupported", message=str(reason))
    return conclude(claims, "")


def _ground(case: Case, body: JoinCase, folder: Path) -> Ground:
    paths = write_files(case, folder)
    parts = parts_of_files(paths, body.weights, body.model.name)
    dtypes = {name: widest([f.modules[name].dtype for f in body.files if name in f.modules]) for name in parts}
    return Ground(case, body, paths, parts, dtypes)


def _claims(ground: Ground, subject: Joiner, folder: Path, stage: Callable[[str], None]) -> Iterator[Claim]:
    model, joined = ground.body.model.name, folder / "joined.safetensors"
    stage("subject: join")
    subject.join(ground.paths, ground.body.weights, model, joined)
    stage("oracle")
    yield from file_claims("joined file", joined, ground, ground.still, ROUNDINGS)
    yield tokens_kept(ground, joined)
    modules = {name: _module(ground, name) for name in ground.parts}
    stage("subject: attach and set")
    running = subject.attach(joined, modules, model)
    yield from _set_claims(ground, modules, running)
    stage("subject: realise")
    once, twice = folder / "realised.safetensors", folder / "again.safetensors"
    running.realise(once)
    yield from file_claims("realised file", once, ground, ground.setting, REWRITTEN)
    running.detach()
    yield _as_before(ground, modules)
    again = subject.attach(once, modules, model)
    again.realise(twice)
    again.detach()
    yield from file_claims("realised twice", twice, ground, ground.setting, REWRITTEN)


def _set_claims(ground: Ground, modules: Mapping[str, nn.Module], running: Running) -> Iterator[Claim]:
    """The outputs with the case's setting, with none, and with the setting once more."""
    bases = {name: (_wide(module.weight), _wide(module.bias)) for name, module in modules.items()}
    own = {name: _expected(ground, name, ground.setting, *base) for name, base in bases.items()}
    still = {name: _expected(ground, name, ground.still, *base) for name, base in bases.items()}
    turns = (("set", ground.setting, own), ("set back", ground.still, still), ("set again", ground.setting, own))
    for turn, setting, expected in turns:
        running.set_diagonal(setting.numbers)
        running.tune(setting.scale)
        for layer, module in modules.items():
            yield _output_claim(f"output, {turn}", layer, module, _input(ground, layer), *expected[layer])


def file_claims(name: str, path: Path, ground: Ground, setting: Setting, roundings: float) -> Iterator[Claim]:
    """A file's deltas against the reference, layer by layer, and no layer beside them."""
    found, rows = adapters_of(path, ground.body.model.name), rows_of(ground.body.model.name)
    odd = sorted(set(found) ^ set(ground.parts))
    yield Claim(f"{name}: the layers that the files adapt", not odd, 0.0, ", ".join(odd))
    for layer, parts in ground.parts.items():
        shape = rows[layer].weight_shape
        base = torch.zeros(shape, dtype=torch.float64)
        got = sum((Truth().delta(adapter, base) for adapter in found.get(layer, [])), start=base)
        want = ground.sum(layer, setting)
        allowed = torch.zeros_like(want)
        if ground.body.values != "exact":
            allowed = rounding(parts, setting, shape, ground.dtypes[layer], roundings)
        yield compared(f"{name}: the sum", layer, got, want, allowed)


def rounding(parts: Sequence[Part], setting: Setting, shape: Sequence[int], dtype: str, roundings: float) -> Tensor:
    """How far storing the factors in ``dtype`` may move a layer's sum, element by element."""
    total = torch.zeros(tuple(shape), dtype=torch.float64)
    unit, tiny = roundings * UNIT_ROUNDOFF[dtype] + ORACLE, roundings * SMALLEST[dtype]
    for part in (part for part in parts if part.weight):
        factor = abs(part.weight * setting.scale) * max(1.0, *(abs(v) for v in setting.numbers))
        total.add_(_magnitude(part, shape), alpha=unit * factor)
        # A value below the normal range moves by ``tiny`` at most, times the other factor.
        for line in _lines(part, shape):
            total.add_(line, alpha=tiny * max(1.0, factor))
    return total


def _magnitude(part: Part, shape: Sequence[int]) -> Tensor:
    """The part's product with every number replaced by its magnitude, without the file's weight."""
    truth, sizes = Truth(), {name: t.abs() for name, t in part.adapter.tensors.items()}
    return truth.product(Factors("lora", sizes), shape).mul_(abs(truth.scale(part.adapter)))


def _lines(part: Part, shape: Sequence[int]) -> Iterator[Tensor]:
    """The magnitudes of down's product summed over the ranks (1, in, *kernel), and of up's (out, 1, …)."""
    sizes = {name: t.abs() for name, t in part.adapter.tensors.items()}
    ups, downs = torch.ones_like(sizes[UP][:1]), torch.ones_like(sizes[DOWN][:, :1])
    yield Truth().product(Factors("lora", sizes | {UP: ups}), (1, *shape[1:]))
    kernel = shape[2:] if MID in sizes else sizes[DOWN].shape[2:]
    across = (shape[0], 1, *kernel)
    yield (
        Truth()
        .product(Factors("lora", sizes | {DOWN: downs}), across)
        .reshape(*across, *[1] * (len(shape) - len(across)))
    )


def compared(name: str, layer: str, got: Tensor, want: Tensor, allowed: Tensor) -> Claim:
    """Every element within what is allowed; the worst one is shown."""
    if got.shape != want.shape:
        return Claim(name, False, 1e30, layer, str(tuple(got.shape)), str(tuple(want.shape)))
    if not got.numel():
        return Claim(name, True, 0.0)
    error = torch.where(got.isnan(), torch.inf, (got - want).abs())
    share = torch.where(error == 0, 0.0, error / allowed)
    at = int(share.argmax())
    numbers = (f"{t.reshape(-1)[at].item():.9g}" for t in (got, want, error, allowed))
    used = min(float(share.reshape(-1)[at]), 1e30)
    return Claim(name, used <= 1, used, f"{layer}[{at}]", *numbers)


def tokens_kept(ground: Ground, path: Path) -> Claim:
    """Every file's learned tokens are there, bit for bit, as <s{file}-{j}>."""
    found = tokens_of(path)
    want = {
        f"<s{file}-{at}>": token
        for file, source in enumerate(ground.paths)
        for at, token in enumerate(tokens_of(source).values())
    }
    bad = [name for name in want.keys() | found.keys() if not _same(found.get(name), want.get(name))]
    return Claim("learned tokens are kept", not bad, float(bool(bad)), ", ".join(sorted(bad)))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def _module(ground: Ground, name: str) -> nn.Module:
    """The layer with a base weight that is zero but for exact values: a large base hides a wrong adapter."""
    layer, values, dtype = (
        rows_of(ground.body.model.name)[name].layer,
        ground.body.values,
        DTYPES[ground.body.model.dtype],
    )
    weight = torch.zeros(layer.weight_shape, dtype=dtype)
    if values == "exact":
        weight = torch.from_numpy(generator.base(values, ground.case.seed, f"{name}.weight", layer.weight_shape)).to(
            dtype
        )
    bias = torch.from_numpy(generator.base(values, ground.case.seed, f"{name}.bias", (layer.out,))).to(dtype)
    return module_for(layer, weight, bias if layer.bias else None)


def _input(ground: Ground, name: str) -> Tensor:
    layer = rows_of(ground.body.model.name)[name].layer
    shape = (TOKENS, layer.inp) if layer.kind == "linear" else (1, layer.inp, *[SIDE] * len(layer.kernel))
    made = generator.activation(ground.body.values, ground.case.seed, f"{name}.x", shape)
    return torch.from_numpy(made).to(DTYPES[ground.body.model.dtype])


def _output_claim(claim: str, name: str, module: nn.Module, x: Tensor, want: Tensor, allowed: Tensor) -> Claim:
    got = module(x)
    if got.dtype != x.dtype:
        return Claim(f"{claim}: dtype", False, 1e30, name, str(got.dtype), str(x.dtype))
    return compared(claim, name, got.double(), want, allowed)


def _expected(
    ground: Ground, name: str, setting: Setting, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A layer's output in float64, and how far it may be missed: the run's own budget and the file's rounding."""
    assert weight is not None
    layer, x, parts = rows_of(ground.body.model.name)[name].layer, _input(ground, name).double(), ground.parts[name]
    want = apply(layer, weight + ground.sum(name, setting), bias, x)
    if ground.body.values == "exact":
        return want, torch.zeros_like(want)
    run: Budget = budget(Truth(), layer, weight, bias, factors_of(parts, setting), x, ground.body.model.dtype)
    stored = rounding(parts, setting, weight.shape, ground.dtypes[name], ROUNDINGS)
    return want, run.hard + apply(layer, stored, None, x.abs())


def _wide(t: Tensor | nn.Module | None) -> Tensor | None:
    return t.double() if isinstance(t, Tensor) else None


def factors_of(parts: Sequence[Part], setting: Setting) -> list[Factors]:
    """The parts as LoRAs with their diagonal as a core between up and down."""
    diagonal, made, at = Join().diagonal(parts, setting), [], 0
    for part in parts:
        v = torch.tensor(diagonal[at : at + part.rank], dtype=torch.float64)
        t = dict(part.adapter.tensors)
        core = torch.diag(v) if MID not in t else v.reshape(-1, *[1] * (t[MID].dim() - 1)) * t[MID]
        made.append(replace(part.adapter, tensors=t | {MID: core}, strength=part.weight * setting.scale))
        at += part.rank
    return made


def _as_before(ground: Ground, modules: Mapping[str, nn.Module]) -> Claim:
    """Taken off, the layers compute what fresh ones do."""
    bad = [
        name for name, module in modules.items()
        if not torch.equal(module(_input(ground, name)), _module(ground, name)(_input(ground, name)))
    ]  # fmt: skip
    return Claim("the layers are as before", not bad, float(bool(bad)), ", ".join(bad))
