"""Buffers that cannot be what they say: refused, whether or not an instruction uses them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.backends.reference.stepping import Case, place
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference import Machine
from tpcompile.errors import CompileError, UsageError, VerifyError
from tpcompile.ir.dtypes import DType
from tpcompile.vm.program import Buffer, Format, Program, Role
from tpcompile.vm.program.encoding import decode_program, encode_program
from tpcompile.vm.program.text import format_program, parse_program
from tpcompile.vm.proof.verify import check_program, verify_program

CASE = Case("tiny-qwen2", 2, lengths=(9,), lowering="rows", workers=6)
UNUSED = Buffer("unused", (2, 3))
INT4 = {"role": Role.WEIGHT, "dtype": torch.int32, "format": Format.int4(torch.float16, 64)}
MISTAKES: dict[str, tuple[Role | None, dict[str, Any], str]] = {
    "storage of a scratch": (Role.SCRATCH, {"storage": (1, 1)}, r"storage of .* \(1, 1\).*None"),
    "storage of a weight": (Role.WEIGHT, {"storage": (1, 1)}, "storage of .*only the cache"),
    "storage of an input": (Role.TABLES, {"storage": (1,)}, "storage of .*only the cache"),
    "storage of the same shape": (Role.LENGTHS, {"storage": (1,)}, "only the cache"),
    "a cache without storage": (Role.CACHE, {"storage": None}, "storage of .*5 extents"),
    "a cache stored in four": (Role.CACHE, {"storage": (2, 2, 64, 16)}, "5 extents"),
    "a negative extent": (None, {"shape": (-1, 3)}, r"shape of .*\(-1, 3\).*at least 1"),
    "an extent of 0": (None, {"shape": (0,)}, "extents of at least 1"),
    "float64": (None, {"dtype": torch.float64}, r"dtype of .*torch\.float64.*torch\.bfloat16"),
    "a weight in float64": (Role.WEIGHT, {"dtype": torch.float64}, "dtype of .*float64"),
    "logits in float64": (Role.LOGITS, {"dtype": torch.float64}, "dtype of .*float64"),
    "a column within 16": (None, {**INT4, "first": 8}, "first of .*8.*a multiple of 16"),
    "a negative column": (None, {**INT4, "first": -16}, "first of .*-16.*first column"),
    "a column of a weight in its values": (Role.WEIGHT, {"first": 16}, "first of .*in a format"),
    "int4 in int8": (None, {**INT4, "dtype": torch.int8}, "format of .*cache in i8"),
    "a format of scratch": (None, {**INT4, "role": Role.SCRATCH}, "format of .*int4:64"),
    "no such rank": (None, {"rank": 2}, "rank of .*2.*from 0 to 1"),
    "a negative rank": (None, {"rank": -1}, "rank of .*-1.*from 0 to 1"),
}


def _with(changes: dict[str, Any], role: Role | None) -> Program:
    """Change the first buffer of a role, or else add a changed buffer that nothing uses."""
    buffers = [*CASE.program.buffers, UNUSED]
    roles = [buffer.role for buffer in buffers]
    number = len(buffers) - 1 if role is None else roles.index(role)
    buffers[number] = replace(buffers[number], **changes)
    return replace(CASE.program, buffers=tuple(buffers))


def _never(rank: int, name: str) -> torch.Tensor:
    raise AssertionError("a wrong buffer was allocated")


@pytest.mark.parametrize(("role", "changes", "message"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_wrong_buffer_is_refused(
    role: Role | None, changes: dict[str, Any], message: str
) -> None:
    wrong = _with(changes, role)
    assert [fault.rule for fault in check_program(wrong)] == ["buffer"]
    with pytest.raises(VerifyError, match=message):
        verify_program(wrong)
    with pytest.raises(VerifyError, match=message):
        StepMemory(wrong, _never, CASE.rotation)
    with pytest.raises(UsageError, match=message):
        decode_program(encode_program(CASE.program), wrong)


@pytest.mark.parametrize("name", ["storage of a scratch", "a cache without storage"])
def test_the_parser_names_the_line_of_a_wrong_buffer(name: str) -> None:
    role, changes, message = MISTAKES[name]
    text = format_program(_with(changes, role))
    with pytest.raises(UsageError, match=rf"not valid.*line \d+.*{message}") as caught:
        parse_program(text)
    line = int(re.findall(r"line (\d+)", caught.value.where)[0])
    assert role is not None and f"role={role.word}" in text.splitlines()[line - 1]
    assert parse_program(text, check=False).buffers != CASE.program.buffers


def _others(old: Buffer) -> Iterator[dict[str, Any]]:
    """Other values of each field of a buffer."""
    for name in ("shape", "storage"):
        shape = old.shape if name == "shape" else old.extents
        yield from (
            {name: extents} for extents in ((), (1, 1), shape, shape[::-1], (math.prod(shape),))
        )
        for dim, extent in enumerate(shape):
            for other in (extent + 1, extent - 1, 2 * extent, extent // 2, 0, -1):
                yield {name: (*shape[:dim], other, *shape[dim + 1 :])}
    yield {"storage": None}
    yield from ({"role": role} for role in Role)
    yield from ({"dtype": dtype} for dtype in (*(d.torch for d in DType), torch.float64))
    yield from ({"rank": rank} for rank in (-1, old.rank + 1))


def test_accepted_buffers_run_on_the_reference_machine() -> None:
    """No field of a buffer can be changed such that the program is accepted and then raises."""
    original = CASE.memory()
    tensors = {
        (b.rank, b.name): t for b, t in zip(original.program.buffers, original.tensors, strict=True)
    }
    caches, ran = original.values(Role.CACHE), 0
    for role in (None, *(candidate for candidate in Role if candidate in CASE.program.roles)):
        buffer = (
            UNUSED if role is None else next(b for b in original.program.buffers if b.role == role)
        )
        for changes in _others(buffer):
            program = _with(changes, role)
            if check_program(program):
                continue
            try:
                memory = StepMemory(program, lambda r, n: tensors.get((r, n), UNIT), CASE.rotation)
                memory.use_caches([cache.clone() for cache in caches])
                machine = Machine(memory)
            except CompileError:  # weights that do not fit, or two buffers of one role
                continue
            place(machine, CASE)
            machine.run(1)
            ran += 1
    assert ran > len(Role)


UNIT = torch.ones(2, 3)
"""The tensor of `UNUSED`, if it is a weight."""
