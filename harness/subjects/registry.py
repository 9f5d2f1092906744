"""Subjects by name: ours, ``fault:NAME`` for a known wrong way, ``package.module:Name`` for yours."""

from __future__ import annotations

from importlib import import_module

from fulldiff.harness.subjects.base import Subject
from fulldiff.harness.subjects.names import FAULT, OURS


class SubjectError(ValueError):
    """No such subject; the message says what was looked for and where."""


def subject(name: str) -> Subject:
    """The subject called ``name``; raises SubjectError."""
    if name.startswith(FAULT):
        from fulldiff.harness.subjects.faulty import Faulty

        return Faulty(name.removeprefix(FAULT))
    target = OURS.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise SubjectError(f"subject {name!r}: use one of {', '.join(OURS)}, fault:NAME or package.module:Name")
    try:
        made = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise SubjectError(f"subject {name!r} cannot be imported: {error}") from error
    if not isinstance(made, Subject):
        raise SubjectError(f"subject {name!r}: {attribute} is not a fulldiff Subject (subclass it)")
    return made
