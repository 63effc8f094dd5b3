"""Exceptions of tpcompile. Each says where it happened, what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


class CompileError(Exception):
    """Base class of tpcompile's errors. `str()` is one paragraph that a user can act on."""

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        got: str = "",
        expected: str = "",
        hint: str = "",
    ) -> None:
        self.message = message
        self.where = where
        self.got = got
        self.expected = expected
        self.hint = hint
        super().__init__(self._paragraph())

    def at(self, where: str) -> Self:
        """Return a copy of this error with `where` as its place."""
        error = type(self).__new__(type(self))
        vars(error).update(vars(self), where=where)
        error.args = (error._paragraph(),)
        return error

    def _paragraph(self) -> str:
        details = (("At ", self.where), ("Found ", self.got), ("Expected ", self.expected))
        hint = self.hint[:1].upper() + self.hint[1:]
        sentences = [self.message, *(label + text for label, text in details if text), hint]
        clauses = (text.rstrip(".") for text in sentences if text)
        return " ".join(text if text.endswith("?") else text + "." for text in clauses)


class CaptureError(CompileError):
    """Failure to capture a model as a graph."""


class ShardingError(CompileError):
    """A graph that cannot be sharded over this number of ranks."""


class VerifyError(CompileError):
    """A graph or a program that a checker refuses."""


class PassError(CompileError):
    """Failure of a pass, or an invalid graph after it."""


class CheckpointError(CompileError):
    """A checkpoint that is unreadable, incomplete or inconsistent with its model."""


class RankError(CompileError):
    """A rank that failed to start, raised, died or hung."""


class EndedError(CompileError):
    """A request that is not finished, because the engine ends."""


class RequestError(CompileError):
    """A request that an engine could not continue. Other requests are not affected."""


class UnsupportedError(CompileError):
    """A valid request for a feature that tpcompile does not support."""


class UsageError(CompileError, ValueError):
    """An invalid name, option or pipeline text."""


def spelled(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that equals `name` but for upper and lower case, or None."""
    names = list(known)
    if name in names:
        return name
    return next((known_name for known_name in names if known_name.lower() == name.lower()), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest names, or lists all of them."""
    names = {known_name.lower(): known_name for known_name in known}
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    if near:
        return "Did you mean " + " or ".join(names[key] for key in near) + "?"
    return "Known: " + ", ".join(names.values()) + "."
