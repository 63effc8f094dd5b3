"""The routes about the server itself: its page, health, measurements and models."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpcompile.serving.engine import Engine
from tpcompile.serving.server.answers import error_of
from tpcompile.serving.server.bodies import BadRequestError
from tpcompile.serving.server.metrics import Metrics
from tpcompile.serving.server.options import Options
from tpcompile.serving.server.page import page_routes
from tpcompile.serving.server.requests import check_model, key_refusal


class Information:
    """The handlers of requests for information."""

    def __init__(self, engine: Engine, options: Options, metrics: Metrics) -> None:
        self._engine, self._options, self._metrics = engine, options, metrics
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            *page_routes(),
            Route("/health", self._health),
            Route("/metrics", self._measured),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
        ]

    async def _health(self, request: Request) -> Response:
        reason = self._engine.failure
        status = {"status": "failed", "reason": reason} if reason else {"status": "ok"}
        return JSONResponse(status, 503 if reason else 200)

    async def _measured(self, request: Request) -> Response:
        if (refusal := key_refusal(request, self._options.key)) is not None:
            return refusal
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        if (refusal := key_refusal(request, self._options.key)) is not None:
            return refusal
        models = [self._described(name) for name in self._options.names]
        return JSONResponse({"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        if (refusal := key_refusal(request, self._options.key)) is not None:
            return refusal
        name = request.path_params["model"]
        try:
            check_model(name, self._options)
        except BadRequestError as error:
            return error_of(error.status, error.message, error.param, error.code)
        return JSONResponse(self._described(name))

    async def _version(self, request: Request) -> Response:
        if (refusal := key_refusal(request, self._options.key)) is not None:
            return refusal
        return JSONResponse({"version": version("tpcompile")})

    def _described(self, name: str) -> dict[str, Any]:
        tokenizer = self._engine.tokenizer
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tpcompile",
            "max_model_len": self._engine.model.max_seq_len,
            "chat": bool(tokenizer is not None and tokenizer.chat_template),
        }
