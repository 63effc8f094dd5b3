"""The bodies of requests for tokens and for their text, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpcompile.serving.chats.tools import ToolUse
from tpcompile.serving.server.bodies import (
    DETOKENIZE,
    TOKENIZE,
    TOKENIZE_CHAT,
    fields_of,
    messages_of,
    template_options_of,
    tools_of,
)


@dataclass(frozen=True)
class TokenizeRequest:
    """A request for the tokens of a text or of messages."""

    model: str | None
    prompt: str = ""
    messages: list[dict[str, Any]] | None = None
    special: bool = True
    """Whether the tokenizer adds special tokens to a text."""
    texts: bool = False
    """Whether the answer has the tokens as texts too."""
    generation_prompt: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolUse | None = None


def read_tokenize(body: Any) -> TokenizeRequest:
    """Read the body of `/tokenize`: a text, or messages if it has some."""
    chats = isinstance(body, dict) and body.get("messages") is not None
    fields = fields_of(body, TOKENIZE_CHAT if chats else TOKENIZE)
    model, texts = fields.get("model"), fields.get("return_token_strs", False)
    if not chats:
        special = fields.get("add_special_tokens", True)
        return TokenizeRequest(model, fields["prompt"], special=special, texts=texts)
    return TokenizeRequest(
        model,
        messages=messages_of(fields["messages"]),
        texts=texts,
        generation_prompt=fields.get("add_generation_prompt", True),
        template_options=template_options_of(fields),
        tools=tools_of(fields),
    )


def read_detokenize(body: Any) -> tuple[str | None, list[int]]:
    """Read the body of `/detokenize`: the name of the model, and tokens."""
    fields = fields_of(body, DETOKENIZE)
    return fields.get("model"), fields["tokens"]
