"""The routes that say what the server is: its page, health, measurements and models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpcompile.serving.engine import Engine
from tpcompile.serving.server.metrics import Metrics
from tpcompile.serving.server.options import Options
from tpcompile.serving.server.page import page_routes
from tpcompile.serving.server.requests import key_refusal


class Information:
    """The handlers of requests for information."""

    def __init__(self, engine: Engine, options: Options, metrics: Metrics) -> None:
        self._engine, self._options, self._metrics = engine, options, metrics

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            *page_routes(),
            Route("/health", self._health),
            Route("/metrics", self._measured),
            Route("/v1/models", self._models),
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
        tokenizer = self._engine.tokenizer
        model = {
            "id": self._options.model,
            "object": "model",
            "owned_by": "tpcompile",
            "max_model_len": self._engine.model.max_seq_len,
            "chat": bool(tokenizer is not None and tokenizer.chat_template),
        }
        return JSONResponse({"object": "list", "data": [model]})
