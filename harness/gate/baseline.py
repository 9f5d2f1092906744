"""Numbers of bytes that a person accepted: lines of baseline/accepted.jsonl, the last of each cell counting."""

from __future__ import annotations

import json
from pathlib import Path

from fulldiff.harness.gate.sides import GateError

NAME = "accepted.jsonl"


def accepted_bytes(folder: Path) -> dict[str, int]:
    """By cell, as the gate names it; raises GateError on a line that cannot be read."""
    path = folder / NAME
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        return {entry["cell"]: int(entry["peak_bytes"]) for entry in map(json.loads, lines)}
    except (ValueError, KeyError, TypeError) as error:
        raise GateError(f"{path}: {error}; each line needs cell, peak_bytes and reason") from error


def accept(folder: Path, cell: str, peak_bytes: int, reason: str) -> None:
    """Write one line."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"cell": cell, "peak_bytes": peak_bytes, "reason": reason}, ensure_ascii=False) + "\n")
