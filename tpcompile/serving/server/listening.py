"""The socket that a server listens on, its connections, and the signals that end it."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tpcompile.errors import UsageError
from tpcompile.serving.server.answers import error_of
from tpcompile.serving.server.guard import MOST_HEAD, TOO_LARGE

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TOO_LARGE = 431
_LINGER_S = 1.0
"""The time in which a client that still sends can read why it is refused."""


def bound(host: str, port: int) -> socket.socket:
    """Return a socket for a server on an address; port 0 selects a free one.

    Its connections send each piece at once. Otherwise the second part of an answer would wait for
    the client to acknowledge the first, which takes 40 ms. asyncio does so only for sockets that
    it has made itself. Nobody can connect before the socket listens.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise UsageError(
            f"The server cannot listen on {host}, port {port}",
            got=f"the error: {error.strerror or error}",
            hint="Choose another --port, or 0 for a free one, and an address of this machine",
        ) from error
    return found


class CappedProtocol(H11Protocol):
    """A connection that ends with an answer when a request's headers are too large.

    Only h11 has a limit for headers that are not complete; httptools collects them in quadratic
    time. Those that are complete are checked by `Guard`.
    """

    _over = False

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client, and drop them once it is refused."""
        if not self._over:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 refuses, in the handler of its error."""
        if getattr(sys.exc_info()[1], "error_status_hint", None) != _TOO_LARGE:
            super().send_400_response(msg)
            return
        self._over = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # it is the end of a body, which has an answer
            return
        answer = error_of(_TOO_LARGE, TOO_LARGE)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=_TOO_LARGE, headers=headers),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def config_of(app: ASGIApp, grace_s: int) -> uvicorn.Config:
    """Return how uvicorn serves an application. Running requests have `grace_s` at the end."""
    return uvicorn.Config(
        app,
        http=CappedProtocol,
        h11_max_incomplete_event_size=MOST_HEAD,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace_s,
    )


class QuietServer(uvicorn.Server):
    """A server that returns after SIGINT or SIGTERM, when its requests have ended.

    uvicorn's own would raise the signal again, which ends the process before ranks are told.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let both signals end the server; the second one ends it at once."""
        before = {one: signal.signal(one, self.handle_exit) for one in _SIGNALS}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
