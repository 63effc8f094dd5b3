"""The routes of completions: requests for the engine, whole answers and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tpcompile.errors import CompileError, EndedError, RankError, UsageError
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
from tpcompile.serving.server.metrics import Metrics
from tpcompile.serving.server.options import Options
from tpcompile.serving.server.record import Record
from tpcompile.serving.server.requests import check_model, disconnected, key_refusal, read_json

_GONE = 499
"""The status of a request whose client went away, in the log and in metrics."""

Read = Callable[[Any, int, Mapping[str, Any]], CompletionRequest]


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
            record = Record(self._metrics, request.url.path)
            response = key_refusal(request, self._options.key)
            if response is None:
                try:
                    response = await self._answer(request, read, record)
                except BadRequestError as error:
                    response = error_of(error.status, error.message, error.param, error.code)
                except ClientDisconnect:
                    response = error_of(_GONE, "The client went away")
                except CompileError as error:
                    response = error_of(_status_of(error), str(error))
                except Exception:
                    record.end(500)
                    raise
            response.headers["x-request-id"] = record.id
            if not isinstance(response, StreamingResponse):  # a stream ends later
                record.end(response.status_code)
            return response

        return handle

    async def _answer(self, request: Request, read: Read, record: Record) -> Response:
        body = await read_json(request)
        parsed = read(body, self._engine.scheduler.limits.sequences, self._engine.defaults)
        check_model(parsed.model, self._options)
        try:
            parsed.params.check_vocabulary(self._engine.model.config.vocab_size)
        except UsageError as error:
            raise BadRequestError(str(error), _field_of(error)) from error
        answer = Answer(self._options.model, parsed, self._engine.tokenizer, record.id)
        prompts = parsed.prompts if parsed.messages is None else [self._chat(parsed)]
        handles = self._add(prompts, parsed)
        record.add(handles)
        if parsed.stream:
            stream = self._stream(answer, handles, record)
            return StreamingResponse(stream, media_type="text/event-stream")
        gathering = asyncio.ensure_future(self._collect(answer, handles, record))
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

    async def _collect(
        self, answer: Answer, handles: Sequence[Handle], record: Record
    ) -> list[list[Completion]]:
        return await asyncio.gather(*(_completions(answer, handle, record) for handle in handles))

    async def _stream(
        self, answer: Answer, handles: Sequence[Handle], record: Record
    ) -> AsyncIterator[str]:
        """Yield the pieces of all choices as they come."""
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        follow = [
            asyncio.ensure_future(_follow(answer, handle, place * handle.params.n, pieces, record))
            for place, handle in enumerate(handles)
        ]
        going, new, status = len(follow), 0, _GONE
        try:
            while going:
                piece = await pieces.get()
                if isinstance(piece, BaseException):
                    status = _status_of(piece)
                    yield _event({"error": error_object(status, str(piece))})
                    return
                if isinstance(piece, int):
                    going, new = going - 1, new + piece
                else:
                    yield _event(piece)
            if answer.request.include_usage:
                yield _event(answer.numbers(handles, new))
            status = 200
            yield "data: [DONE]\n\n"
        finally:
            for task in follow:
                task.cancel()
            _abort(handles)
            record.end(status)


async def _completions(answer: Answer, handle: Handle, record: Record) -> list[Completion]:
    """Wait for the continuations of a prompt."""
    completions = [Completion(index) for index in range(handle.params.n)]
    watches = [record.watch() for _ in completions]
    async for event in handle:
        completions[event.index].add(answer.seen(event))
        if event.chosen is not None:
            watches[event.index].token()
    return completions


async def _follow(
    answer: Answer, handle: Handle, first: int, pieces: asyncio.Queue[Any], record: Record
) -> None:
    """Put the pieces of a request into a queue, and the number of its new tokens at the end."""
    watches = [record.watch() for _ in range(handle.params.n)]
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
        pieces.put_nowait(new)
    except Exception as error:  # the client gets it
        pieces.put_nowait(error)


def _field_of(error: UsageError) -> str:
    """Return the field of a body whose tokens are not in the vocabulary."""
    return "logit_bias" if "logit_bias" in error.message else "stop_token_ids"


def _status_of(error: BaseException) -> int:
    """Return the status of a request that ends with an error of the engine."""
    return 503 if isinstance(error, RankError | EndedError) else 500


def _abort(handles: Sequence[Handle]) -> None:
    """End what is still going on; requests that have ended are not affected."""
    for handle in handles:
        if not handle.ended:
            handle.abort()


def _event(piece: Any) -> str:
    return f"data: {json.dumps(piece)}\n\n"
