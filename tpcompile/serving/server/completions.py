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
from tpcompile.serving.chats.assistant import Message
from tpcompile.serving.engine import Engine
from tpcompile.serving.params import SamplingParams
from tpcompile.serving.requests import Completion, Event, Handle
from tpcompile.serving.server.answers import Answer, error_object, error_of
from tpcompile.serving.server.assistants import Assistants
from tpcompile.serving.server.bodies import (
    BadRequestError,
    CompletionRequest,
    read_chat,
    read_completion,
)
from tpcompile.serving.server.metrics import Metrics
from tpcompile.serving.server.options import Options
from tpcompile.serving.server.record import Record
from tpcompile.serving.server.requests import (
    chat_tokens,
    check_model,
    disconnected,
    key_refusal,
    read_json,
)
from tpcompile.serving.structure import StructureError

_GONE = 499
"""The status of a request whose client disconnected, in the log and in metrics."""

_FIELDS = {"stop_tokens": "stop_token_ids"}
"""The fields of bodies whose options have another name."""

Read = Callable[[Any, int, Mapping[str, Any]], CompletionRequest]


class Completions:
    """The handlers of requests for completions, on an engine that runs in its thread."""

    def __init__(self, engine: Engine, options: Options, metrics: Metrics) -> None:
        self._engine, self._options, self._metrics = engine, options, metrics
        self._assistants = Assistants(
            engine.tokenizer, options.tool_parser, options.reasoning_parser
        )

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
        size = self._engine.model.config.vocab_size
        if (unknown := parsed.params.unknown_token(size)) is not None:
            field = _FIELDS.get(unknown[0], unknown[0])
            message = f"Tokens of {field} must be from 0 to {size - 1}, got {unknown[1]}"
            raise BadRequestError(message, field)
        answer = Answer(self._options.model, parsed, self._engine.tokenizer, record.id)
        prompts, params = parsed.prompts, parsed.params
        if parsed.messages is not None:
            prompt = self._chat(parsed)
            params, answer.assistants = self._assistants.prepare(parsed, prompt)
            prompts = [prompt]
        await self._compile(params, parsed.structure_path or "tools")
        handles = self._add(prompts, params)
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

    async def _compile(self, params: SamplingParams, field: str) -> None:
        """Compile the structure of a request, if any, without blocking other requests."""
        if params.structure is None:
            return
        try:
            await asyncio.to_thread(self._engine.grammar, params)
        except StructureError as error:
            path = ".".join(filter(None, (field, error.path)))
            raise BadRequestError(str(error.at(path)), path) from error
        except UsageError as error:
            raise BadRequestError(str(error), field) from error

    def _add(self, prompts: Sequence[str | list[int]], params: SamplingParams) -> list[Handle]:
        waiting = len(self._engine.scheduler.waiting)
        if waiting + len(prompts) > self._options.most_waiting:
            raise BadRequestError("Too many requests are waiting", status=429)
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                handles.append(self._engine.add(prompt, params))
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
        return chat_tokens(
            tokenizer, self._options, parsed.messages, parsed.template_options, parsed.tools
        )

    async def _collect(
        self, answer: Answer, handles: Sequence[Handle], record: Record
    ) -> list[list[Completion]]:
        return await asyncio.gather(*(_completions(answer, handle, record) for handle in handles))

    async def _stream(
        self, answer: Answer, handles: Sequence[Handle], record: Record
    ) -> AsyncIterator[str]:
        """Yield the pieces of all choices as soon as they are known."""
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
    async for event, _ in _events(answer, handle, record):
        completions[event.index].add(event)
    return completions


async def _follow(
    answer: Answer, handle: Handle, first: int, pieces: asyncio.Queue[Any], record: Record
) -> None:
    """Put the pieces of a request into a queue, and the number of its new tokens at the end."""
    begun: set[int] = set()
    new = 0
    try:
        async for event, message in _events(answer, handle, record):
            if event.index not in begun:
                begun.add(event.index)
                if (piece := answer.begin(handle, first + event.index)) is not None:
                    pieces.put_nowait(piece)
            new += event.chosen is not None
            pieces.put_nowait(answer.piece(event, first + event.index, message))
        pieces.put_nowait(new)
    except Exception as error:  # the client gets it
        pieces.put_nowait(error)


async def _events(
    answer: Answer, handle: Handle, record: Record
) -> AsyncIterator[tuple[Event, Message]]:
    """Yield the events of a prompt as the client sees them, with the pieces of messages."""
    watches = [record.watch() for _ in range(handle.params.n)]
    ended: set[int] = set()
    async for event in handle:
        if event.index in ended:
            continue
        if event.chosen is not None:
            watches[event.index].token()
        visible, piece = answer.read(event)
        if visible.finish is not None:
            ended.add(event.index)
            if event.finish is None:
                handle.abort(event.index)
        yield visible, piece
    for assistant in answer.assistants:
        record.metrics.calls.inc(len(assistant.message.calls))
        record.metrics.failures.labels("tool_call").inc(assistant.failed)


def _status_of(error: BaseException) -> int:
    """Return the status of a request that ends with an error of the engine."""
    return 503 if isinstance(error, RankError | EndedError) else 500


def _abort(handles: Sequence[Handle]) -> None:
    """Abort the requests that have not ended."""
    for handle in handles:
        if not handle.ended:
            handle.abort()


def _event(piece: Any) -> str:
    return f"data: {json.dumps(piece)}\n\n"
