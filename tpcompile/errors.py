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
        return type(self)(
            self.message, where=where, got=self.got, expected=self.expected, hint=self.hint
        )

    def _paragraph(self) -> str:
        details = (("At ", self.where), ("Found ", self.got), ("Expected ", self.expected))
        hint = self.hint[:1].upper() + self.hint[1:]
        sentences = [self.message, *(label + text for label, text in details if text), hint]
        said = (text.rstrip(".") for text in sentences if text)
        return " ".join(text if text.endswith("?") else text + "." for text in said)


class CaptureError(CompileError):
    """The model could not be turned into a graph."""


class ShardingError(CompileError):
    """The graph cannot be sharded over this number of ranks."""


class VerifyError(CompileError):
    """A checker refused a graph or a program."""


class PassError(CompileError):
    """A pass failed, or produced an invalid graph."""


class CheckpointError(CompileError):
    """A checkpoint lacks a tensor, or has one of the wrong shape."""


class RankError(CompileError):
    """A rank raised, died or hung."""


class UnsupportedError(CompileError):
    """A valid request for a feature that tpcompile does not support."""


class UsageError(CompileError, ValueError):
    """An invalid name, option or pipeline text."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest names, or lists all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return "Did you mean " + " or ".join(near) + "?"
    return "Known: " + ", ".join(names) + "."
