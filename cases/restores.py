"""Cases of the suite ``restore``: adapters attached and taken off in any order, up to a hundred times."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis.strategies import DrawFn, SearchStrategy, composite, permutations, sampled_from
from msgspec.structs import replace

from fulldiff.cases.factors import lokr, lora
from fulldiff.cases.model import DTYPES, Case, Input, Layer, RestoreCase, RuntimeCase
from fulldiff.cases.strategies import runtime_cases

CYCLES = (1, 1, 1, 2, 5)


def restore_cases() -> SearchStrategy[Case]:
    """Runtime cases whose adapters come and go in a drawn order."""
    return _cases()


@composite
def _cases(draw: DrawFn) -> Case:
    case = draw(runtime_cases())
    assert isinstance(case.body, RuntimeCase)
    order = draw(orders(len(case.body.adapters)))
    return replace(case, body=RestoreCase(case.body, order, draw(sampled_from(CYCLES))))


@composite
def orders(draw: DrawFn, adapters: int) -> tuple[int, ...]:
    """Every adapter attached once and taken off once, each after it was attached."""
    events = draw(permutations([*range(1, adapters + 1)] * 2))
    seen: set[int] = set()
    order = []
    for event in events:
        order.append(-event if event in seen else event)
        seen.add(event)
    return tuple(order)


def named_restores() -> Mapping[str, Case]:
    """A hundred cycles in every dtype, and the orders that a chain of saved forwards gets wrong."""
    layer = Layer("linear", 12, 6)
    pair = (lokr((3, 2), (4, 3), strength=0.7), lora(12, 6, 2, strength=-0.4))
    found = {}
    for dtype in DTYPES:
        body = RuntimeCase(layer, pair, Input((3, 6)), dtype)
        found[f"restore-100-cycles-{dtype}"] = Case(RestoreCase(body, (1, 2, -1, -2), 100), 1)
        found[f"restore-last-first-{dtype}"] = Case(RestoreCase(body, (1, 2, -2, -1)), 2)
        found[f"restore-first-first-{dtype}"] = Case(RestoreCase(body, (2, 1, -2, -1)), 3)
        loras = RuntimeCase(layer, (lora(12, 6, 3, strength=0.7), lora(12, 6, 2, strength=-0.4)), Input((3, 6)), dtype)
        found[f"restore-loras-first-first-{dtype}"] = Case(RestoreCase(loras, (2, 1, -2, -1)), 4)
    return found
