"""The routes of completions: requests for the engine, whole answers and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tpcompile.errors import CompileError, RankError, UsageError
from tpcompile.runtime.text import encode_chat
from tpcompile.serving.engine import Engine
from tpcompile.serving.requests import Completion, Handle
from tpcompile.serving.server.answers import Answer, error_object, error_of
from tpcompile.serving.server.bodies import (
    BadRequestError,
    CompletionRequest,
    read_chat,
    read_completion,
)
from tpcompile.serving.server.metrics import Metrics, Watch
from tpcompile.serving.server.options import Options
from tpcompile.serving.server.requests import disconnected, key_refusal, read_json

_GONE = 499
"""The status of a request whose client went away, in metrics."""

Read = Callable[[Any, int], CompletionRequest]


class Completions:
    """The handlers of requests for completions, on an engine that runs in its thread."""

    def __init__(self, engine: Engine, options: Options, metrics: Metrics) -> None:
        self._engine, self._options, self._metrics = engine, options, metrics

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/completions", self._handler(read_completion), methods=["POST"]),
            Route("/v1/chat/completions", self._handler(read_chat), methods=["POST"]),
        ]

    def _handler(self, read: Read) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            response = key_refusal(request, self._options.key)
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

    async def _answer(self, request: Request, read: Read) -> Response:
        body = await read_json(request)
        parsed = read(body, self._engine.scheduler.limits.sequences)
        try:
            parsed.params.check_vocabulary(self._engine.model.config.vocab_size)
        except UsageError as error:
            raise BadRequestError(str(error), "stop_token_ids") from error
        answer = Answer(self._options.model, parsed, self._engine.tokenizer)
        prompts = parsed.prompts if parsed.messages is None else [self._chat(parsed)]
        handles = self._add(prompts, parsed)
        if parsed.stream:
            stream = self._stream(answer, handles)
            return StreamingResponse(stream, media_type="text/event-stream")
        gathering = asyncio.ensure_future(self._collect(answer, handles))
        leaving = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait((gathering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not gathering.done():
                raise ClientDisconnect
            return JSONResponse(answer.whole(handles, gathering.result()))
        finally:
            leaving.cancel()
            gathering.cancel()
            _abort(handles)

    def _add(self, prompts: Sequence[str | list[int]], parsed: CompletionRequest) -> list[Handle]:
        waiting = len(self._engine.scheduler.waiting)
        if waiting + len(prompts) > self._options.most_waiting:
            raise BadRequestError("Too many requests are waiting", status=429)
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                handles.append(self._engine.add(prompt, parsed.params))
        except BaseException as error:
            _abort(handles)
            if isinstance(error, UsageError):
                raise BadRequestError(str(error), "prompt") from error
            raise
        self._metrics.prompt.inc(sum(len(handle.prompt) for handle in handles))
        return handles

    def _chat(self, parsed: CompletionRequest) -> list[int]:
        """Return the tokens of a chat, by the template of the checkpoint."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise BadRequestError("The model has no chat template: use /v1/completions")
        options = {**self._options.template_options, **parsed.template_options}
        try:
            return encode_chat(tokenizer, parsed.messages or [], **options)
        except UsageError as error:
            raise BadRequestError(str(error), "messages") from error

    async def _collect(self, answer: Answer, handles: Sequence[Handle]) -> list[list[Completion]]:
        return [await self._completions(answer, handle) for handle in handles]

    async def _completions(self, answer: Answer, handle: Handle) -> list[Completion]:
        completions = [Completion(index) for index in range(handle.params.n)]
        watches = [Watch(self._metrics) for _ in completions]
        async for event in handle:
            completions[event.index].add(answer.seen(event))
            if event.chosen is not None:
                watches[event.index].token()
        self._metrics.shared.inc(handle.shared)
        return completions

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
                    yield _event({"error": error_object(500, str(piece))})
                    return
                if isinstance(piece, int):
                    going, new = going - 1, new + piece
                else:
                    yield _event(piece)
            if answer.request.include_usage:
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


def _event(piece: Any) -> str:
    return f"data: {json.dumps(piece)}\n\n"
