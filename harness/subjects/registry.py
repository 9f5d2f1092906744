"""Subjects by name: ours, ``fault:NAME`` for a known wrong way, ``package.module:Name`` for yours in Python,
``program:COMMAND`` for yours in any language."""

from __future__ import annotations

from typing import Any

from fulldiff.harness.subjects.base import Subject
from fulldiff.harness.subjects.names import FAULT, PROGRAM
from fulldiff.harness.suites import SUITES, Suite, imported
from fulldiff.reference.factors import POLICIES


class SubjectError(ValueError):
    """No such subject; the message says what was looked for and where."""


def subject(name: str) -> Subject:
    """The subject of the suite ``runtime`` called ``name``; raises SubjectError."""
    made = subject_of("runtime", name)
    assert isinstance(made, Subject)
    return made


def subject_of(suite: str, name: str) -> Any:
    """The subject called ``name``, an instance of the suite's base class.

    Raises:
        SubjectError: there is none, it is no subject of this suite, or it has a policy that nobody knows.
    """
    known = SUITES[suite]
    if name.startswith(FAULT):
        return imported(known.fault)(name.removeprefix(FAULT))
    made = _program(name, known.base) if name.startswith(PROGRAM) else _python(name, known)
    if isinstance(made, Subject) and made.policy not in POLICIES:
        raise SubjectError(f"subject {name!r}: its policy {made.policy!r} is unknown: use one of {', '.join(POLICIES)}")
    return made


def _python(name: str, known: Suite) -> Any:
    target = known.subjects.get(name, name)
    attribute = target.partition(":")[2]
    if not attribute:
        ours = ", ".join(known.subjects)
        raise SubjectError(f"subject {name!r}: use one of {ours}, fault:NAME, package.module:Name or program:COMMAND")
    try:
        made = imported(target)()
    except (ImportError, AttributeError) as error:
        raise SubjectError(f"subject {name!r} cannot be imported: {error}") from error
    base = imported(known.base)
    if not isinstance(made, base):
        raise SubjectError(f"subject {name!r}: {attribute} is not a fulldiff {base.__name__} (subclass it)")
    return made


def _program(name: str, base: str) -> Any:
    from fulldiff.harness.subjects.program import Program

    if not issubclass(Program, imported(base)):
        raise SubjectError(f"subject {name!r}: programs take part in the suites runtime and restore")
    try:
        return Program(name.removeprefix(PROGRAM))
    except (ImportError, EOFError) as error:
        raise SubjectError(f"subject {name!r} cannot be started: {str(error) or 'it ended at once'}") from error
