"""What the truth is computed from: an adapter's tensors, and the rules on which implementations differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


class FactorError(ValueError):
    """Factors that have no meaning; the message names the tensors and shapes at fault."""


@dataclass(frozen=True)
class Factors:
    """One adapter's float64 tensors by suffix (``lokr_w1``, …, ``alpha``), and its strength.

    ``rank`` is the rank that a config beside the file declares (PEFT), None where there is none.
    ``rows`` [start, end) are the output rows that it adapts (q of a fused qkv), None for all.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    strength: float = 1.0
    rank: int | None = None
    rows: tuple[int, int] | None = None


# What each kind's tensors may be called; whatever else is in an adapter is refused, never ignored.
NAMES: dict[str, set[str]] = {
    "lora": {"lora_up.weight", "lora_down.weight", "lora_mid.weight", "alpha", "scale", "dora_scale", "diff_b"},
    "lokr": {f"lokr_{n}" for n in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")}
    | {"alpha", "dora_scale", "diff_b"},
    "loha": {f"hada_{n}" for n in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")} | {"alpha", "dora_scale", "diff_b"},
    "diff": {"diff", "diff_b", "alpha"},
}


DoraAfter = Literal["base", "scaling", "current"]


@dataclass(frozen=True)
class Policy:
    """What implementations disagree on: how alpha becomes a scale (alpha / rank else), what a later DoRA starts from.

    both_full: scale of a LoKr whose w1 and w2 are both full: 1, or alpha over a declared rank.
    rank_from: whose rank counts when w1 and w2 are both factored and differ.
    zero_alpha: alpha 0 gives a zero delta, or scale 1.
    dora_after: a DoRA behind other adapters on its layer is taken from the base weight W, so that deltas sum in any
    order (``base``); from the weight C as it stands, (C + ΔW) · m / ‖C + ΔW‖ (``current``: ComfyUI's patches);
    or scales what stands there by the norm of the base's own, (C + ΔW) · m / ‖W + ΔW‖ (``scaling``: PEFT).
    """

    both_full: Literal["one", "alpha/rank"] = "one"
    rank_from: Literal["w1", "w2"] = "w2"
    zero_alpha: Literal["zero", "one"] = "zero"
    dora_after: DoraAfter = "base"


POLICIES: dict[str, Policy] = {
    "default": Policy(),
    "comfyui": Policy(dora_after="current"),
    "diffusers": Policy(dora_after="scaling"),
    "comfyui-bypass": Policy(rank_from="w1"),
    "invokeai": Policy(rank_from="w1"),
    "lycoris": Policy(rank_from="w1", zero_alpha="one"),
    "peft": Policy(both_full="alpha/rank", dora_after="scaling"),
}
