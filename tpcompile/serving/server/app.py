"""The HTTP application: routes, and the check of hosts before them."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from tpcompile.serving.engine import Engine
from tpcompile.serving.server.answers import error_of
from tpcompile.serving.server.completions import Completions
from tpcompile.serving.server.guard import Guard
from tpcompile.serving.server.information import Information
from tpcompile.serving.server.metrics import Metrics
from tpcompile.serving.server.options import Options


def application(engine: Engine, options: Options) -> Starlette:
    """Return the application that serves an engine, which runs in its thread."""
    metrics = Metrics(engine)
    parts = (Information(engine, options, metrics), Completions(engine, options, metrics))
    return Starlette(
        routes=[route for part in parts for route in part.routes()],
        middleware=[Middleware(Guard, hosts=options.hosts)],
        exception_handlers={404: _missing, 405: _missing, 500: _broken},
    )


async def _missing(request: Request, error: Any) -> Response:
    return error_of(error.status_code, f"There is no {request.method} {request.url.path[:100]}")


async def _broken(request: Request, error: Exception) -> Response:
    return error_of(500, f"The server failed: {type(error).__name__}")
