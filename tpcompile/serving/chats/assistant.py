"""The message of an assistant in one continuation: thinking, text and tool calls."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from tpcompile.serving.chats.calls import ToolParser
from tpcompile.serving.chats.events import Arguments, Begin, Broken, Complete, Event, Text
from tpcompile.serving.chats.thinking import Thinking


@dataclass
class Call:
    """A call of a tool, or a piece of it."""

    index: int
    """Its place among the calls."""
    id: str = ""
    """Empty in all pieces but the first."""
    name: str = ""
    """Empty in all pieces but the first."""
    arguments: str = ""


@dataclass
class Message:
    """A message of an assistant, or a piece of it."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Assistant:
    """The message that a continuation's text makes, as a whole and in pieces.

    A call that is cut off or loses its form is text in the whole message. In pieces, a call that
    was already sent stays one, and the rest of it is text.
    """

    def __init__(
        self, thinking: Thinking | None, tools: ToolParser | None, parallel: bool = True
    ) -> None:
        """Without `parallel`, the message ends with its first call."""
        self._thinking, self._tools, self._parallel = thinking, tools, parallel
        self.message = Message()
        """The whole message so far, without a call that is not complete."""
        self.failed = 0
        """The calls that were cut off or lost their form."""
        self.ended = False
        """Whether the message has ended, although text may follow."""
        self._begun = 0
        self._call = Call(0)

    @property
    def thinks(self) -> bool:
        """Whether the text so far ends within the thinking."""
        return self._thinking is not None and self._thinking.inside

    def push(self, text: str, last: bool = False) -> Message:
        """Read more text, which may be the last; return the new piece of the message."""
        piece = Message()
        if self._thinking is not None:
            piece.reasoning, text = self._thinking.push(text)
            if last:
                reasoning, remainder = self._thinking.end()
                piece.reasoning, text = piece.reasoning + reasoning, text + remainder
            self.message.reasoning += piece.reasoning
        events: list[Event] = [Text(text)] if self._tools is None else self._tools.push(text)
        if last and self._tools is not None:
            events += self._tools.end()
        for event in events:
            self._add(event, piece)
        return piece

    def _add(self, event: Event, piece: Message) -> None:
        """Add an event to the whole message and to a piece of it."""
        match event:
            case _ if self.ended:
                return
            case Text(text):
                self.message.content += text
                piece.content += text
            case Begin(name):
                self._call = Call(len(self.message.calls), f"call_{uuid.uuid4().hex[:24]}", name)
                piece.calls.append(Call(self._begun, self._call.id, name))
                self._begun += 1
            case Arguments(text):
                self._call.arguments += text
                if not piece.calls:
                    piece.calls.append(Call(self._begun - 1))
                piece.calls[-1].arguments += text
            case Complete():
                self.message.calls.append(self._call)
                self.ended = not self._parallel
            case Broken(whole, rest):
                self.failed += 1
                self.message.content += whole
                piece.content += rest
