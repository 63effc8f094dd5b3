"""Messages arrive unchanged in another process, and closed connections are reported."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tpcompile.runtime.ranks.channel import Channel, ChannelClosed, encode


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = (Channel(end) for end in socket.socketpair())
    yield first, second
    first.close()
    second.close()


@dataclass(frozen=True)
class _Message:
    name: str
    values: dict[Any, Any]


def _through(ends: tuple[Channel, Channel], message: object) -> Any:
    """Send from a thread, since a large message does not fit into the socket buffer."""
    sender = threading.Thread(target=ends[0].send, args=(message,))
    sender.start()
    received = ends[1].receive()
    sender.join()
    return received


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(6).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(2.5),
        torch.zeros(0, 4, dtype=torch.int32),
        torch.tensor([True, False, True]),
        torch.linspace(0, 1, 7, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(3)),
        torch.randn(1_000_003),
    ],
)
def test_tensors_come_out_as_they_went_in(ends: tuple[Channel, Channel], x: torch.Tensor) -> None:
    received = _through(ends, _Message("x", {"before": torch.ones(1), "x": x, "twice": [x, "end"]}))
    assert received.name == "x"
    for value in (received.values["x"], received.values["twice"][0]):
        assert value.dtype == x.dtype
        assert torch.equal(value, x)
        assert not value.requires_grad
    assert received.values["twice"][1] == "end"


def test_tensors_that_came_can_be_written_and_are_aligned(ends: tuple[Channel, Channel]) -> None:
    odd, aligned = _through(ends, [torch.ones(3, dtype=torch.uint8), torch.ones(2)])
    aligned += 1
    assert aligned.tolist() == [2.0, 2.0]
    assert odd.tolist() == [1, 1, 1]
    assert (aligned.data_ptr() - odd.data_ptr()) % 8 == 0


def test_tensors_are_not_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("pickled")

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", refuse)
    encoded = encode({"x": torch.ones(10_000)})
    assert len(encoded.parts[1]) < 500


def test_messages_keep_their_order(ends: tuple[Channel, Channel]) -> None:
    for number in range(20):
        ends[0].send((number, torch.full((number,), number)))
    for number in range(20):
        received, x = ends[1].receive()
        assert (received, x.tolist()) == (number, [number] * number)


def test_one_encoding_serves_several_receivers(ends: tuple[Channel, Channel]) -> None:
    encoded = encode(torch.arange(5))
    for _ in range(3):
        ends[0].send_encoded(encoded)
    assert [ends[1].receive().tolist() for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3


def test_a_file_is_handed_over_between_messages(ends: tuple[Channel, Channel]) -> None:
    reading, writing = os.pipe()
    ends[0].send("a file follows")
    ends[0].send_file(reading)
    ends[0].send("it did")
    os.close(reading)
    assert ends[1].receive() == "a file follows"
    received = ends[1].receive_file()
    assert ends[1].receive() == "it did"
    os.write(writing, b"x")
    assert os.read(received, 1) == b"x"
    os.close(received)
    os.close(writing)


def test_the_end_of_the_other_is_told(ends: tuple[Channel, Channel]) -> None:
    ends[1].close()
    with pytest.raises(ChannelClosed):
        ends[0].receive()
    with pytest.raises(ChannelClosed):
        ends[0].send("hello")


def test_an_end_in_the_middle_of_a_message_is_told(ends: tuple[Channel, Channel]) -> None:
    for part in encode(torch.ones(100)).parts[:2]:
        os.write(ends[0].fileno(), part)
    ends[0].close()
    with pytest.raises(ChannelClosed):
        ends[1].receive()


def test_one_who_does_not_listen_is_not_waited_for_without_end(
    ends: tuple[Channel, Channel],
) -> None:
    ends[0].set_timeout(0.05)
    with pytest.raises(TimeoutError):
        ends[0].send(torch.ones(10_000_000))
    with pytest.raises(TimeoutError):
        ends[0].receive()


def test_what_cannot_be_pickled_is_refused_before_anything_is_sent() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        encode(lambda: None)
