"""The page at `/`: a chat in a browser, made of static files without a build step.

All texts of models and servers become text nodes, never markup. A content security policy allows
only the scripts and styles of this package, and requests of this server.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tpcompile.serving.server.answers import error_of

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[Route]:
    """Return the routes of the page and of its files, which are read once."""
    contents = {
        file.name: file.read_bytes() for file in files(__package__).joinpath("static").iterdir()
    }

    async def page(request: Request) -> Response:
        return _file("page.html", contents)

    async def part(request: Request) -> Response:
        return _file(request.path_params["name"], contents)

    return [Route("/", page), Route("/page/{name}", part, include_in_schema=False)]


def _file(name: str, contents: Mapping[str, bytes]) -> Response:
    if name not in contents:
        return error_of(404, f"The page has no file {name[:100]!r}")
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(contents[name], media_type=kind, headers=_HEADERS)
