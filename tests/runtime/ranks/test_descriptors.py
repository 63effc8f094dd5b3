"""Files passed to child processes never use the numbers of the standard streams."""

from __future__ import annotations

import os

import pytest

from tpcompile.runtime.ranks import descriptors


def test_a_high_number_is_kept() -> None:
    file = os.open(os.devnull, os.O_RDONLY)
    assert file >= 3 and descriptors.after_standard(file) == file
    os.close(file)


def test_a_low_number_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers below the limit, here 200, are moved above it."""
    monkeypatch.setattr(descriptors, "_FIRST", 200)
    before = set(os.listdir("/dev/fd"))
    reads, writes = descriptors.pipe()
    first, second = descriptors.socket_pair()
    file = descriptors.nameless_file()
    with first, second:
        numbers = [reads, writes, first.fileno(), second.fileno(), file]
        assert min(numbers) >= 200
        assert not any(os.get_inheritable(number) for number in numbers)
        opened = {int(name) for name in set(os.listdir("/dev/fd")) - before}
        assert {number for number in opened if number < 200} <= {min(opened)}  # of listdir itself
        os.write(writes, b"a")
        first.sendall(b"b")
        os.pwrite(file, b"c", 0)
        assert os.read(reads, 1) + second.recv(1) + os.pread(file, 1, 0) == b"abc"
    for number in (reads, writes, file):
        os.close(number)
