"""Hypothesis strategies of load cases: one to eight files of mixed families and spellings onto one model.

Models are a few layers of a table, shrunk, so that a case takes milliseconds. What loaders get wrong is drawn on
purpose: two names for one target in one file, names of another model, orphans, the same file again at the same or
another strength, strengths 0 and below, as many unmatched tensors as the limit allows and one more.
"""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite, integers, sampled_from
from msgspec.structs import replace

from fulldiff.cases import factors
from fulldiff.cases.load_names import LORA_SUFFIXES, POOL, SHRINK, Spot, other, spots
from fulldiff.cases.model import DTYPES, Adapter, AdapterFile, Alpha, Case, LoadCase, Model, Shape
from fulldiff.cases.strategies import divisors

MODELS = ("sdxl", "sdxl", "sd15", "flux")
MAX_LAYERS, MAX_FILES, MAX_MODULES, MAX_RANK = 6, 8, 6, 3
FILE_COUNTS = (1, 2, 2, 3, 3, 4, 5, 6, 7, MAX_FILES)
STRENGTHS = (1.0, 1.0, 0.5, -0.5, 0.0, 2.0)
REJECTIONS = ("12-tensors", "12-tensors", "12-tensors", "half", "never")
KINDS = ("lora", "lora", "lora", "lora", "lokr", "loha", "diff", "glora", "set_weight")
# Modules that no model has, three tensors each: 12 is the limit of the commonest rejection policy.
NONSENSE_COUNTS = (0, 0, 0, 0, 1, 4, 4, 5)
SOME_SHAPE: Shape = (4, 4)
Modules = dict[str, Adapter]

_sometimes = sampled_from((False, False, False, True))
_rarely = sampled_from((*[False] * 19, True))


def load_cases() -> SearchStrategy[Case]:
    """Load cases on small models of several families."""
    return _cases()


@composite
def _cases(draw: DrawFn) -> Case:
    name = draw(sampled_from(MODELS))
    chosen = st.lists(sampled_from(POOL[name]), min_size=1, max_size=MAX_LAYERS, unique=True)
    model = Model(name, draw(sampled_from(("f32", "bf16", "f16"))), tuple(draw(chosen)), SHRINK[name])
    files: list[AdapterFile] = []
    for _ in range(draw(sampled_from(FILE_COUNTS))):
        again = bool(files) and draw(_sometimes)
        file = draw(sampled_from(files)) if again else AdapterFile(spelling="as named", modules=draw(_modules(model)))
        if not again or draw(st.booleans()):
            text = draw(st.none() | sampled_from(STRENGTHS))
            file = replace(file, strength=draw(sampled_from(STRENGTHS)), text_strength=text)
        files.append(file)
    return Case(LoadCase(model, tuple(files), draw(sampled_from(REJECTIONS))), draw(integers(0, 2**32 - 1)))


@composite
def _modules(draw: DrawFn, model: Model) -> Modules:
    """The modules of one file, in any order."""
    targets = _by_target(model)
    made: Modules = {}
    for _ in range(draw(integers(0, MAX_MODULES))):
        names = draw(sampled_from(targets))
        spot = draw(sampled_from(names))
        made[spot.name] = draw(_adapters(spot.shape))
        if draw(_sometimes):
            alias = draw(sampled_from(names))
            made[alias.name] = draw(_adapters(alias.shape))
    if draw(_sometimes):
        foreign = draw(st.lists(sampled_from(_foreign(model)), min_size=1, max_size=MAX_MODULES))
        made |= {spot.name: draw(_adapters(spot.shape)) for spot in foreign if spot.name not in made}
    made |= draw(_nonsense())
    order = draw(st.permutations(list(made))) if draw(_sometimes) else list(made)
    return {name: made[name] for name in order}


@cache
def _by_target(model: Model) -> list[list[Spot]]:
    """The model's candidate names, those of one target together."""
    groups: dict[object, list[Spot]] = {}
    for spot in spots(model):
        groups.setdefault(spot.target, []).append(spot)
    return list(groups.values())


@cache
def _foreign(model: Model) -> list[Spot]:
    """Another model's names, with this one's shape where it has the name too."""
    own = {spot.name: spot for spot in spots(model)}
    return [own.get(spot.name, spot) for spot in spots(other(model))]


@composite
def _nonsense(draw: DrawFn) -> Modules:
    """Modules of no model, and perhaps one tensor more or less."""
    count = draw(sampled_from(NONSENSE_COUNTS))
    lora = factors.lora(4, 4, 1, alpha=Alpha("0d", 1.0))
    made = {f"lora_unet_nonsense_{at}": lora for at in range(count)}
    if count and draw(_sometimes):
        made["lora_te_nonsense"] = Adapter("lora", {"lora_down.weight": (1, 4)})
    return made


# Adapters


@composite
def _adapters(draw: DrawFn, shape: Shape) -> Adapter:
    """An adapter for a weight of this shape, its own spelling, perhaps an orphan or of two kinds at once."""
    shape = shape or SOME_SHAPE
    kind = draw(sampled_from(KINDS)) if len(shape) > 1 else draw(sampled_from(("diff", "w_norm", "w_norm")))
    adapter = draw(_kinds(kind, shape))
    # Only the first spelling has a mid.
    spelling = "lycoris" if "lora_mid.weight" in adapter.factors else draw(sampled_from(tuple(LORA_SUFFIXES)))
    if len(shape) > 1 and draw(_rarely):
        second = draw(_kinds(draw(sampled_from(KINDS)), shape))
        adapter = replace(adapter, factors={**adapter.factors, **second.factors})
    if kind == "lora" and spelling != "peft" and draw(_rarely):
        up, down = LORA_SUFFIXES["peft"]
        twice = {up[1:]: adapter.factors["lora_up.weight"], down[1:]: adapter.factors["lora_down.weight"]}
        adapter = replace(adapter, factors={**adapter.factors, **twice})
    alpha = draw(sampled_from((Alpha(), Alpha("0d", 2.0), Alpha("1", 0.5, "bf16"), Alpha("0d", 4.0, "i64"))))
    if draw(_rarely):
        adapter, alpha = draw(_orphans(adapter, alpha))
    return replace(adapter, alpha=alpha, spelling=spelling, dtype=draw(sampled_from(DTYPES[1:])))


@composite
def _orphans(draw: DrawFn, adapter: Adapter, alpha: Alpha) -> tuple[Adapter, Alpha]:
    """A module of which something is missing: mostly what does no harm, at times what is an error."""
    names = list(adapter.factors)
    kept = draw(sampled_from(([], [], names[1:], names[1:], names[:1])))
    if not kept:
        return replace(adapter, factors={}), Alpha("0d", 1.0)
    return replace(adapter, factors={name: adapter.factors[name] for name in kept}), alpha


@composite
def _kinds(draw: DrawFn, kind: str, shape: Shape) -> Adapter:
    """An adapter of one kind in any of its forms."""
    if kind in ("w_norm", "set_weight", "diff"):
        both = draw(st.booleans())
        bias = {"w_norm": "b_norm", "diff": "diff_b"}.get(kind)
        return Adapter(kind, {kind: shape} | ({bias: shape[:1]} if bias and both else {}))
    out, inp, *kernel = shape
    rank = draw(integers(1, MAX_RANK))
    if kind == "glora":
        return Adapter(kind, {f"{name}.weight": SOME_SHAPE for name in ("a1", "a2", "b1", "b2")})
    adapter = draw(_low_rank(kind, out, inp, tuple(kernel), rank))
    if draw(_rarely):
        adapter = factors.with_bias(adapter, out)
    if draw(_rarely):
        adapter = factors.dora(adapter, (out, 1, *(1,) * len(kernel)))
    return adapter


@composite
def _low_rank(draw: DrawFn, kind: str, out: int, inp: int, kernel: Shape, rank: int) -> Adapter:
    core = bool(kernel) and draw(_sometimes)
    if kind == "lora":
        return factors.lora(out, inp, rank, kernel, mid=core)
    if kind == "loha":
        return factors.loha(out, inp, rank, kernel, tucker=core)
    up, uq = draw(sampled_from(divisors(out, out))), draw(sampled_from(divisors(inp, inp)))
    w1_rank, w2_rank = (rank if draw(_sometimes) else 0 for _ in range(2))
    return factors.lokr(
        (up, uq), (out // up, inp // uq), kernel, w1_rank=w1_rank, w2_rank=rank if core else w2_rank, tucker=core
    )
