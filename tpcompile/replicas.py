"""Replicas of a server on a Ray cluster, behind one address. It needs the extra `ray`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tpcompile.api import compile
from tpcompile.errors import CheckpointError, RankError, UsageError
from tpcompile.runtime.text import tokenizer_of
from tpcompile.serving.engine import Engine
from tpcompile.serving.server.answers import error_of
from tpcompile.serving.server.app import application
from tpcompile.serving.server.bodies import BadRequestError
from tpcompile.serving.server.guard import ANY, Hosts
from tpcompile.serving.server.options import Options, short_name
from tpcompile.serving.server.requests import read_body

_ATTEMPTS = 3
"""The number of replicas that are tried, one after another, before a request fails."""
_FRONT_CPUS = 0.1
_MOST_REQUESTS = 10_000
"""The maximum number of concurrent requests of the application in front of the replicas."""
_HEALTH_S = 2.0
_UNAVAILABLE = 503
_SCOPE = (
    *("type", "http_version", "method", "scheme", "path", "root_path"),
    *("query_string", "headers"),
)
"""The parts of a request's scope that are sent to a replica."""
_SKIPPED = frozenset((b"content-length", b"transfer-encoding", b"connection", b"date", b"server"))
"""Headers of an answer that the server in front of the replicas writes itself."""

Message = dict[str, Any]
"""A message of ASGI."""


def app(
    model: str,
    *,
    replicas: int | tuple[int, int] = 1,
    tp: int = 1,
    cpus: float | None = None,
    gpus: float = 0,
    name: str | None = None,
    api_key: str | None = None,
    max_batch: int = 16,
    kv_tokens: int | None = None,
    snapshots: int | None = None,
    **options: Any,
) -> serve.Application:
    """Return an application for `ray.serve.run`: replicas of `tpcompile serve`, behind one address.

    With `replicas` as a pair (least, most), Ray starts and ends replicas so that each has about
    `max_batch` requests. Each replica takes `cpus` cores (default: one per rank) and `gpus`.
    `options` are further arguments of `compile`.
    """
    least, most = (replicas, replicas) if isinstance(replicas, int) else replicas
    if not 1 <= least <= most:
        raise UsageError(
            "replicas must be a positive int, or a pair (least, most)", got=str(replicas)
        )
    deployment: Any = serve.deployment(
        ray_actor_options={"num_cpus": tp if cpus is None else cpus, "num_gpus": gpus},
        max_ongoing_requests=2 * max_batch,
        health_check_period_s=_HEALTH_S,
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": max_batch,
        },
    )(Replica)
    bound = deployment.bind(
        model,
        {"tp": tp, "max_batch": max_batch, **options},
        {"max_batch": max_batch, "kv_tokens": kv_tokens, "snapshots": snapshots},
        {"model": name or short_name(model), "key": api_key, "hosts": Hosts(frozenset({ANY}))},
    )
    front: Any = serve.deployment(
        ray_actor_options={"num_cpus": _FRONT_CPUS}, max_ongoing_requests=_MOST_REQUESTS
    )(Front)
    return front.bind(bound)  # type: ignore[no-any-return]


class Replica:
    """A model with its engine, and the application that `tpcompile serve` runs."""

    def __init__(
        self,
        model: str,
        compiled: Mapping[str, Any],
        engine: Mapping[str, Any],
        server: Mapping[str, Any],
    ) -> None:
        try:
            tokenizer = tokenizer_of(model)
        except CheckpointError:  # the replica takes token ids only
            tokenizer = None
        self._engine = Engine(compile(model, **compiled), tokenizer=tokenizer, **engine).start()
        self._app = application(self._engine, Options(**server))

    def check_health(self) -> None:
        """Raise if the engine cannot go on: Ray then replaces the replica."""
        if self._engine.failure:
            raise RankError(self._engine.failure)

    async def answer(self, scope: Message, body: bytes) -> AsyncGenerator[Message]:
        """Yield the messages of the answer to a request."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if request:
                return request.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def respond() -> None:
            try:
                await self._app(scope, receive, messages.put)  # type: ignore[arg-type]
            finally:
                await messages.put(None)

        responding = asyncio.ensure_future(respond())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await responding
        finally:
            gone.set()  # also after the client disconnects: the application then ends the request
            await asyncio.wait([responding])


class Front:
    """The application that clients talk to. It passes requests on to replicas."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        try:
            body = await read_body(request)
        except BadRequestError as error:
            return error_of(error.status, error.message)
        scope = {name: request.scope[name] for name in _SCOPE} | {"asgi": {"spec_version": "2.3"}}
        last = "no replica is available"
        for _ in range(_ATTEMPTS):
            answer = self._replicas.answer.remote(scope, body)
            try:
                begin, first = await anext(answer), await anext(answer)
            except RayActorError as error:  # nothing was sent: another replica can answer
                last = type(error).__name__
                continue
            if begin["status"] != _UNAVAILABLE:
                return _passed_on(begin, first, answer)
            last = first["body"].decode()
        return error_of(_UNAVAILABLE, f"The replicas could not answer: {last}")


def _passed_on(begin: Message, first: Message, answer: Any) -> Response:
    """Return an answer that a replica has begun."""

    async def parts() -> AsyncIterator[bytes]:
        try:
            yield first["body"]
            if first.get("more_body"):
                async for message in answer:
                    yield message["body"]
        finally:
            answer.cancel()  # a client that disconnects frees its blocks

    response = StreamingResponse(parts(), begin["status"])
    response.raw_headers = [pair for pair in begin["headers"] if pair[0].lower() not in _SKIPPED]
    return response
