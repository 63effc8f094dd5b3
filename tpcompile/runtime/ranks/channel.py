"""Messages between two processes: a small pickled header, and the raw bytes of tensors."""

from __future__ import annotations

import io
import math
import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_LENGTHS = struct.Struct("<QQ")
_ALIGN = 64
_PARTS = 64
"""Buffers per system call. Systems allow at least 1,024; few messages have more than ten."""


class ChannelClosed(Exception):  # noqa: N818 - also a normal end, so no error
    """The process at the other end has ended or closed its end."""


@dataclass(frozen=True)
class Encoded:
    """A message as bytes, which can be sent to several processes."""

    parts: Sequence[memoryview]


class Channel:
    """An endpoint of a connection for objects, which sends tensors without pickling them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def set_timeout(self, seconds: float) -> None:
        """Set the time without progress after which a message raises `TimeoutError`."""
        self._connection.settimeout(seconds)

    def send(self, message: object) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, message: Encoded) -> None:
        waiting = [part for part in message.parts if part.nbytes]
        try:
            while waiting:
                waiting = _behind(waiting, self._connection.sendmsg(waiting[:_PARTS]))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error

    def receive(self) -> Any:
        """Return the next message."""
        header, body = _LENGTHS.unpack(self._read(_LENGTHS.size))
        start = -(-header // _ALIGN) * _ALIGN
        message = self._read(start + body)
        unpickler = _Unpickler(io.BytesIO(memoryview(message)[:header]))
        unpickler.body = memoryview(message)[start:]
        return unpickler.load()

    def send_file(self, file: int) -> None:
        """Send an open file."""
        try:
            socket.send_fds(self._connection, [b"f"], [file])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error

    def receive_file(self) -> int:
        """Return the open file that the other end sends."""
        sent, files, _, _ = socket.recv_fds(self._connection, 1, 1)
        if not sent:
            raise ChannelClosed
        return files[0]

    def close(self) -> None:
        self._connection.close()

    def _read(self, size: int) -> bytearray:
        buffer = bytearray(size)
        remaining = memoryview(buffer)
        while remaining:
            try:
                count = self._connection.recv_into(remaining)
            except ConnectionResetError as error:
                raise ChannelClosed from error
            if not count:
                raise ChannelClosed
            remaining = remaining[count:]
        return buffer


def encode(message: object) -> Encoded:
    """Return a message as bytes."""
    header = io.BytesIO()
    pickler = _Pickler(header, pickle.HIGHEST_PROTOCOL)
    pickler.dump(message)
    lengths = _LENGTHS.pack(header.tell(), pickler.size)
    header.write(bytes(-header.tell() % _ALIGN))
    # Not getbuffer(): Python 3.12.1 crashes when its view is in a reference cycle, such as that of
    # an exception with the frame that sends the message.
    return Encoded([memoryview(lengths), memoryview(header.getvalue()), *pickler.parts])


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class _Pickler(pickle.Pickler):
    """A pickler that stores tensors outside the pickle, as bytes."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.parts: list[memoryview] = []
        self.size = 0

    def persistent_id(self, value: object) -> tuple[int, tuple[int, ...], torch.dtype] | None:
        if not isinstance(value, torch.Tensor):
            return None
        start = self.size
        held = value.detach().cpu().contiguous()
        if held.numel():
            padding = bytes(-held.nbytes % _ALIGN)
            self.parts += (
                [tensor_bytes(held), memoryview(padding)] if padding else [tensor_bytes(held)]
            )
            self.size += held.nbytes + len(padding)
        return start, tuple(held.shape), held.dtype


class _Unpickler(pickle.Unpickler):
    """An unpickler that restores tensors as views of the message's bytes."""

    body: memoryview

    def persistent_load(self, place: Any) -> torch.Tensor:
        start, shape, dtype = place
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.body, dtype=dtype, count=count, offset=start).view(shape)


def _behind(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return the rest of `parts` after `sent` bytes."""
    for index, part in enumerate(parts):
        if sent < part.nbytes:
            return [part[sent:], *parts[index + 1 :]]
        sent -= part.nbytes
    return []
