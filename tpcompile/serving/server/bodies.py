"""The bodies of requests: their fields, and the engine's options that follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpcompile.errors import UsageError
from tpcompile.runtime.text import check_template_options
from tpcompile.serving.chats.history import history_of
from tpcompile.serving.chats.tools import AUTO, ToolUse, tool_use_of
from tpcompile.serving.params import SamplingParams
from tpcompile.serving.server.structures import FIELDS, take_structure
from tpcompile.serving.structure import StructureError

_MOST_PROMPTS = 256
_MOST_STOPS = 16
_MOST_STOP_IDS = 1024
_SHORT = 16
"""The default number of new tokens of a completion, as in OpenAI's API."""


class BadRequestError(UsageError):
    """A request that is answered with a status of 400 to 499."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


@dataclass(frozen=True)
class CompletionRequest:
    """A request for completions, of a text or of a chat."""

    prompts: list[str | list[int]]
    params: SamplingParams
    model: str | None = None
    """The name of the model; None: the body has no name."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    echo: bool = False
    """Whether the prompt is part of the text."""
    returns_tokens: bool = True
    """Whether new tokens are too: one is computed even for a `max_tokens` of 0."""
    messages: list[dict[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    structure_path: str = ""
    """The place of the structure of `params` in the body."""
    tools: ToolUse | None = None
    thinking_budget: int | None = None
    """The maximum number of tokens of thinking."""


def read_completion(body: Any, most: int, defaults: Mapping[str, Any]) -> CompletionRequest:
    """Read the body of `/v1/completions`. `most` is the maximum number of continuations.

    `defaults` are options of `SamplingParams` for fields that the body omits.
    """
    fields = fields_of(body, {**_COMMON, **_COMPLETION})
    prompts = _prompts(fields.pop("prompt"))
    echo, best = fields.pop("echo", False), fields.pop("logprobs", None)
    max_tokens = fields.pop("max_tokens", _SHORT)
    options = _options(fields, most, defaults)
    if best is not None:
        options["logprobs"] = best
        if echo:
            options["prompt_logprobs"] = best
    options["max_tokens"] = 1 if max_tokens == 0 else max_tokens
    return _request(fields, prompts, options, echo=echo, returns_tokens=max_tokens != 0)


def read_chat(body: Any, most: int, defaults: Mapping[str, Any]) -> CompletionRequest:
    """Read the body of `/v1/chat/completions`, as `read_completion` does."""
    fields = fields_of(body, {**_COMMON, **_CHAT})
    messages, tools = messages_of(fields.pop("messages")), tools_of(fields)
    budget = fields.pop("thinking_budget", None)
    max_tokens = fields.pop("max_tokens", defaults.get("max_tokens"))
    max_tokens = fields.pop("max_completion_tokens", max_tokens)
    describes, best = fields.pop("logprobs", False), fields.pop("top_logprobs", 0)
    options = _options(fields, most, defaults)
    if describes:
        options["logprobs"] = best
    options["max_tokens"] = max_tokens
    template = template_options_of(fields)
    chat = {"messages": messages, "tools": tools, "thinking_budget": budget}
    return _request(fields, [], options, template_options=template, **chat)


def template_options_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template."""
    options: dict[str, Any] = fields.pop("chat_template_kwargs", {})
    _named("chat_template_kwargs", check_template_options, "chat_template_kwargs", options)
    return options


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat, as its template takes them."""
    messages: list[dict[str, Any]] = _named("messages", history_of, value)
    return messages


def tools_of(fields: dict[str, Any]) -> ToolUse | None:
    """Return the use of tools that fields of a body request."""
    tools, parallel = fields.pop("tools", []), fields.pop("parallel_tool_calls", True)
    choice = fields.pop("tool_choice", AUTO)
    _named("tools", tool_use_of, tools, AUTO, parallel)
    use: ToolUse | None = _named("tool_choice", tool_use_of, tools, choice, parallel)
    return use


def _named(param: str, read: Callable[..., Any], *values: Any) -> Any:
    """Read values; an error names the field."""
    try:
        return read(*values)
    except UsageError as error:
        raise BadRequestError(str(error), param) from error


def _request(
    fields: dict[str, Any], prompts: list[str | list[int]], options: dict[str, Any], **more: Any
) -> CompletionRequest:
    try:
        structure, path = take_structure(fields)
        params = SamplingParams(**options, structure=structure)
    except StructureError as error:
        raise BadRequestError(str(error), error.path) from error
    except UsageError as error:
        raise BadRequestError(str(error)) from error
    streams = fields.get("stream", False)
    include_usage = bool(fields.get("stream_options", {}).get("include_usage"))
    model = fields.get("model")
    return CompletionRequest(
        prompts, params, model, streams, include_usage, structure_path=path, **more
    )


def _options(fields: dict[str, Any], most: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `SamplingParams` in a body, else in `defaults`, else OpenAI's."""
    options = {"temperature": 1.0, **defaults}
    options.update((name, fields[name]) for name in _SAME if name in fields)
    stop = fields.get("stop", ())
    options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    options["stop_tokens"] = tuple(fields.get("stop_token_ids", ()))
    biases = fields.get("logit_bias", {})
    options["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    if options.get("top_k") == -1:
        options["top_k"] = None
    if options.get("n", 1) > most:
        raise BadRequestError(f"n must be at most {most}, got {options['n']}", "n")
    return options


_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

_BIASED = re.compile(r"\d{1,10}", re.ASCII)
"""A token id as a text."""

Check = Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _whole(value) and bool(value >= 0)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _stop(value: Any) -> bool:
    if isinstance(value, str):
        return True
    texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return texts and len(value) <= _MOST_STOPS


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole, value))


def _stop_ids(value: Any) -> bool:
    return _ids(value) and len(value) <= _MOST_STOP_IDS


def _anything(value: Any) -> bool:
    return True


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _biases(value: Any) -> bool:
    """Return whether it is an object of token ids, as texts, and numbers."""
    if not isinstance(value, dict):
        return False
    return all(_BIASED.fullmatch(token) and _number(bias) for token, bias in value.items())


def _only(*allowed: Any) -> Check:
    return lambda value: value in allowed


_COMMON: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(FIELDS, (_anything, "")),
    "model": (_text, "a text"),
    "n": (_whole, "an integer"),
    "temperature": (_number, "a number"),
    "top_p": (_number, "a number"),
    "top_k": (_whole, "an integer"),
    "min_p": (_number, "a number"),
    "seed": (_whole, "an integer"),
    "min_tokens": (_whole, "an integer"),
    "max_tokens": (_whole, "an integer"),
    "ignore_eos": (_flag, "true or false"),
    "presence_penalty": (_number, "a number"),
    "frequency_penalty": (_number, "a number"),
    "repetition_penalty": (_number, "a number"),
    "stop": (_stop, f"a text, or at most {_MOST_STOPS} of them"),
    "stop_token_ids": (_stop_ids, f"a list of at most {_MOST_STOP_IDS:,} integers"),
    "stream": (_flag, "true or false"),
    "stream_options": (_object, "an object"),
    "user": (_text, "a text"),
    "logit_bias": (_biases, "an object of token ids and numbers"),
}
_COMPLETION: dict[str, tuple[Check, str]] = {
    "prompt": (_anything, ""),
    "echo": (_flag, "true or false"),
    "logprobs": (_whole, "an integer"),
    "best_of": (_only(1), "1: other values are not supported"),
    "suffix": (_only(""), "empty: it is not supported"),
}
_CHAT: dict[str, tuple[Check, str]] = {
    "messages": (_anything, ""),
    "logprobs": (_flag, "true or false"),
    "top_logprobs": (_whole, "an integer"),
    "max_completion_tokens": (_whole, "an integer"),
    "chat_template_kwargs": (_object, "an object"),
    "tools": (_anything, ""),
    "tool_choice": (_anything, ""),
    "parallel_tool_calls": (_flag, "true or false"),
    "thinking_budget": (_count, "an integer of at least 0"),
    "store": (_only(False), "false: nothing is stored"),
}
_NEEDED = ("prompt", "messages", "tokens")
_TOKENS: dict[str, tuple[Check, str]] = {
    "model": (_text, "a text"),
    "return_token_strs": (_flag, "true or false"),
}
TOKENIZE = {
    **_TOKENS,
    "prompt": (_text, "a text"),
    "add_special_tokens": (_flag, "true or false"),
}
TOKENIZE_CHAT = {
    **_TOKENS,
    "messages": (_anything, ""),
    "add_generation_prompt": (_flag, "true or false"),
    "add_special_tokens": (_only(False), "false: the chat template adds them"),
    "continue_final_message": (_only(False), "false: others are not supported"),
    "chat_template_kwargs": (_object, "an object"),
    "tools": (_anything, ""),
}
DETOKENIZE: dict[str, tuple[Check, str]] = {
    "model": (_text, "a text"),
    "tokens": (_ids, "a list of integers"),
}


def fields_of(body: Any, known: Mapping[str, tuple[Check, str]]) -> dict[str, Any]:
    """Return the fields of a body that are not null; raise for unknown and wrong ones."""
    if not isinstance(body, dict):
        raise BadRequestError("The body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name not in known:
            raise BadRequestError(f"{name[:60]!r} is not supported", name[:60])
        fits, form = known[name]
        if not fits(value):
            raise BadRequestError(f"{name} must be {form}", name)
    for name in _NEEDED:
        if name in known and name not in fields:
            raise BadRequestError(f"{name} is missing", name)
    return fields


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts: one text or list of tokens, or a list of these."""
    form = "prompt must be a text or token ids, or a list of these"
    if isinstance(value, str) or (_ids(value) and value):
        return [value]
    if not isinstance(value, list) or not value:
        raise BadRequestError(form, "prompt")
    if len(value) > _MOST_PROMPTS:
        raise BadRequestError(f"prompt must have at most {_MOST_PROMPTS} items", "prompt")
    if not all(isinstance(prompt, str) or (_ids(prompt) and prompt) for prompt in value):
        raise BadRequestError(form, "prompt")
    return value
