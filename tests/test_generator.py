"""The generator of tensors: its known answers, and that its values look normal."""

from __future__ import annotations

import math

import numpy as np

from fulldiff.cases.tensors import normal, words


def test_known_words() -> None:
    known = [16656531645237921286, 9937051163054798644, 5678703376019332970, 9826538013964586609]
    assert words(1, "layer.weight", 0, 4).tolist() == known
    assert words(1, "layer.weight", 2, 2).tolist() == known[2:]


def test_known_normal_values_to_the_bit() -> None:
    known = [0.6534834026021383, 1.5630373660637817, 0.34077549919728106, -0.23445164055987905]
    assert normal(1, "x", (2, 2)).ravel().tolist() == known


def test_normal_values_follow_from_the_words() -> None:
    """The documented formula, with Python's integers."""
    by_hand = [sum((w >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 131070 for w in words(7, "y", 0, 50).tolist()]
    assert normal(7, "y", (50,)).tolist() == [value / math.sqrt(4 * (2**32 - 1) / 12) for value in by_hand]


def test_normal_values_look_normal() -> None:
    values = normal(5, "big", (400_000,))
    assert abs(values.mean()) < 0.01
    assert abs(values.var() - 1) < 0.01
    assert np.abs(values).max() < 3.5
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.01


def test_streams_differ_by_seed_and_name() -> None:
    streams = [words(seed, name, 0, 8).tobytes() for seed in (0, 1, 2**32 - 1) for name in ("x", "y")]
    assert len(set(streams)) == 6
