"""The answers to requests, as OpenAI's API has them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import JSONResponse, Response

from tpcompile.serving.chats.assistant import Assistant, Call, Message
from tpcompile.serving.requests import LENGTH, STOP, Completion, Event, Handle
from tpcompile.serving.sampling import Chosen
from tpcompile.serving.server.bodies import CompletionRequest

_CALLS = "tool_calls"
"""The finish reason of a message that calls tools."""


@dataclass
class Answer:
    """The parts that all pieces of an answer have in common."""

    model: str
    request: CompletionRequest
    tokenizer: Any
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    assistants: list[Assistant] = field(default_factory=list)
    """In a chat, the reader of each choice."""
    reasoning: int = 0
    """The tokens of thinking so far."""
    lengths: Counter[int] = field(default_factory=Counter)
    """By choice, the number of characters in the tokens described so far."""

    @property
    def chats(self) -> bool:
        return self.request.messages is not None

    @property
    def _describes(self) -> bool:
        return self.request.params.logprobs is not None

    def whole(self, handles: Sequence[Handle], results: Sequence[Sequence[Completion]]) -> Any:
        """Return the answer as a whole."""
        choices: list[Any] = []
        for handle, completions in zip(handles, results, strict=True):
            for completion in completions:
                choices.append(self._choice(handle, completion, len(choices)))
        new = [len(completion.chosen) for completions in results for completion in completions]
        return self._frame("", choices) | {"usage": self._usage(handles, sum(new))}

    def read(self, event: Event) -> tuple[Event, Message]:
        """Return the client's view of an event, and its piece of a message."""
        if not self.request.returns_tokens:
            finish = LENGTH if event.finish == STOP else event.finish
            return Event(event.index, None, finish=finish), Message()
        if not self.assistants:
            return event, Message(content=event.text)
        assistant = self.assistants[event.index]
        thought = assistant.thinks
        piece = assistant.push(event.text, event.finish is not None)
        self.reasoning += event.chosen is not None and (thought or assistant.thinks)
        calls = assistant.ended or (event.finish == STOP and assistant.message.calls)
        return replace(event, finish=_CALLS if calls else event.finish), piece

    def begin(self, handle: Handle, index: int) -> Any | None:
        """Return the first piece of a choice's stream; None if the stream starts with a token."""
        if self.chats:
            delta = {"role": "assistant", "content": ""}
            return self._frame(".chunk", [{"index": index, "delta": delta, "finish_reason": None}])
        if not self.request.echo:
            return None
        text, chosen = self._prompt(handle), [Chosen(handle.prompt[0]), *handle.prompt_chosen]
        logprobs = self._logprobs(chosen, index) if self._describes else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return self._frame("", [choice])

    def piece(self, event: Event, index: int, message: Message) -> Any:
        """Return a piece of a stream."""
        chosen = [] if event.chosen is None else [event.chosen]
        logprobs = None
        if self._describes and chosen:
            logprobs = self._chat_logprobs(chosen) if self.chats else self._logprobs(chosen, index)
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs}
        if self.chats:
            choice["delta"] = message_object(message, pieces=True)
        else:
            choice["text"] = message.content
        return self._frame(".chunk", [choice | {"finish_reason": event.finish}])

    def numbers(self, handles: Sequence[Handle], new: int) -> Any:
        """Return the last piece of a stream: the numbers of tokens."""
        return self._frame(".chunk", []) | {"usage": self._usage(handles, new)}

    def _usage(self, handles: Sequence[Handle], new: int) -> dict[str, Any]:
        details = {"reasoning_tokens": self.reasoning} if self.chats else {}
        if any(handle.drafted for handle in handles):
            accepted = sum(handle.accepted for handle in handles)
            details["accepted_prediction_tokens"] = accepted
            drafted = sum(handle.drafted for handle in handles)
            details["rejected_prediction_tokens"] = drafted - accepted
        return usage(handles, new) | ({"completion_tokens_details": details} if details else {})

    def _frame(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chats else 'cmpl'}-{self.id}",
            "object": f"chat.completion{kind}" if self.chats else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, handle: Handle, completion: Completion, index: int) -> dict[str, Any]:
        text, chosen, finish = completion.text, completion.chosen, completion.finish
        if self.chats:
            answer = self.assistants[index].message
            message = {"role": "assistant", "content": None if answer.calls else ""}
            message |= message_object(answer)
            choice: dict[str, Any] = {"index": index, "message": message}
            logprobs = self._chat_logprobs(chosen) if self._describes else None
            return choice | {"logprobs": logprobs, "finish_reason": finish}
        if self.request.echo:
            text = self._prompt(handle) + text
            chosen = [Chosen(handle.prompt[0]), *handle.prompt_chosen, *chosen]
        logprobs = self._logprobs(chosen, index) if self._describes else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _prompt(self, handle: Handle) -> str:
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(handle.prompt)
        return text

    def _logprobs(self, chosen: Iterable[Chosen], index: int) -> dict[str, Any]:
        """Return log-probabilities as `/v1/completions` has them."""
        columns: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, logprob, best in chosen:
            text = self._word(token)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(logprob)
            columns["text_offset"].append(self.lengths[index])
            top: dict[str, float] = {}
            for likely, value in best:
                top.setdefault(self._word(likely), value)
            columns["top_logprobs"].append(top if logprob is not None else None)
            self.lengths[index] += len(text)
        return columns

    def _chat_logprobs(self, chosen: Iterable[Chosen]) -> dict[str, Any]:
        def described(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._word(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                described(token, logprob) | {"top_logprobs": [described(*pair) for pair in best]}
                for token, logprob, best in chosen
            ]
        }

    def _word(self, token: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token}"
        text: str = self.tokenizer.decode([token])
        return text


def message_object(message: Message, pieces: bool = False) -> dict[str, Any]:
    """Return the non-empty fields of a message; pieces of calls have the index of their call."""
    fields: dict[str, Any] = {
        "reasoning_content": message.reasoning,
        "content": message.content,
        "tool_calls": [_call_object(call, pieces) for call in message.calls],
    }
    return {name: value for name, value in fields.items() if value}


def _call_object(call: Call, piece: bool) -> dict[str, Any]:
    place = {"index": call.index} if piece else {}
    if not call.id:
        return place | {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return place | {"id": call.id, "type": "function", "function": function}


def usage(handles: Sequence[Handle], new: int) -> dict[str, Any]:
    """Return the numbers of tokens."""
    prompts = sum(len(handle.prompt) for handle in handles)
    shared = sum(handle.shared for handle in handles)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": new,
        "total_tokens": prompts + new,
        "prompt_tokens_details": {"cached_tokens": shared},
    }


def error_object(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error, as OpenAI's API has it. The status is the code, unless it has a name."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code or status}


def error_of(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> Response:
    """Return an answer that reports an error."""
    return JSONResponse({"error": error_object(status, message, param, code)}, status)
