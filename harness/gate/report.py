"""What `fulldiff gate` says: a table for a terminal or a pull request, JUnit, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from fulldiff.harness.gate.run import Report

# A comment names so many things that became worse.
SHOWN = 20
WORDS = {0: "passed", 1: "FAILED: conformance", 3: "FAILED: regression", 4: "undecided: unfit machine or inconclusive"}


def markdown(report: Report) -> str:
    """A comment for a pull request."""
    parts = [f"### fulldiff gate: {WORDS[report.exit_code]}\n"]
    if report.estimates:
        parts.append(str(pd.DataFrame(_times(report)).to_markdown(index=False, disable_numparse=True)) + "\n")
    parts += [f"- {line}" for line in [*problems(report), *notes(report)]]
    return "\n".join([*parts, ""])


def _times(report: Report) -> Iterator[dict[str, str]]:
    for name, each in report.estimates.items():
        base, head = report.peak_bytes[name]
        low, high = math.exp(each.low), math.exp(each.high)
        yield {
            "cell": name,
            "verdict": report.verdicts[name],
            "time, head over base": f"{math.exp(each.middle):.3f} [{low:.3f}, {high:.3f}]",
            "margin": f"±{each.delta:.1%}",
            "A/A": f"±{each.half_aa:.1%}",
            "blocks": str(len(report.blocks[name])),
            "peak bytes, base": f"{base:,}",
            "change": f"{head - base:+,}" if head != base else "none",
        }


def problems(report: Report) -> list[str]:
    """Each thing that fails or needs a person, and what to do."""
    found = [f"conformance: {name}: {text}" for name, text in list(report.worse.items())[:SHOWN]]
    if len(report.worse) > SHOWN:
        found.append(f"conformance: {len(report.worse) - SHOWN} more; the JUnit and JSON files name all")
    for name, (base, head) in report.changed_bytes.items():
        found.append(
            f"memory: {name}: {base:,} bytes before, {head:,} now ({head - base:+,}); if it is meant: "
            f'`fulldiff baseline accept "{name}" {head} --reason …`'
        )
    if "UNFIT" in report.verdicts.values():
        found.append("unfit: the same code differs from itself too much here; use a quieter machine, or more blocks")
    return found


def notes(report: Report) -> list[str]:
    """What was compared beside the times, and what there was nothing to compare of."""
    found = [f"not timed: {name}: {text}" for name, text in report.left_out.items()]
    if report.same_code:
        found.append("base and head load the same code, but for what is installed: nothing else can differ")
    return [*found, f"{report.cases} cases compared, {len(report.worse)} things worse"]


def as_json(report: Report) -> dict[str, Any]:
    """All of it, for a program."""
    return {
        "exit_code": report.exit_code,
        "cells": {
            name: {
                "verdict": report.verdicts[name],
                "log_ratio": [each.middle, each.low, each.high],
                "aa_half_width": each.half_aa,
                "delta": each.delta,
                "p": each.p,
                "blocks": report.blocks[name],
            }
            for name, each in report.estimates.items()
        },
        "peak_bytes": report.peak_bytes,
        "changed_bytes": report.changed_bytes,
        "worse": report.worse,
        "left_out": report.left_out,
        "cases": report.cases,
    }


def junit(report: Report) -> str:
    """One test case per cell and per conformance change."""
    suite = ElementTree.Element("testsuite", name="fulldiff gate")
    failures = {name: f"time: {verdict}" for name, verdict in report.verdicts.items() if verdict == "REGRESSED"}
    failures |= {name: f"memory: {base} to {head} bytes" for name, (base, head) in report.changed_bytes.items()}
    failures |= report.worse
    skipped = {name for name, verdict in report.verdicts.items() if verdict in ("UNFIT", "INCONCLUSIVE")}
    for name in [*report.peak_bytes, *report.worse]:
        case = ElementTree.SubElement(suite, "testcase", name=name, classname="gate")
        if name in failures:
            ElementTree.SubElement(case, "failure", message=failures[name])
        elif name in skipped:
            ElementTree.SubElement(case, "skipped", message=report.verdicts[name])
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(failures)))
    return ElementTree.tostring(suite, encoding="unicode")


def text_of(report: Report, form: str) -> str:
    """The report as ``markdown`` or ``json``."""
    return markdown(report) if form == "markdown" else json.dumps(as_json(report), indent=1)
