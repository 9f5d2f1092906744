"""What is expected of each peer: pinned cases that exist, and that the installed peer still gets wrong so."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest

from fulldiff.cases.catalogue import pinned
from fulldiff.cases.model import case_id
from fulldiff.harness.conform import Expectation, expectations
from fulldiff.harness.judge import judge
from fulldiff.harness.protocol import Judgement
from fulldiff.harness.results import Result
from fulldiff.harness.subjects.names import OURS, PEERS
from fulldiff.harness.subjects.registry import SubjectError, subject

FOLDER = files("fulldiff.cases") / "expectations"
ENTRIES = [(peer, entry) for peer in PEERS for entry in expectations(peer)]
# As it is written in a reason → its distribution.
PACKAGES = {"PEFT": "peft", "LyCORIS": "lycoris-lora", "diffusers": "diffusers"}


def test_each_file_is_a_subject_s() -> None:
    names = {file.name.removesuffix(".toml") for file in FOLDER.iterdir()}
    assert names
    assert names <= (OURS | PEERS).keys()


@pytest.mark.parametrize(("peer", "entry"), ENTRIES)
def test_an_entry_names_version_case_and_reproduction(peer: str, entry: Expectation) -> None:
    assert re.match(rf"({'|'.join(PACKAGES)}) \d+\.\d+", entry.reason)
    assert re.fullmatch(rf"reports/reproductions\.md#{peer}-[a-z0-9-]+", entry.link)
    case = pinned()[entry.pinned]
    assert entry.matches(Result(case_id(case), peer, "cpu", case, Judgement("wrong"), entry.pinned))


def test_every_link_leads_to_a_reproduction() -> None:
    page = (Path(__file__).parent.parent / "reports" / "reproductions.md").read_text(encoding="utf-8")
    sections = {f"reports/reproductions.md#{name}" for name in re.findall("^## (.+)$", page, re.MULTILINE)}
    assert {entry.link for _, entry in ENTRIES} <= sections


@pytest.mark.parametrize(("peer", "entry"), ENTRIES)
def test_the_pinned_case_ends_as_expected_in_the_version_named(peer: str, entry: Expectation) -> None:
    try:
        made = subject(peer)
    except SubjectError as absent:
        pytest.skip(str(absent))
    package, number = entry.reason.split(":")[0].split()
    if version(PACKAGES[package]) != number:
        pytest.skip(f"{package} {version(PACKAGES[package])}, not {number}: `fulldiff conform` tells what has changed")
    case = pinned()[entry.pinned]
    try:
        judgement = judge(case, made, lambda stage: None)
    except Exception as error:
        judgement = Judgement("raised", message=f"{type(error).__name__}: {error}")
    assert entry.excuses(Result(case_id(case), peer, "cpu", case, judgement, entry.pinned)), judgement
