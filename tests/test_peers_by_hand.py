"""One case by hand for each kind of fault that reports/peers.md accuses a peer of, computed by the peer itself.

The numbers are worked out on paper; the peer's output must be the wrong ones, to the bit. A test that
fails says that the peer is right now: then the finding goes. PEFT 0.21.2, LyCORIS 4.1.3, diffusers 0.42.1.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fault_pairs import EYE, Setting, conv, f64, linear, lokr, lora, other
from torch import Tensor

from fulldiff.harness.realise import module_for
from fulldiff.harness.subjects.base import Adapter
from fulldiff.harness.subjects.names import PEERS
from fulldiff.harness.subjects.registry import SubjectError, subject
from fulldiff.reference.faults import FAULTS
from fulldiff.reference.truth import POLICIES, Truth

REPORT = (Path(__file__).parents[1] / "reports" / "peers.md").read_text(encoding="utf-8")
PEFT = "peft peft-merged peft-file peft-unloaded"
CIRCULAR = conv(1, 1, 3, padding=1, padding_mode="circular")
FOUR = [[[1, 2, 3, 4]]]
DECOMPOSED = other("lora", 2.0, up=[[2], [3]], down=[[1, 1]], alpha=1, dora_scale=[[5], [10]])


class Hand(NamedTuple):
    """A setting, the peers (separated by spaces) that are wrong on it, both outputs flattened, and the peers' rule."""

    peers: str
    setting: Setting
    right: list[float]
    wrong: list[float]
    policy: str = "default"


# One input 3 long, kernel (1, 1) spread over 2: 1 + 4; next to each other: 1 + 2 and 2 + 4.
UNDILATED = Hand(
    "peft peft-file lycoris-bypass diffusers",
    Setting(conv(1, 1, 2, dilation=2), (lora(up=[[[1]]], down=[[[1, 1]]], alpha=1),), x=[[[1, 2, 4]]]),
    [5], [3, 6],
)  # fmt: skip

HANDS = {
    # w1 ⊗ w2 has the kernels (1, 2), (3, 4), (2, 4), (6, 8), and x picks 1, 4, 2 · 2 and 3 · 8 of them: 33. Without
    # the kernel's axis on w1 they are (1, 2), (2, 4), (3, 4), (6, 8): 1 + 4 + 2 · 3 + 3 · 8.
    "kron-not-unsqueezed": Hand(
        PEFT,
        Setting(
            conv(1, 4, 2), (lokr(w1=[[1, 2]], w2=[[[1, 2], [3, 4]]]),), x=[[[1, 0], [0, 1], [2, 0], [0, 3]]]
        ),
        [33], [35],
    ),
    # The neighbours of 1 and 4 are each other, in a ring; with zeros 1 + 2 and 3 + 4 are left.
    "delta-padding-mode-zeros": Hand(
        "peft peft-file lycoris lycoris-bypass",
        Setting(CIRCULAR, (lokr(w1=[[1]], w2=[[[1, 1, 1]]]),), x=FOUR),
        [7, 6, 9, 8], [3, 6, 9, 7],
    ),
    # 2 (x + 3) at x = 0 and 1, on a layer without a bias.
    "bias-delta-needs-bias": Hand(
        "lycoris-file", linear(1, 1, other("diff", 2.0, diff=[[1]], diff_b=[3]), x=[[0], [1]]), [6, 8], [0, 2]
    ),
    "lora-dilation-ignored": UNDILATED,
    "delta-dilation-ignored": UNDILATED,
    # Channel 1 of group 1 is 1, channel 2 is 10: the rows (1, 2) and (5, 10) of w1's first row times w2 give 21 and
    # 105; of group 2 (100, 1000): (3, 4), (15, 20) give 4300 and 21500. The bypass splits w2's rows between the
    # groups: 1 + 2 · 100, 5 (10 + 2 · 1000), 3 + 4 · 100, 5 (3 · 10 + 4 · 1000).
    "kron-groups-in-w2": Hand(
        "lycoris-bypass",
        Setting(
            conv(4, 4, 1, groups=2),
            (lokr(w1=[[1, 2], [3, 4]], w2=[[[1]], [[5]]]),),
            x=[[[1], [10], [100], [1000]]],
        ),
        [21, 105, 4300, 21500], [201, 10050, 403, 20150],
    ),
    # alpha / rank = 4 / 2: twice ((1, 2, 3), (4, 5, 6)), read column by column; merged four times.
    "scale-twice-but-lora": Hand(
        "lycoris-merge",
        linear(2, 3, lokr(w1=[[1]], w2_a=EYE, w2_b=[[1, 2, 3], [4, 5, 6]], alpha=4)),
        [2, 8, 4, 10, 6, 12], [4, 16, 8, 20, 12, 24],
    ),
    # 0.7 in f32 is 0.699999988079071 (11744051 · 2⁻²⁴), times 16.
    "scale-in-f32": Hand(
        PEFT,
        linear(1, 1, other("loha", 0.7, hada_w1_a=[[2]], hada_w1_b=[[2]], hada_w2_a=[[2]], hada_w2_b=[[2]])),
        [11.2], [11744051 / 2**20],
    ),
    # w2 = aᵀ · core · b with b and the core identities: aᵀ = ((1, 3), (2, 4)), read with powers of ten; a itself.
    "tucker-a-not-transposed": Hand(
        "lycoris-functional",
        Setting(
            conv(2, 2, 1), (lokr(w1=[[1]], t2=[[[1], [0]], [[0], [1]]], w2_a=[[1, 2], [3, 4]], w2_b=EYE),)
        ),
        [31, 42], [21, 43],
    ),
    # As above with base (1, 0, 0): left neighbours 4, 1, 2, 3 more. With zeros for both, the first has none.
    "padding-mode-zeros": Hand(
        "lycoris-file",
        Setting(CIRCULAR, (other("diff", diff=[[[1, 1, 1]]]),), x=FOUR, weight=[[[1, 0, 0]]]),
        [11, 7, 11, 11], [3, 7, 11, 10],
    ),
    # (1, 2) + (3, 4); the full module that comes last stands alone.
    "last-adapter-only": Hand(
        "lycoris-file",
        linear(1, 2, lora(up=[[1]], down=[[1, 2]], alpha=1), other("diff", diff=[[3, 4]])),
        [4, 6], [3, 4],
    ),
    # V = ((3, 4), (4, 3)) of norm 5, magnitudes 5 and 10: W' = ((3, 4), (8, 6)). At strength 2 W + 2 (W' − W) =
    # ((5, 6), (15, 12)), read by columns; with the strength on the magnitude alone V times 1 + 2 (m / ‖V‖ − 1), which
    # is 1 and 3: ((3, 4), (12, 9)).
    "dora-strength-on-magnitude": Hand(
        "lycoris-file", linear(2, 2, DECOMPOSED, weight=[[1, 2], [1, 0]]), [5, 15, 6, 12], [3, 12, 4, 9]
    ),
    # V as above is not scaled to 5 and 10 at all.
    "dora-magnitude-ignored": Hand(
        "diffusers",
        linear(2, 2, other("lora", up=[[2], [3]], down=[[1, 1]], alpha=1, dora_scale=[5, 10]), weight=[[1, 2], [1, 0]]),
        [3, 8, 4, 6], [3, 4, 4, 3],
    ),
    # V = (3, 4) in one column of norm 5, times 10: (6, 8). With a norm per row, 3 and 4, both are 10.
    "dora-wrong-axis": Hand(
        "lycoris-file",
        linear(2, 1, other("lora", up=[[3], [4]], down=[[1]], alpha=1, dora_scale=[[10]])),
        [6, 8], [10, 10],
    ),
    # C = W + ((3, 4), (4, 3)) = ((4, 6), (5, 3)), C + ΔW = ((6, 8), (8, 6)). By PEFT's rule m / ‖V‖, 1 and 2, scales
    # that: ((6, 8), (16, 12)), by columns; fused, its own norms are taken, 10 and 10: ((3, 4), (8, 6)).
    "dora-of-current": Hand(
        "diffusers-fused",
        linear(
            2, 2,
            lokr(w1=[[1]], w2=[[3, 4], [4, 3]]),
            other("lora", up=[[2], [3]], down=[[1, 1]], alpha=1, dora_scale=[[5], [10]]),
            weight=[[1, 2], [1, 0]],
        ),
        [6, 16, 8, 12], [3, 8, 4, 6], "diffusers",
    ),
    # 5 + 2 · 3; the LoKr is not there.
    "lokr-ignored": Hand(
        "diffusers diffusers-fused",
        Setting(conv(1, 1, 1), (lokr(w1_a=[[1]], w1_b=[[1]], w2_a=[[2]], w2_b=[[3]]),), weight=[[[5]]]),
        [11], [5],
    ),
    # ((1, 1), (2, 2)) + ((1, 2), (3, 4)), by columns; the LoKr, loaded second, is not there.
    "first-kind-only": Hand(
        "diffusers",
        linear(2, 2, lora(up=[[1], [2]], down=[[1, 1]]), lokr(w1_a=[[1]], w1_b=[[1]], w2=[[1, 2], [3, 4]])),
        [2, 5, 3, 6], [1, 2, 1, 2],
    ),
}  # fmt: skip


def through(peer: str, setting: Setting) -> Tensor:
    """The layer's output with the setting's adapters on it, by the peer."""
    weight = torch.zeros(setting.layer.weight_shape, dtype=torch.float64)
    module = module_for(setting.layer, weight if setting.weight is None else f64(setting.weight), None)
    adapters = [Adapter(own.kind, dict(own.tensors), own.strength) for own in setting.adapters]
    try:
        subject(peer).attach(module, adapters)
    except SubjectError as absent:
        pytest.skip(str(absent))
    with torch.no_grad():
        return module(setting.input())  # type: ignore[no-any-return]


@pytest.mark.parametrize("fault", HANDS)
def test_the_reference_and_its_fault_give_the_numbers_on_paper(fault: str) -> None:
    _, setting, right, wrong, rule = HANDS[fault]
    policy = POLICIES[rule]
    assert setting.run(Truth(policy)).flatten().tolist() == right
    assert setting.run(replace(FAULTS[fault], policy=policy)).flatten().tolist() == wrong


@pytest.mark.parametrize(
    ("peer", "fault"), [(peer, fault) for fault, hand in HANDS.items() for peer in hand.peers.split()]
)
def test_a_peer_gives_the_wrong_numbers_on_paper(peer: str, fault: str) -> None:
    assert through(peer, HANDS[fault].setting).flatten().tolist() == HANDS[fault].wrong


def accused(peer: str) -> list[list[set[str]]]:
    """What the report says a peer equals: of each finding the faults, or pairs of them, that give its numbers."""
    section = REPORT.partition(f"\n### {peer}\n")[2].partition("\n### ")[0]
    causes = re.findall(r"^\| equals: ([a-z0-9 -]+?) *\|", section, re.MULTILINE)
    return [[set(name.split(" and ")) for name in cause.split(" or ")] for cause in causes]


def test_no_peer_is_accused_of_a_kind_without_numbers_on_paper() -> None:
    found = [finding for peer in PEERS for finding in accused(peer)]
    assert len(found) >= 20
    assert [finding for finding in found if not any(names <= HANDS.keys() for names in finding)] == []
