"""The socket that a server listens on, its connections, and the signals that end it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tpcompile.errors import UsageError
from tpcompile.serving.server.answers import error_of
from tpcompile.serving.server.guard import MOST_HEAD, TOO_LARGE

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TOO_LARGE = 431
_CLOSING_S = 5
"""The time for ended requests to send their last piece; then uvicorn cancels them."""
_LINGER_S = 1.0
"""The time for a refused client, which may still be sending, to read the reason."""


def bound(host: str, port: int) -> socket.socket:
    """Return a socket for a server on an address; port 0 selects a free one.

    Its connections send each piece at once. Otherwise the second part of an answer would wait for
    the client to acknowledge the first, which takes 40 ms. asyncio does so only for sockets that it
    has created itself. Clients cannot connect before the socket listens.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"The server cannot listen on {host}, port {port}",
            got=f"the error: {error.strerror or error}",
            hint="Choose another --port, or 0 for a free one, and an address of this machine",
        ) from error
    return listener


class CappedProtocol(H11Protocol):
    """A connection that ends with an answer when a request's headers are too large.

    Only h11 has a limit for headers that are not complete; httptools collects them in quadratic
    time. Those that are complete are checked by `Guard`.
    """

    _over = False

    def data_received(self, data: bytes) -> None:
        """Receive bytes from the client; drop them once it is refused."""
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
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def config_of(
    app: ASGIApp, drain_s: int, certfile: Path | None = None, keyfile: Path | None = None
) -> uvicorn.Config:
    """Return uvicorn's configuration; at the end, running requests have `drain_s` seconds.

    With a certificate and its key, which may be in one file, it speaks TLS.
    """
    return uvicorn.Config(
        app,
        http=CappedProtocol,
        h11_max_incomplete_event_size=MOST_HEAD,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_s + _CLOSING_S,
        ssl_certfile=certfile,
        ssl_keyfile=keyfile,
    )


def check_certificate(certfile: Path | None, keyfile: Path | None) -> None:
    """Raise unless the files of TLS can be used, if there are any."""
    if certfile is None:
        if keyfile is not None:
            raise UsageError("A key of TLS needs its certificate", hint="Add --ssl-certfile FILE")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certfile, keyfile, password=_no_password
        )
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise UsageError(
            f"The certificate {certfile} and its key cannot be used",
            got=str(error),
            expected="PEM files of a certificate and of a key without a password",
            hint="" if keyfile else "The key is expected in the same file without --ssl-keyfile",
        ) from error


def _no_password() -> str:
    """Refuse a key with a password, which the library would ask for on the terminal."""
    raise ValueError("the key has a password")


class QuietServer(uvicorn.Server):
    """A server that returns after SIGINT or SIGTERM, when its requests have ended.

    After the signal it accepts no connections, and `end_requests` ends the requests that still
    run after `drain_s`. uvicorn's own handler raises the signal again, which would end the process
    before the ranks are closed.
    """

    def __init__(
        self, config: uvicorn.Config, drain_s: int, end_requests: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._drain_s, self._end_requests = drain_s, end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, and abort them after the limit."""
        log.info("ending: %d connections, at most %d s", len(self.server_state.connections),
                 self._drain_s)  # fmt: skip
        reason = f"The server ends, and gives its requests {self._drain_s} s"
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._drain_s, self._end_requests, reason)
        await super().shutdown(sockets)
        timer.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let both signals end the server; the second one ends it at once."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
