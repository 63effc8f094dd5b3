"""The bodies of requests: what they may contain, and what it means for the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpcompile.errors import UsageError
from tpcompile.serving.params import SamplingParams

_MOST_PROMPTS = 256
_MOST_STOPS = 16
_MOST_STOP_IDS = 1024
_SHORT = 16
"""The new tokens of a completion that does not say how many, as in OpenAI's API."""


class BadRequestError(UsageError):
    """A request that is answered with a status of 400 to 499."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status


@dataclass(frozen=True)
class Asked:
    """A request for completions, of a text or of a chat."""

    prompts: list[str | list[int]]
    params: SamplingParams
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    echo: bool = False
    """Whether the prompt is part of the text."""
    new: bool = True
    """Whether new tokens are: one is computed even if none is asked for, and not returned."""
    messages: list[dict[str, Any]] | None = None


def completion(body: Any, most: int) -> Asked:
    """Read the body of `/v1/completions`."""
    given = _fields(body, {**_COMMON, **_COMPLETION})
    prompts = _prompts(given.pop("prompt"))
    echo, best = given.pop("echo", False), given.pop("logprobs", None)
    wanted = given.pop("max_tokens", _SHORT)
    options = _options(given, most)
    if best is not None:
        options["logprobs"] = best
        if echo:
            options["prompt_logprobs"] = best
    options["max_tokens"] = 1 if wanted == 0 else wanted
    return _asked(given, prompts, options, echo=echo, new=wanted != 0)


def chat(body: Any, most: int) -> Asked:
    """Read the body of `/v1/chat/completions`."""
    given = _fields(body, {**_COMMON, **_CHAT})
    messages = _messages(given.pop("messages"))
    wanted = given.pop("max_tokens", None)
    wanted = given.pop("max_completion_tokens", wanted)
    wants, best = given.pop("logprobs", False), given.pop("top_logprobs", 0)
    options = _options(given, most)
    if wants:
        options["logprobs"] = best
    options["max_tokens"] = wanted
    return _asked(given, [], options, messages=messages)


def _asked(
    given: dict[str, Any], prompts: list[str | list[int]], options: dict[str, Any], **more: Any
) -> Asked:
    try:
        params = SamplingParams(**options)
    except UsageError as error:
        raise BadRequestError(str(error)) from error
    streams = given.get("stream", False)
    usage = bool(given.get("stream_options", {}).get("include_usage"))
    return Asked(prompts, params, streams, usage, **more)


def _options(given: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the options of `SamplingParams` in a body, with OpenAI's defaults."""
    found = {name: given[name] for name in _SAME if name in given}
    found.setdefault("temperature", 1.0)
    stop = given.get("stop", ())
    found["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    found["stop_tokens"] = tuple(given.get("stop_token_ids", ()))
    if found.get("top_k") == -1:
        found["top_k"] = None
    if found.get("n", 1) > most:
        raise BadRequestError(f"n must be at most {most}, got {found['n']}", "n")
    return found


_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

Check = Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


def _only(*allowed: Any) -> Check:
    return lambda value: value in allowed


_COMMON: dict[str, tuple[Check, str]] = {
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
    "stream_options": (lambda value: isinstance(value, dict), "an object"),
    "user": (_text, "a text"),
    "logit_bias": (_only({}), "empty: it is not supported"),
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
    "response_format": (_only({"type": "text"}), 'of type "text": others are not supported'),
    "store": (_only(False), "false: nothing is stored"),
}
_NEEDED = ("prompt", "messages")


def _fields(body: Any, known: Mapping[str, tuple[Check, str]]) -> dict[str, Any]:
    """Return the fields of a body that are not null; raise for unknown and wrong ones."""
    if not isinstance(body, dict):
        raise BadRequestError("The body must be a JSON object")
    found = {name: value for name, value in body.items() if value is not None}
    for name, value in found.items():
        if name not in known:
            raise BadRequestError(f"{name[:60]!r} is not supported", name[:60])
        fits, said = known[name]
        if not fits(value):
            raise BadRequestError(f"{name} must be {said}", name)
    for name in _NEEDED:
        if name in known and name not in found:
            raise BadRequestError(f"{name} is missing", name)
    return found


def _prompts(given: Any) -> list[str | list[int]]:
    """Return the prompts: one text or list of tokens, or a list of these."""
    said = "prompt must be a text or token ids, or a list of these"
    if isinstance(given, str) or (_ids(given) and given):
        return [given]
    if not isinstance(given, list) or not given:
        raise BadRequestError(said, "prompt")
    if len(given) > _MOST_PROMPTS:
        raise BadRequestError(f"prompt must have at most {_MOST_PROMPTS} items", "prompt")
    if not all(isinstance(one, str) or (_ids(one) and one) for one in given):
        raise BadRequestError(said, "prompt")
    return given


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages, with the text of those that consist of parts."""
    if not isinstance(given, list) or not given:
        raise BadRequestError("messages must be a list that is not empty", "messages")
    found = []
    for one in given:
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise BadRequestError("Each of messages must have a role and a content", "messages")
        content = one.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            texts = [text for text in parts if isinstance(text, str)]
            content = "".join(texts) if len(texts) == len(parts) else None
        if not isinstance(content, str):
            raise BadRequestError("The content of each of messages must be a text", "messages")
        found.append({"role": one["role"], "content": content})
    return found
