"""Where implementations agree to differ (`reference.factors.Policy`): each peer is judged by its own rule."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from fulldiff.harness.asking import ask

ASK = """
import json, sys
from dataclasses import asdict
from fulldiff.harness.subjects.registry import SubjectError, subject
from fulldiff.reference.truth import POLICIES
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = asdict(POLICIES[subject(name).policy])
    except SubjectError:
        pass
print("\\n" + json.dumps(found))
"""
WORDS = {
    ("both_full", "one"): "1, whatever alpha says",
    ("both_full", "alpha/rank"): "alpha / declared rank",
    ("rank_from", "w1"): "w1's",
    ("rank_from", "w2"): "w2's",
    ("zero_alpha", "zero"): "no delta",
    ("zero_alpha", "one"): "scale 1",
    ("dora_after", "base"): "taken from the base weight",
    ("dora_after", "scaling"): "scales them too, by the norm of base and its own delta",
    ("dora_after", "current"): "taken from what they made of the weight",
}
COLUMNS = {
    "both_full": "scale of a LoKr of two full factors",
    "rank_from": "rank if w1's and w2's differ",
    "zero_alpha": "alpha = 0",
    "dora_after": "a DoRA behind other adapters",
}


def policies(peers: Iterable[str]) -> dict[str, dict[str, str]]:
    """Each installed peer's rules; asked in a process of its own, for subjects load torch."""
    known: dict[str, dict[str, str]] = ask(ASK, *peers)
    return known


def table(known: dict[str, dict[str, str]]) -> str:
    """The rules in words, as a markdown table."""
    rows = (
        {"implementation": peer} | {title: WORDS[rule, own[rule]] for rule, title in COLUMNS.items()}
        for peer, own in known.items()
    )
    return str(pd.DataFrame(rows).to_markdown(index=False))
