"""What the text of an assistant consists of, as it comes: text, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class Begin:
    """The beginning of a call: its name is known."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments. All pieces of a complete call join to a JSON object."""

    text: str


@dataclass(frozen=True)
class Complete:
    """The end of a call that has its form."""


@dataclass(frozen=True)
class Broken:
    """The end of a call that was cut off or lost its form."""

    whole: str
    """Its text as the model wrote it."""
    rest: str
    """The end of this text, which is in no other event; all of it, if the call has no `Begin`."""


Event = Text | Begin | Arguments | Complete | Broken
