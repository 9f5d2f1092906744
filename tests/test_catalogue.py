"""The catalogue: every known bug and form has a case, every case is valid, pinned files join it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from case_checks import accepts, relative_bound

from fulldiff.cases import catalogue
from fulldiff.cases.catalogue import CATALOGUE, HEAVY, pinned
from fulldiff.cases.model import DTYPES, Kind, RuntimeCase, case_id, encode
from fulldiff.cases.scales import EXACT_LIMIT

KINDS: tuple[Kind, ...] = ("linear", "conv1d", "conv2d", "conv3d")


def test_catalogue_ids_are_unique() -> None:
    assert len({case_id(case) for case in pinned().values()}) == len(pinned())


@pytest.mark.parametrize("number", [*range(1, 11), 12, 13])
def test_every_known_bug_has_a_case(number: int) -> None:
    assert any(name.startswith(f"d{number}-") for name in CATALOGUE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", ["exact", "normal"])
def test_every_form_is_in_the_catalogue(kind: Kind, dtype: str, values: str) -> None:
    pattern = re.compile(f"form-(.*)-{kind}-{dtype}-{values}")
    forms = {found[1] for name in CATALOGUE if (found := pattern.fullmatch(name))}
    linear = {"lora", "w1full-full", "w1full-lowrank", "w1factored-full", "w1factored-lowrank"}
    linear |= {"loha", "diff", "diff-bias", "lora-bias", "lora-scale"}
    if values == "normal":
        linear |= {"dora-out", "dora-out-1d", "dora-in", "dora-lokr", "dora-loha"}
    tucker = {"lora-mid", "w1full-tucker", "w1factored-tucker", "loha-tucker"}
    assert forms == (linear if kind == "linear" else linear - {"lora"} | {"locon"} | tucker)


def test_catalogue_cases_are_valid() -> None:
    for name, case in CATALOGUE.items():
        if name not in HEAVY and isinstance(case.body, RuntimeCase):
            accepts(case)


def test_exact_catalogue_cases_fit_bf16() -> None:
    exact = [case for case in CATALOGUE.values() if isinstance(case.body, RuntimeCase) and case.body.values == "exact"]
    assert len(exact) > 100
    assert max(relative_bound(case) for case in exact) < EXACT_LIMIT


def test_heavy_names_exist() -> None:
    assert set(CATALOGUE) > HEAVY


def test_pinned_files_join_the_catalogue(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CATALOGUE["d7-rank-1"]
    (tmp_path / "pinned").mkdir()
    (tmp_path / "pinned" / "found.json").write_bytes(encode(case))
    monkeypatch.setattr(catalogue, "files", lambda package: tmp_path)
    assert pinned() == CATALOGUE | {"found": case}
    (tmp_path / "pinned" / "d7-rank-1.json").write_bytes(encode(case))
    with pytest.raises(ValueError, match="rename it"):
        pinned()
