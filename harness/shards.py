"""``--shard i/n``: a part of a plan, so that n machines do each of it once."""

from __future__ import annotations

from fulldiff.cases.model import CaseError

# (i, n), 1 ≤ i ≤ n.
Shard = tuple[int, int]
WHOLE: Shard = (1, 1)


def shard_of(text: str) -> Shard:
    """``2/4`` as (2, 4); raises CaseError."""
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise CaseError(f"shard {text!r}: write i/n with 1 ≤ i ≤ n, such as 2/4")
    return int(first), int(second)


def within(shard: Shard, at: int) -> bool:
    """Whether the ``at``-th of a list (from 0) is the shard's: every n-th, from the i-th on."""
    return at % shard[1] == shard[0] - 1


def has(shard: Shard, case: str) -> bool:
    """Whether the case of that id is the shard's, wherever it comes from: its id ends in a hash."""
    return within(shard, int(case.rsplit("/", 1)[1], 16))


def suffix(shard: Shard) -> str:
    """What a shard's files have after their name: ``-2of4``; nothing for the whole."""
    return "" if shard == WHOLE else f"-{shard[0]}of{shard[1]}"
