"""What manager and worker say to each other: one JSON object a line, on private pipes.

The worker speaks first (`Hello`). Then each `Request` gets any number of `Stage` lines (what is about to
run: where a worker dies, its last stage says in what) and one `Answer`.
"""

from __future__ import annotations

import signal
from typing import Any, Literal

import msgspec

from fulldiff.cases.model import Adapter, Case, FactorDType, Shape

PROTOCOL = 1
# The stage in which torch runs the layer without any adapter.
BARE = "bare layer"

Outcome = Literal[
    "passed", "wrong", "not finite", "refused", "unsupported", "raised",
    "crashed", "timed out", "out of memory", "absent",
]  # fmt: skip


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing promised: whether it holds, the share of its budget used, and the worst element.

    Numbers are text so that NaN and infinity survive JSON.
    """

    name: str
    holds: bool
    used: float
    index: str = ""
    got: str = ""
    want: str = ""
    error: str = ""
    budget: str = ""


class Judgement(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was observed of one subject on one case."""

    outcome: Outcome
    digest: str = ""
    claim: Claim | None = None
    used: float = 0.0
    message: str = ""
    where: str = ""
    seconds: float = 0.0


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The worker's first line. ``missing`` says what keeps its backend from running, empty if nothing does."""

    protocol: int
    versions: dict[str, str]
    device: str
    threads: int
    missing: str = ""


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """What the worker is about to do."""

    name: str


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one layer's adapters hold: tensors with NaN or infinity, alpha over rank, size, spike, bytes.

    ``spike`` is σ₁ / ‖ΔW‖ of the largest (1: the delta is a single direction); ``workspace`` the bytes a
    runtime subject promises for one call, None where it promises none.
    """

    not_finite: tuple[str, ...] = ()
    scales: tuple[float, ...] = ()
    norm: float = 0.0
    spike: float = 0.0
    workspace: int | None = None


class Diagnosis(msgspec.Struct, frozen=True, omit_defaults=True):
    """The faults that equal the subject on a case, alone or as pairs; else what of the adapter has no part in the
    output (``unread``), and what the delta looks like."""

    equals: tuple[str, ...] = ()
    partly: str = ""
    unread: str = ""
    right: bool = False

    def __str__(self) -> str:
        if self.right:
            return "right: within the budget of rounding"
        if self.equals:
            return "equals: " + " or ".join(self.equals)
        if self.unread:
            return f"unread: {self.unread}"
        return "unknown" + (f" ({self.partly})" if self.partly else "")


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to one request: a judgement or what else was asked for; a judgement alone if that failed."""

    judgement: Judgement | None = None
    bench: dict[str, Any] | None = None
    facts: Facts | None = None
    diagnosis: Diagnosis | None = None
    code: str = ""
    script: str = ""
    written: int = 0


class Judge(msgspec.Struct, frozen=True, omit_defaults=True, tag="judge"):
    """Judge ``case``; with ``tokens`` also the facts of its adapters, the workspace for so many tokens."""

    case: Case
    subject: str
    tokens: int = 0
    limit: float = 60.0


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Measure a bench case: at least ``seconds`` of samples; None: the bytes alone."""

    case: Case
    seconds: float | None
    limit: float = 600.0


class LoadCode(msgspec.Struct, frozen=True, tag="code"):
    """Only import the suite's subject, and hash the code that is then loaded."""

    subject: str
    suite: str = "runtime"
    limit: float = 600.0


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Write the adapter file ``path``, matched to ``model``, anew under the names of ``family``."""

    path: str
    model: str
    family: str
    out: str
    limit: float = 600.0


class Part(msgspec.Struct, frozen=True):
    """What an adapter of a stored layer (its weight's ``shape``) means for one layer: these ranges of its rows."""

    adapter: Adapter
    shape: Shape
    rows: tuple[tuple[int, int], ...] = ()


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """Whether two files' adapters of one layer have the same sum of deltas, but for rounding to their dtypes."""

    one: tuple[Part, ...]
    other: tuple[Part, ...]
    limit: float = 600.0


class Diagnose(msgspec.Struct, frozen=True, tag="diagnose"):
    """Why a subject is wrong on a runtime case; with ``closer`` also two faults at once, and a description."""

    case: Case
    subject: str
    closer: bool = True
    limit: float = 600.0


class Reproduce(msgspec.Struct, frozen=True, tag="reproduce"):
    """The text of a script that shows what a peer gets wrong on a case, with the peer alone; ``what`` is its title."""

    case: Case
    subject: str
    what: str
    limit: float = 120.0


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load the case's files onto weights made for it, with a loader, and merge them; the time by stage."""

    case: Case
    loader: str
    limit: float = 3600.0


class TimeLoad(msgspec.Struct, frozen=True, tag="time-load"):
    """Time ``ways`` of matching a load case's files (``end_to_end``: opening and merging them too), interleaved."""

    case: Case
    ways: tuple[str, ...]
    seconds: float
    end_to_end: bool = False
    limit: float = 3600.0


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Join the files with these weights into ``out``, under the names of ``family``; None keeps the dtypes."""

    paths: tuple[str, ...]
    weights: tuple[float, ...]
    model: str
    family: Literal["kohya", "lycoris", "diffusers", "diffusers-old", "peft", "comfyui", "cloneofsimo"]
    out: str
    dtype: FactorDType | None = None
    limit: float = 3600.0


class CheckSum(msgspec.Struct, frozen=True, tag="check-sum"):
    """Whether a joined file's LoRAs of one layer are the sum of the files', each times its adapter's strength."""

    parts: tuple[Part, ...]
    joined: tuple[Part, ...]
    limit: float = 600.0


class TimeToggle(msgspec.Struct, frozen=True, tag="time-toggle"):
    """Time ``turns`` settings of the diagonals of a joined file's layers."""

    path: str
    model: str
    turns: int
    limit: float = 600.0


class Effect(msgspec.Struct, frozen=True, tag="effect"):
    """How far a join subject's file, and the file realised from it, are from the right delta of a join case."""

    case: Case
    subject: str
    limit: float = 600.0


# Each gets one Answer within ``limit`` seconds.
Request = (
    Judge
    | Measure
    | LoadCode
    | Diagnose
    | Reproduce
    | Write
    | Compare
    | Load
    | TimeLoad
    | Join
    | CheckSum
    | TimeToggle
    | Effect
)
Message = Hello | Stage | Answer


def describe_exit(code: int) -> str:
    """An exit status in words; a negative code is a signal, as subprocess has it."""
    if code >= 0:
        return f"the worker exited with code {code}"
    name = signal.Signals(-code).name
    return f"the worker died of {name}" + (" (perhaps the OOM killer)" if name == "SIGKILL" else "")
