"""The socket that a server listens on, and the signals that end it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tpcompile.errors import UsageError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
