"""Dumps of programs, their memory and what launches leave behind, for the driver in C++.

A dump is a sequence of sections, each the number of its bytes as int64 and then the bytes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import torch

from tpcompile.backends.native import Native
from tpcompile.vm.program import Role
from tpcompile.vm.program.encoding import encode_program, families, first_weights
from tpcompile.vm.program.weight import Weight

KEPT = (Role.LOGITS, Role.TOKENS, Role.LENGTHS, Role.POSITIONS, Role.HISTORY, Role.CACHE)
"""What is compared after each launch, but for keys and values that are rounded to 8 bits."""


def write_dump(
    file: Path,
    native: Native,
    *,
    launches: int,
    steps: int,
    tolerance: float,
) -> None:
    """Write the program and memory of an executor whose inputs are placed, and what each launch
    leaves behind."""
    memory, program = native.memory, native.memory.program
    encoded = encode_program(program)
    with file.open("wb") as out:
        _section(
            out, _numbers(program.counters, len(program.queues), program.sharing, launches, steps)
        )
        _section(out, _bytes(encoded.words))
        for lists in (encoded.queues, encoded.waits, encoded.signals):
            _section(out, _bytes(lists.offsets))
            _section(out, _bytes(lists.values))
        _section(out, _bytes(encoded.totals))
        _section(out, _bytes(first_weights(program)))
        _section(out, _bytes(families(program)))
        _section(out, _bytes(memory.table()))
        for held in memory.tensors:
            for tensor in held.parts.values() if isinstance(held, Weight) else (held,):
                _section(out, _bytes(_stored(tensor)))
        for _ in range(launches):
            assert native.run(steps).shape[0] == steps
            numbers = [
                number
                for number, buffer in enumerate(program.buffers)
                if buffer.role in KEPT and buffer.format is None
            ]
            _section(out, struct.pack("<d", tolerance))
            _section(out, _bytes(torch.tensor(numbers, dtype=torch.int32)))
            for number in numbers:
                _section(out, _bytes(_stored(memory.tensors[number])))


def _numbers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of memory; strides have no gaps."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.permute(order).contiguous()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _section(out: BinaryIO, data: bytes) -> None:
    out.write(_numbers(len(data)) + data)
