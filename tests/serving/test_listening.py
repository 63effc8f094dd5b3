"""Tests of the socket that a server listens on."""

from __future__ import annotations

import socket

import pytest

from tpcompile.errors import UsageError
from tpcompile.serving.server.listening import bound


def test_connections_send_each_piece_at_once() -> None:
    """Otherwise every answer would take 40 ms longer."""
    with bound("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as line:
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_in_use() -> None:
    with bound("127.0.0.1", 0) as listening:
        listening.listen()
        port = listening.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1, port {port}"):
            bound("127.0.0.1", port)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1, port 0"):
        bound("192.0.2.1", 0)
