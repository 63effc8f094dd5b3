"""Open files whose descriptors are not those of the standard streams.

If the standard streams of a process are closed, the next opened file gets one of their
descriptors. A child process would then replace the file with its own standard stream.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile

_FIRST = 3
"""The first descriptor after stdin, stdout and stderr."""


def after_standard(file: int) -> int:
    """Return a descriptor above 2 for the open file: the same one, or a new one if it is 0 to 2."""
    if file >= _FIRST:
        return file
    try:
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(file)


def pipe() -> tuple[int, int]:
    """Create a pipe; return its read end and its write end."""
    reads, writes = os.pipe()
    return after_standard(reads), after_standard(writes)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets."""
    first, second = (_moved(end) for end in socket.socketpair())
    return first, second


def _moved(end: socket.socket) -> socket.socket:
    if end.fileno() >= _FIRST:
        return end
    return socket.socket(fileno=after_standard(end.detach()))


def memory_file(name: str) -> int:
    """Create a file in memory if the system supports it, else an unlinked temporary file."""
    if hasattr(os, "memfd_create"):
        return after_standard(os.memfd_create(name))
    return nameless_file()


def allocated_file(name: str, size: int) -> int:
    """Create a file in memory, and allocate it: later a lack of memory would be a SIGBUS."""
    file = memory_file(name)
    try:
        os.truncate(file, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


def nameless_file() -> int:
    """Create a temporary file that is already unlinked."""
    with tempfile.TemporaryFile() as file:
        return fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST)
