"""Open files of this process, none of them at the numbers of the standard streams.

In a process whose standard streams are closed, the next file that is opened gets one of their
numbers. A child process would then have its own stream in the file's place.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile

_FIRST = 3
"""The first number after stdin, stdout and stderr."""


def after_standard(file: int) -> int:
    """Return the open file under a number of its own: itself, or moved away from 0 to 2."""
    if file >= _FIRST:
        return file
    try:
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(file)


def pipe() -> tuple[int, int]:
    """A pipe: the end to read and the end to write."""
    reads, writes = os.pipe()
    return after_standard(reads), after_standard(writes)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two sockets that are connected to each other."""
    one, other = (_moved(end) for end in socket.socketpair())
    return one, other


def _moved(end: socket.socket) -> socket.socket:
    if end.fileno() >= _FIRST:
        return end
    return socket.socket(fileno=after_standard(end.detach()))


def nameless_file() -> int:
    """A temporary file that is already unlinked."""
    with tempfile.TemporaryFile() as file:
        return fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST)
