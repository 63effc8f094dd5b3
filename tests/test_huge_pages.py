"""Tests of memory in huge pages."""

from __future__ import annotations

import ctypes
import os

import torch

from tests.pages import asks_for_huge_pages
from tpcompile.huge_pages import allocated, zeros

SIZE = 8 << 20


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
    memory = zeros(SIZE)
    assert asks_for_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def test_tensors_are_zero_and_in_huge_pages() -> None:
    tensor = allocated((2, SIZE), torch.bfloat16, torch.device("cpu"))
    assert tensor.shape == (2, SIZE) and not tensor.any()
    assert asks_for_huge_pages(tensor.data_ptr())


def test_an_empty_tensor_has_no_memory() -> None:
    assert allocated((0, 3), torch.float32, torch.device("cpu")).shape == (0, 3)
