"""The errors that tpcompile raises, each with where it happened, what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


class CompileError(Exception):
    """Anything that tpcompile refuses. `str()` is one paragraph a user can act on."""

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
        """Return the same error with this place."""
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
    """The graph cannot be sharded over so many ranks."""


class VerifyError(CompileError):
    """A checker refused a graph or a program."""


class PassError(CompileError):
    """A pass failed, or left an invalid graph behind."""


class CheckpointError(CompileError):
    """A checkpoint lacks a tensor, or holds one of the wrong shape."""


class RankError(CompileError):
    """A rank raised, died or hung."""


class UnsupportedError(CompileError):
    """A well-formed request for something that tpcompile does not do."""


class UsageError(CompileError, ValueError):
    """A name, option or pipeline text that means nothing."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the names that come nearest, or with all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return "Did you mean " + " or ".join(near) + "?"
    return "Known: " + ", ".join(names) + "."
