"""A server of the real page that replays streams in OpenAI's format, and stores what it is sent.

The page's features go beyond what the demo model says: it neither thinks nor calls tools.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tpcompile.serving.server.listening import bound, config_of
from tpcompile.serving.server.page import page_routes

Events = list[dict[str, Any]]


def delta(finish: str | None = None, **values: Any) -> dict[str, Any]:
    """Return an event of a chat with these fields of a message."""
    choice = {"index": 0, "delta": values, "finish_reason": finish}
    return {"object": "chat.completion.chunk", "model": "stub", "choices": [choice]}


def usage(prompt: int, new: int, cached: int = 0) -> dict[str, Any]:
    """Return the last event of a stream, with the numbers of tokens."""
    details = {"cached_tokens": cached}
    numbers = {"prompt_tokens": prompt, "completion_tokens": new, "prompt_tokens_details": details}
    return {"object": "chat.completion.chunk", "model": "stub", "choices": [], "usage": numbers}


def spoken(text: str, size: int = 4) -> Events:
    """Return the events of an answer that is this text."""
    pieces = [delta(content=text[start : start + size]) for start in range(0, len(text), size)]
    return [delta(role="assistant"), *pieces, delta("stop"), usage(20, len(pieces), 16)]


def called(*calls: tuple[str, str], thought: str = "") -> Events:
    """Return the events of an answer that calls functions, with the arguments in pieces."""
    events = [delta(role="assistant")]
    events += [delta(reasoning_content=word + " ") for word in thought.split()]
    for index, (name, arguments) in enumerate(calls):
        head = {"index": index, "id": f"call_{index}_x", "type": "function"}
        function = {"name": name, "arguments": ""}
        events.append(delta(tool_calls=[head | {"function": function}]))
        for start in range(0, len(arguments), 5):
            piece = {"index": index, "function": {"arguments": arguments[start : start + 5]}}
            events.append(delta(tool_calls=[piece]))
    return [*events, delta("tool_calls"), usage(30, len(events))]


@dataclass
class Replies:
    """The answers to come, in order, and the bodies of requests so far."""

    answers: list[Any] = field(default_factory=list)
    """Lists of events; or pairs of a status and a message."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    pause: float = 0.0
    """Seconds between events."""
    ends: bool = True
    """Whether streams end with [DONE]; the connection is closed after the events if not."""
    cut: int | None = None
    """The bytes of a piece of a stream, if events are cut without regard to their ends."""
    models: Any = None
    """The model in `/v1/models`; or a pair of a status and a message."""
    gone: int = 0
    """The number of streams whose client went away."""
    url: str = ""

    def app(self) -> Starlette:
        """Return the application."""
        answer = [
            Route(f"/v1/{path}", self._answer, methods=["POST"])
            for path in ("chat/completions", "completions")
        ]
        return Starlette(routes=[*page_routes(), Route("/v1/models", self._models), *answer])

    async def _models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization", ""))
        if isinstance(self.models, tuple) and not self.keys[-1]:
            return _refusal(*self.models)
        model = {"id": "stub", "max_model_len": 4096, "chat": True}
        if isinstance(self.models, dict):
            model |= self.models
        return JSONResponse({"object": "list", "data": [model]})

    async def _answer(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        reply = self.answers.pop(0)
        if isinstance(reply, tuple):
            return _refusal(*reply)
        stream = self._events(reply) if self.cut is None else self._pieces(reply, self.cut)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _pieces(self, events: Events, size: int) -> AsyncIterator[bytes]:
        whole = b"".join([event.encode() async for event in self._events(events)])
        for start in range(0, len(whole), size):
            yield whole[start : start + size]
            await asyncio.sleep(0.002)

    async def _events(self, events: Events) -> AsyncIterator[str]:
        try:
            for event in events:
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
                await asyncio.sleep(self.pause)
            if self.ends:
                yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone += 1
            raise


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serve an application on a free port, in a thread."""
    listening = bound("127.0.0.1", 0)
    listening.listen()
    server = uvicorn.Server(config_of(app, 2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    host, port = listening.getsockname()
    try:
        yield f"http://{host}:{port}/"
    finally:
        server.should_exit = True
        thread.join()
