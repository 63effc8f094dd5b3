"""The options of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpcompile.serving.server.guard import Hosts


@dataclass(frozen=True)
class Options:
    """The options of a server."""

    model: str
    """The name of the model in answers."""
    key: str | None = None
    """The key that clients must send."""
    most_waiting: int = 1024
    """The requests that may wait; more are refused with a status of 429."""
    hosts: Hosts = field(default_factory=Hosts)
    """The hosts that requests may name, besides those of loopback."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """The variables of the chat template, unless a request sets them."""
    tool_parser: str = "auto"
    """The form of the model's calls: a name, "none", or "auto" to choose by the chat template."""
    reasoning_parser: str = "auto"
    """"none" leaves thinking in the text; "auto" separates it if the template or tokens have it."""
    aliases: tuple[str, ...] = ()
    """Other names by which requests may name the model."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model in requests."""
        return (self.model, *self.aliases)
