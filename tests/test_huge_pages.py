"""Tests of memory in huge pages."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tpcompile.huge_pages import zeros

SIZE = 8 << 20
FLAG = "hg"
"""How Linux marks memory that should be in huge pages."""


def test_memory_is_zero_and_can_be_written() -> None:
    memory = zeros(SIZE)
    assert memory[:] == bytes(SIZE)
    memory[SIZE - 1] = 7
    assert memory[SIZE - 1] == 7


def test_a_fork_has_a_copy() -> None:
    memory = zeros(1)
    child = os.fork()
    if child == 0:
        memory[0] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert memory[0] == 0


def test_the_system_is_asked_for_huge_pages() -> None:
    maps = Path("/proc/self/smaps")
    if not Path("/sys/kernel/mm/transparent_hugepage").exists() or not maps.exists():
        pytest.skip("this system has no huge pages")
    memory = zeros(SIZE)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flags = ""
    for line in maps.read_text().splitlines():
        first, _, values = line.partition(" ")
        if "-" in first:
            start, stop = (int(edge, 16) for edge in first.split("-"))
            inside = start <= place < stop
        elif first == "VmFlags:" and inside:
            flags = values
    assert FLAG in flags.split()
