"""The HTTP application: routes, and the check of hosts before them."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from tpcompile.serving.engine import Engine
from tpcompile.serving.server.answers import error_of
from tpcompile.serving.server.completions import Completions
from tpcompile.serving.server.guard import Guard
from tpcompile.serving.server.information import Information
from tpcompile.serving.server.metrics import Metrics
from tpcompile.serving.server.options import Options
from tpcompile.serving.server.tokens import Tokens


def application(engine: Engine, options: Options) -> Starlette:
    """Return the application that serves an engine, which runs in its thread."""
    metrics = Metrics(engine)
    parts = (
        Information(engine, options, metrics),
        Completions(engine, options, metrics),
        Tokens(engine, options),
    )
    middleware = [Middleware(Guard, hosts=options.hosts)]
    if options.hosts.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=sorted(options.hosts.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    return Starlette(
        routes=[route for part in parts for route in part.routes()],
        middleware=middleware,
        exception_handlers={404: _missing, 405: _missing, 500: _broken},
    )


async def _missing(request: Request, error: Any) -> Response:
    """Answer a request for a path that is not there, with those that are."""
    paths = [
        f"{method} {route.path}"
        for route in request.app.routes
        if route.include_in_schema
        for method in sorted(route.methods - {"HEAD"})
    ]
    message = f"There is no {request.method} {request.url.path[:100]}; there is"
    return error_of(error.status_code, f"{message} {', '.join(paths)}")


async def _broken(request: Request, error: Exception) -> Response:
    return error_of(500, f"The server failed: {type(error).__name__}")
