"""The findings of reports/peers.md once more, each in a few lines with the peer alone: no accusation without one.

A test that fails says that a newer peer is right: then the finding goes. PEFT 0.21.2, LyCORIS 4.1.3.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulldiff.cases.catalogue import CATALOGUE
from fulldiff.cases.model import Case, case_id
from fulldiff.harness.peers import matrix
from fulldiff.harness.peers import report as reporting
from fulldiff.harness.peers.confirm import Reproduction
from fulldiff.harness.peers.report import Finding
from fulldiff.harness.protocol import Diagnosis, Judgement, Outcome
from fulldiff.harness.results import Result
from fulldiff.harness.subjects.base import Adapter, Subject, Unsupported
from fulldiff.harness.subjects.names import PEERS
from fulldiff.harness.subjects.registry import SubjectError, subject


class Holder(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def peft_layer(layer: nn.Module, kind: str, **options: Any) -> Any:
    """PEFT's wrapper of the layer with random factors, or with those that are then put in."""
    peft = pytest.importorskip("peft")
    no_init = {"init_lora_weights" if kind == "LoraConfig" else "init_weights": False}
    holder = Holder(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(getattr(peft, kind)(target_modules=["layer"], **no_init, **options), holder, "a")
    return holder.eval().requires_grad_(False).layer


def lycoris_module(name: str, layer: nn.Module, *options: Any, **more: Any) -> Any:
    """LyCORIS's module beside the layer with random factors."""
    modules = pytest.importorskip("lycoris.modules")
    torch.manual_seed(0)
    made = getattr(modules, name)("x", layer, 1.0, *options, **more)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.eval().requires_grad_(False)


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_peft_mixes_up_the_axes_of_a_conv1d_kernel() -> None:
    layer = peft_layer(nn.Conv1d(2, 4, 2), "LoKrConfig", r=8, alpha=8, decompose_factor=2)
    w1, w2 = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    layer.lokr_w1["a"].data, layer.lokr_w2["a"].data = w1, w2
    assert layer.get_delta_weight("a").flatten(1)[1:3].tolist() == [[3, 6, 4, 8], [3, 4, 6, 8]]
    right = torch.kron(w1.unsqueeze(2), w2)
    assert right.flatten(1)[1:3].tolist() == [[3, 4, 6, 8], [3, 6, 4, 8]]


@pytest.mark.parametrize("kind", ["LoraConfig", "LoKrConfig", "LoHaConfig"])
def test_peft_pads_with_zeros_where_the_layer_does_not(kind: str) -> None:
    layer = peft_layer(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), kind, r=2)
    x = seeded(1, 2, 5, 5)
    unmerged = layer(x)
    layer.merge()
    merged = layer(x)
    torch.testing.assert_close(unmerged[..., 1:-1, 1:-1], merged[..., 1:-1, 1:-1])
    assert (unmerged - merged).abs().max() > 1e-3


def test_peft_does_not_merge_a_lora_on_a_pointwise_conv3d() -> None:
    layer = peft_layer(nn.Conv3d(4, 3, 1), "LoraConfig", r=2)
    assert layer(seeded(1, 4, 2, 2, 2)).isfinite().all()
    with pytest.raises(RuntimeError, match="size"):
        layer.merge()


@pytest.mark.parametrize("name", ["LokrModule", "LohaModule"])
def test_lycoris_merges_with_the_scale_twice(name: str) -> None:
    base = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(base.weight)
    made = lycoris_module(name, base, 2, 1.0)
    x = seeded(3, 64)
    forward = made(x)
    made.merge_to()
    torch.testing.assert_close(base(x), forward / 2, rtol=1e-3, atol=1e-3)


def test_lycoris_bypass_is_wrong_with_groups() -> None:
    base = nn.Conv2d(8, 8, 3, padding=1, groups=2)
    options: dict[str, Any] = {"lora_dim": 100, "alpha": 1.0, "full_matrix": True}
    rebuilt = lycoris_module("LokrModule", base, **options)
    bypass = lycoris_module("LokrModule", base, bypass_mode=True, **options)
    x = seeded(2, 8, 5, 5)
    assert rebuilt(x).shape == bypass(x).shape
    assert (rebuilt(x) - bypass(x)).abs().max() > 1


def test_lycoris_bypass_of_a_lora_ignores_dilation() -> None:
    made = lycoris_module("LoConModule", nn.Conv2d(8, 8, 3, dilation=2), 2, 1.0, bypass_mode=True)
    with pytest.raises(RuntimeError, match="size of tensor"):
        made(seeded(1, 8, 9, 9))


def test_lycoris_bypass_of_a_lokr_raises_on_an_empty_batch() -> None:
    made = lycoris_module("LokrModule", nn.Linear(8, 8), 2, 1.0, bypass_mode=True)
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        made(seeded(0, 8))


def test_lycoris_pads_with_zeros_where_the_layer_does_not() -> None:
    base = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    made = lycoris_module("LoConModule", base, 2, 2.0)
    x = seeded(1, 4, 5, 5)
    forward = made(x)
    made.merge_to()
    torch.testing.assert_close(forward[..., 1:-1, 1:-1], base(x)[..., 1:-1, 1:-1], rtol=1e-4, atol=1e-4)
    assert (forward - base(x)).abs().max() > 1e-2


def test_lycoris_raises_on_a_tucker_core_of_rank_1_beside_a_flat_kernel() -> None:
    made = lycoris_module("LokrModule", nn.Conv2d(64, 64, (3, 1)), 1, 1.0, use_tucker=True)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        made(seeded(1, 64, 6, 6))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_a_subject_or_says_how_to_install_it(name: str) -> None:
    try:
        made = subject(name)
    except SubjectError as absent:
        assert "pip install" in str(absent)
        return
    assert isinstance(made, Subject)
    with pytest.raises(Unsupported, match="fused"):
        tensors = {"lora_up.weight": seeded(2, 1), "lora_down.weight": seeded(1, 3)}
        made.attach(nn.Linear(3, 4), [Adapter("lora", tensors, rows=(2, 4))])


def result(case: Case, outcome: Outcome) -> Result:
    return Result(case_id(case), "peft", "cpu", case, Judgement(outcome))


def test_the_matrix_counts_results_by_kind_and_layer() -> None:
    linear, conv = CATALOGUE["d1-low-rank"], CATALOGUE["form-w1full-full-conv1d-f64-exact"]
    rows = matrix.table({"peft": [result(linear, "passed"), result(conv, "wrong"), result(conv, "unsupported")]})
    cells = [cell.strip() for cell in rows.splitlines()[-1].split("|")[1:-1]]
    assert cells == ["peft", "lokr", "1 right", "**1 wrong, 1 left out**", "–", "–"]


def test_results_are_grouped_by_the_fault_that_explains_the_most() -> None:
    one, two = (result(CATALOGUE[name], "wrong") for name in ("d1-low-rank", "d7-rank-1"))
    found = reporting.explained(
        "peft", [(one, Diagnosis(("a", "b"))), (two, Diagnosis(("b",)))], lambda one: Diagnosis()
    )
    assert [(finding.cause, len(finding.results)) for finding in found] == [("equals: b", 2)]


def test_of_two_faults_that_explain_the_same_the_narrower_comes_first() -> None:
    one = (result(CATALOGUE["d7-rank-1"], "wrong"), Diagnosis(("wide", "narrow")))
    (found,) = reporting.explained("peft", [one], lambda one: Diagnosis())
    assert found.cause == "equals: narrow or wide"


def test_of_the_pairs_that_explain_the_same_the_one_of_known_faults_is_named() -> None:
    single = (result(CATALOGUE["d7-rank-1"], "wrong"), Diagnosis(("a",)))
    pair = (result(CATALOGUE["d10-lora-and-diff"], "wrong"), Diagnosis())
    pairs = Diagnosis(("b and c", "a and c", "d and a"))
    found = reporting.explained("peft", [single, pair], lambda one: pairs)
    assert [finding.cause for finding in found] == ["equals: a", "equals: a and c or d and a"]


def test_a_reproduction_is_named_after_the_cause() -> None:
    causes = [
        "equals: kron-not-unsqueezed or kron-swapped",
        "raised at lokr.py:20: RuntimeError",
        "unknown (x)",
        "unread: lokr_w1, alpha without effect, other numbers each time",
        "unread: other numbers each time",
        "unknown (1.096 times the right delta, only output rows 1, 2)",
        "unknown (the right numbers in shape (2, 1, 1) for (1,))",
        "unknown",
    ]
    assert [reporting.slug(cause) for cause in causes] == [
        "kron-not-unsqueezed",
        "raised-at-lokr-py-20",
        "unknown-x",
        "unread-lokr-w1-alpha",
        "unread-other-numbers-each-time",
        "unknown-times-the-right-delta",
        "unknown-the-right-numbers-in-shape-for",
        "unknown",
    ]


def test_what_is_not_confirmed_is_not_in_the_table_of_findings() -> None:
    one, two = (result(CATALOGUE[name], "wrong") for name in ("d1-low-rank", "d7-rank-1"))
    held, failed = Reproduction("print(1)\n", True, "differs"), Reproduction("print(2)\n", False, "right")
    found = [Finding("peft", "equals: a", (one,), held, "peft-a"), Finding("peft", "equals: b", (two,), failed)]
    text = reporting.section("peft", found)
    table, _, rest = text.partition("Not confirmed, so not counted:")
    assert "equals: a" in table and "(reproductions.md#peft-a)" in table
    assert "equals: b" not in table
    assert f"equals: b, `{two.id}`: right" in rest
    page = reporting.reproductions({"peft": found})
    assert "## peft-a\n\n```python\nprint(1)\n```" in page
    assert "print(2)" not in page


def test_the_plot_is_written(tmp_path: Path) -> None:
    matrix.plot({"peft": [result(CATALOGUE["d1-low-rank"], "wrong")]}, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes()[1:4] == b"PNG"
