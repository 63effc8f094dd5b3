"""The HTTP application: routes, keys, limits of bodies, and streams."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tpcompile.errors import CompileError, RankError, UsageError
from tpcompile.runtime.text import encode_chat
from tpcompile.serving.engine import Engine
from tpcompile.serving.requests import Completion, Handle
from tpcompile.serving.server.answers import Answer, error_of, said
from tpcompile.serving.server.bodies import Asked, BadRequestError, chat, completion
from tpcompile.serving.server.guard import Guard, Hosts
from tpcompile.serving.server.metrics import Metrics, Watch
from tpcompile.serving.server.page import PAGE

_MOST_BODY = 16 << 20
_GONE = 499
"""The status of a request whose client went away, in metrics."""

Read = Callable[[Any, int], Asked]


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


class Server:
    """The handlers of requests, on an engine that runs in its thread."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine, self._options = engine, options
        self._metrics = Metrics(engine)

    def app(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._measured),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._handler(completion), methods=["POST"]),
                Route("/v1/chat/completions", self._handler(chat), methods=["POST"]),
            ],
            middleware=[Middleware(Guard, hosts=self._options.hosts)],
            exception_handlers={404: _missing, 405: _missing, 500: _broken},
        )

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(PAGE)

    async def _health(self, request: Request) -> Response:
        reason = self._engine.failure
        status = {"status": "failed", "reason": reason} if reason else {"status": "ok"}
        return JSONResponse(status, 503 if reason else 200)

    async def _measured(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        room = self._engine.model.max_seq_len
        own = {"id": self._options.model, "object": "model", "owned_by": "tpcompile"}
        return JSONResponse({"object": "list", "data": [own | {"max_model_len": room}]})

    def _handler(self, read: Read) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            response = self._refused(request)
            if response is None:
                try:
                    response = await self._answer(request, read)
                except BadRequestError as error:
                    response = error_of(error.status, error.message, error.param)
                except ClientDisconnect:
                    response = error_of(_GONE, "The client went away")
                except RankError as error:
                    response = error_of(503, str(error))
                except CompileError as error:
                    response = error_of(500, str(error))
            self._metrics.requests.labels(request.url.path, str(response.status_code)).inc()
            return response

        return handle

    def _refused(self, request: Request) -> Response | None:
        """Return an answer to a request without the right key."""
        key = self._options.key
        if key is None:
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.lstrip().encode("latin-1"), key.encode())
        if same and scheme.lower() == "bearer":
            return None
        return error_of(401, "The key is missing or wrong: send `Authorization: Bearer KEY`")

    async def _answer(self, request: Request, read: Read) -> Response:
        body = await _json(request)
        asked = read(body, self._engine.scheduler.limits.sequences)
        try:
            asked.params.check_vocabulary(self._engine.model.config.vocab_size)
        except UsageError as error:
            raise BadRequestError(str(error), "stop_token_ids") from error
        answer = Answer(self._options.model, asked, self._engine.tokenizer)
        prompts = asked.prompts if asked.messages is None else [self._chat(asked.messages)]
        handles = self._add(prompts, asked)
        if asked.stream:
            stream = self._stream(answer, handles)
            return StreamingResponse(stream, media_type="text/event-stream")
        gathering = asyncio.ensure_future(self._collect(answer, handles))
        leaving = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((gathering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not gathering.done():
                raise ClientDisconnect
            return JSONResponse(answer.whole(handles, gathering.result()))
        finally:
            leaving.cancel()
            gathering.cancel()
            _abort(handles)

    def _add(self, prompts: Sequence[str | list[int]], asked: Asked) -> list[Handle]:
        waiting = len(self._engine.scheduler.waiting)
        if waiting + len(prompts) > self._options.most_waiting:
            raise BadRequestError("Too many requests are waiting", status=429)
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                handles.append(self._engine.add(prompt, asked.params))
        except BaseException as error:
            _abort(handles)
            if isinstance(error, UsageError):
                raise BadRequestError(str(error), "prompt") from error
            raise
        self._metrics.prompt.inc(sum(len(handle.prompt) for handle in handles))
        return handles

    def _chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a chat, by the template of the checkpoint."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise BadRequestError("The model has no chat template: use /v1/completions")
        try:
            return encode_chat(tokenizer, messages)
        except Exception as error:  # templates raise what they like
            raise BadRequestError(f"The chat template refuses the messages: {error}") from error

    async def _collect(self, answer: Answer, handles: Sequence[Handle]) -> list[list[Completion]]:
        return [await self._completions(answer, handle) for handle in handles]

    async def _completions(self, answer: Answer, handle: Handle) -> list[Completion]:
        found = [Completion(index) for index in range(handle.params.n)]
        watches = [Watch(self._metrics) for _ in found]
        async for event in handle:
            found[event.index].add(answer.seen(event))
            if event.chosen is not None:
                watches[event.index].token()
        self._metrics.shared.inc(handle.shared)
        return found

    async def _stream(self, answer: Answer, handles: Sequence[Handle]) -> AsyncIterator[str]:
        """Yield the pieces of all choices as they come."""
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        follow = [
            asyncio.ensure_future(self._follow(answer, handle, place * handle.params.n, pieces))
            for place, handle in enumerate(handles)
        ]
        going, new = len(follow), 0
        try:
            while going:
                piece = await pieces.get()
                if isinstance(piece, BaseException):
                    yield _event({"error": said(500, str(piece))})
                    return
                if isinstance(piece, int):
                    going, new = going - 1, new + piece
                else:
                    yield _event(piece)
            if answer.asked.usage:
                yield _event(answer.numbers(handles, new))
            yield "data: [DONE]\n\n"
        finally:
            for task in follow:
                task.cancel()
            _abort(handles)

    async def _follow(
        self, answer: Answer, handle: Handle, first: int, pieces: asyncio.Queue[Any]
    ) -> None:
        """Put the pieces of a request into a queue, and the number of its new tokens at the end."""
        watches = [Watch(self._metrics) for _ in range(handle.params.n)]
        begun: set[int] = set()
        new = 0
        try:
            async for event in handle:
                if event.index not in begun:
                    begun.add(event.index)
                    if (piece := answer.begin(handle, first + event.index)) is not None:
                        pieces.put_nowait(piece)
                if event.chosen is not None:
                    watches[event.index].token()
                seen = answer.seen(event)
                new += seen.chosen is not None
                pieces.put_nowait(answer.piece(seen, first + event.index))
            self._metrics.shared.inc(handle.shared)
            pieces.put_nowait(new)
        except Exception as error:  # the client gets it
            pieces.put_nowait(error)


def _abort(handles: Sequence[Handle]) -> None:
    """End what is still going on; requests that have ended are not affected."""
    for handle in handles:
        if not handle.ended:
            handle.abort()


async def read_body(request: Request) -> bytes:
    """Return a body of limited size."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY:
            raise BadRequestError(f"The body must have at most {_MOST_BODY:,} bytes", status=413)
    return bytes(body)


async def _json(request: Request) -> Any:
    """Return a body of JSON."""
    body = await read_body(request)
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()  # not half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise BadRequestError("The body must be JSON, in UTF-8") from error
    return found


async def _disconnected(request: Request) -> None:
    """Wait until the client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(piece: Any) -> str:
    return f"data: {json.dumps(piece)}\n\n"


async def _missing(request: Request, error: Any) -> Response:
    return error_of(error.status_code, f"There is no {request.method} {request.url.path[:100]}")


async def _broken(request: Request, error: Exception) -> Response:
    return error_of(500, f"The server failed: {type(error).__name__}")
