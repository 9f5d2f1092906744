"""What `fulldiff check` prints, and its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from fulldiff.harness.check import SPREAD, WORKSPACE_TOKENS, Checked, Report, outcomes
from fulldiff.harness.files.match import Target
from fulldiff.harness.search import FINE

FATES = ("matched", "unmatched", "skipped", "refused")
# A delta this close to a single direction, of rank above 1, is pointed out.
SPIKE = 0.95
SHOWN = 8
PLAIN: Any = {"box": None, "padding": (0, 2, 0, 0)}
RANKS = ("lora_down.weight", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")
ALPHAS = {"tensor": "in tensors", "metadata": "in the metadata", "assumed": "absent (assumed: scale 1)"}


def show(report: Report, console: Console) -> None:
    """The whole report, for a person."""
    match = report.match
    console.print(f"{match.path}: {len(report.header.tensors)} tensors on {match.base}", highlight=False, markup=False)
    for table in (_parts(report), _kinds(report)):
        console.print()
        console.print(table)
    console.print()
    for line in lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def lines(report: Report) -> list[str]:
    """Everything below the tables: what cannot be used and why, what is odd, bytes, and the verdict."""
    return [*_unused(report), *_odd(report), *_tightest(report), *_failures(report), *_bytes(report), verdict(report)]


def verdict(report: Report) -> str:
    """One line: whether the file is whole, and whether the subject is right on it."""
    file = "every tensor is accounted for and usable" if report.whole else "PARTLY USABLE: see above"
    if not report.layers:
        return f"verdict: {file}; header only, nothing was computed"
    if report.wrong:
        return (
            f"verdict: FAILED, {report.subject} is wrong on {len(report.wrong)} of {len(report.layers)} layers; {file}"
        )
    if report.untaken:
        count = len(report.untaken)
        return f"verdict: {report.subject} does not apply {count} of {len(report.layers)} layers; {file}"
    return f"verdict: {'passed' if report.whole else 'passed on what is usable'}; {file}"


def as_json(report: Report) -> dict[str, Any]:
    """All of it, for a program."""
    match, (total, largest) = report.match, report.full_diff_bytes
    return {
        "file": str(match.path),
        "model": match.base,
        "subject": report.subject,
        "whole": report.whole,
        "verdict": verdict(report).removeprefix("verdict: "),
        "tensors": {part: dict(fates) for part, fates in match.counts.items()},
        "unmatched": list(match.unmatched),
        "skipped": [{"tensor": s.tensor, "reason": s.reason} for s in match.skipped],
        "refused": [{"module": r.module, "tensors": list(r.tensors), "reason": r.reason} for r in match.refused],
        "not_finite": report.not_finite,
        "alpha": dict(match.alphas),
        "alpha_over_rank_spread": report.spread,
        "bytes": {
            "full_diff_all_layers": total,
            "full_diff_largest_layer": largest,
            "factors": report.factor_bytes,
            f"workspace_{WORKSPACE_TOKENS}_tokens": report.workspace,
        },
        "layers": [_layer(checked) for checked in report.layers],
    }


def _layer(checked: Checked) -> dict[str, Any]:
    judgement, facts = checked.judgement, checked.facts
    return {
        "layer": checked.name,
        "modules": [target.module for target in checked.targets],
        "kind": checked.kind,
        "outcome": judgement.outcome,
        "budget_used": judgement.used,
        "message": judgement.message,
        "alpha_over_rank": list(facts.scales),
        "norm": facts.norm,
        "spike": facts.spike,
    }


def _parts(report: Report) -> Table:
    made = Table("tensors of", *FATES, **PLAIN)
    for column in made.columns[1:]:
        column.justify = "right"
    for part, fates in report.match.counts.items():
        made.add_row(part, *(str(fates[fate]) if fates[fate] else "" for fate in FATES))  # type: ignore[index]
    return made


def _kinds(report: Report) -> Table:
    judged = ("outcome", "budget used") if report.layers else ()
    made = Table("kind", "modules", "family", "dtype", "rank", "alpha/rank", *judged, **PLAIN)
    for column in (1, 4, 5):
        made.columns[column].justify = "right"
    targets = {kind: [t for t in report.match.targets if _kind(t) == kind] for kind in _kinds_of(report)}
    for kind, own in targets.items():
        made.add_row(kind, str(len(own)), *_described(own), *_judged(report, own))
    return made


def _kinds_of(report: Report) -> list[str]:
    return list(dict.fromkeys(_kind(target) for target in report.match.targets))


def _kind(target: Target) -> str:
    return "dora " * ("dora_scale" in target.adapter.factors) + target.adapter.kind


def _described(targets: list[Target]) -> tuple[str, str, str]:
    adapters = [target.adapter for target in targets]
    ranks = [next((a.factors[name][0] for name in RANKS if name in a.factors), None) for a in adapters]
    return (
        _some(adapter.spelling for adapter in adapters),
        _some(adapter.dtype for adapter in adapters),
        _span([rank for rank in ranks if rank is not None]) or "full",
    )


def _judged(report: Report, targets: list[Target]) -> tuple[str, ...]:
    if not report.layers:
        return ("",)
    layers = _layers_of(report, targets)
    scales = [scale for checked in layers for scale in checked.facts.scales]
    counts = ", ".join(f"{count} {name}" for name, count in outcomes(layers).items())
    return (_span(scales), counts, _share(_worst(layers)))


def _layers_of(report: Report, targets: list[Target]) -> list[Checked]:
    own = {id(target) for target in targets}
    return [checked for checked in report.layers if any(id(target) in own for target in checked.targets)]


def _worst(layers: list[Checked]) -> Checked:
    return max(layers, key=lambda checked: (checked.judgement.outcome not in FINE, checked.judgement.used))


def _share(checked: Checked) -> str:
    used = checked.judgement.used
    return "over 9999 %" if used > 99.99 else f"{100 * used:.0f} %"


def _tightest(report: Report) -> list[str]:
    """The layer of each kind where the subject is nearest to its error budget, or farthest beyond it."""
    if not report.layers:
        return []
    groups = {kind: [t for t in report.match.targets if _kind(t) == kind] for kind in _kinds_of(report)}
    worst = {kind: _worst(_layers_of(report, own)) for kind, own in groups.items()}
    return [f"worst {kind} layer: {c.name}, {_share(c)} of its error budget" for kind, c in worst.items()]


def _unused(report: Report) -> list[str]:
    match = report.match
    found = [f"refused {r.module} ({len(r.tensors)} tensors): {r.reason}" for r in match.refused]
    found += [f"unmatched {name}: no layer of {match.base} has this name" for name in match.unmatched]
    found += [f"not finite: {name} holds NaN or infinity; its layer is not applied" for name in report.not_finite]
    reasons: dict[str, list[str]] = {}
    for skipped in match.skipped:
        reasons.setdefault(skipped.reason, []).append(skipped.tensor)
    return [*_first(found), *(f"skipped {_names(names)}: {reason}" for reason, names in reasons.items())]


def _odd(report: Report) -> list[str]:
    found = [f"alpha {ALPHAS[source]}: {count} modules" for source, count in report.match.alphas.items()]
    if report.spread > SPREAD:
        found.append(f"alpha over rank differs {report.spread:.3g}-fold among the layers: was it meant?")
    spikes = [c for c in report.layers if c.facts.spike > SPIKE and _rank(c) > 1]
    if spikes:
        worst = max(spikes, key=lambda checked: checked.facts.spike)
        found.append(
            f"spectral spike: in {len(spikes)} layers one direction has over {SPIKE:.0%} of ‖ΔW‖, "
            f"up to {worst.facts.spike:.3f} of it in {worst.name} (rank {_rank(worst)})"
        )
    remarks = Counter(c.judgement.message for c in report.layers if c.judgement.outcome == "passed")
    return [*found, *(f"{report.subject}: {text} ({count} layers)" for text, count in remarks.items() if text)]


def _failures(report: Report) -> list[str]:
    found = []
    for checked in [*report.wrong, *report.untaken]:
        claim = checked.judgement.claim
        numbers = f"{claim.name} {claim.index}: got {claim.got}, expected {claim.want}" if claim else ""
        text = checked.judgement.message or numbers
        found.append(f"{checked.judgement.outcome} {checked.name} ({checked.targets[0].module}): {text}")
    return _first(found)


def _bytes(report: Report) -> list[str]:
    total, largest = report.full_diff_bytes
    found = [f"full diff in f32: {_size(total)} with every layer alive, {_size(largest)} one layer at a time"]
    text = f"factors: {_size(report.factor_bytes)}"
    if report.workspace is not None:
        text += (
            f"; workspace of {report.subject} at {WORKSPACE_TOKENS} tokens (Linear layers): {_size(report.workspace)}"
        )
    return [*found, text]


def _rank(checked: Checked) -> int:
    factors = checked.targets[0].adapter.factors
    return next((factors[name][0] for name in RANKS if name in factors), 2)


def _first(found: list[str]) -> list[str]:
    """The first few, and how many more."""
    more = len(found) - SHOWN
    return [*found[:SHOWN], *([f"… and {more} more (--json has all)"] if more > 0 else [])]


def _names(names: list[str]) -> str:
    more = len(names) - 2
    return ", ".join(names[:2]) + (f" and {more} more" if more > 0 else "")


def _some(values: Iterable[object]) -> str:
    """The distinct values, the most frequent first."""
    return ", ".join(str(value) for value, _ in Counter(values).most_common())


def _span(values: list[Any]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} … {high:g}"


def _size(count: int) -> str:
    return f"{count:,} bytes ({count / 2**20:,.1f} MiB)"
