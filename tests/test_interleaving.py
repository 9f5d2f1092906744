"""The order in which ways are timed: drift falls on all alike."""

from __future__ import annotations

import pytest

from fulldiff.harness.bench.interleaving import interleave
from fulldiff.harness.bench.worker import sampled


def test_drift_cancels_in_an_abba_block() -> None:
    clock = [0.5]

    class Drifting:
        @staticmethod
        def seconds(call: object) -> float:
            clock[0] *= 1.01
            return clock[0]

    samples = sampled({"a": lambda: None, "b": lambda: None}, 0.0, Drifting)  # type: ignore[arg-type]
    for a, b in zip(samples["a"], samples["b"], strict=True):
        assert a / b == pytest.approx(1.0, abs=1e-3)


def test_halves_of_blocks_go_to_and_fro() -> None:
    called: list[str] = []

    def sample(way: str) -> float:
        called.append(way)
        return float(len(called))

    samples = interleave(("a", "b"), sample, 3, 40, 0.0, halves=True)
    assert "".join(called) == "abbaab"
    assert samples == {"a": [1, 4, 5], "b": [2, 3, 6]}
