"""Bodies, keys and connections of HTTP requests."""

from __future__ import annotations

import hmac
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tpcompile.errors import UsageError
from tpcompile.runtime.text import encode_chat
from tpcompile.serving.chats.tools import ToolUse
from tpcompile.serving.server.answers import error_of
from tpcompile.serving.server.bodies import BadRequestError
from tpcompile.serving.server.options import Options

_MOST_BODY = 16 << 20


async def read_body(request: Request) -> bytes:
    """Return a body of limited size."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY:
            raise BadRequestError(f"The body must have at most {_MOST_BODY:,} bytes", status=413)
    return bytes(body)


async def read_json(request: Request) -> Any:
    """Return a body of JSON."""
    body = await read_body(request)
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # not half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise BadRequestError("The body must be JSON, in UTF-8") from error
    return value


def chat_tokens(
    tokenizer: Any,
    options: Options,
    messages: Any,
    template_options: Any,
    tools: ToolUse | None,
    **more: Any,
) -> list[int]:
    """Return the tokens of a chat, by the template of the checkpoint.

    `template_options` are variables of the template that a request sets; the server has defaults.
    """
    variables = {**options.template_options, **template_options}
    if tools is not None:
        more["tools"] = list(tools.listed)
    try:
        return encode_chat(tokenizer, messages, **more, **variables)
    except UsageError as error:
        raise BadRequestError(str(error), "messages") from error


async def disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_model(name: str | None, options: Options) -> None:
    """Raise if a request names another model."""
    if name is None or name in options.names:
        return
    raise BadRequestError(
        f"There is no model {name[:100]!r}; the server has {', '.join(options.names)}",
        "model",
        status=404,
        code="model_not_found",
    )


def key_refusal(request: Request, key: str | None) -> Response | None:
    """Return an answer to a request without the right key; None if it has the key."""
    if key is None:
        return None
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(sent.lstrip().encode("latin-1"), key.encode())
    if same and scheme.lower() == "bearer":
        return None
    return error_of(401, "The key is missing or wrong: send `Authorization: Bearer KEY`")
