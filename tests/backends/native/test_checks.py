"""The native library itself refuses damaged words, lists and tables, before its threads start."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from tests.backends.native.damage import CASES, Damaged, word
from tests.backends.programs import memory_of
from tests.backends.reference.step_models import APART, INT4, RELU2
from tests.backends.reference.stepping import Case
from tests.vm.mutants.bases import FineCase
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.native import Native, executor
from tpcompile.errors import UsageError, VerifyError
from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import Format, Kind
from tpcompile.vm.groups.qkv_operands import Part
from tpcompile.vm.program import Role
from tpcompile.vm.program.abi import column_offsets, constants, layout
from tpcompile.vm.program.encoding import EncodedProgram, decode_program, encode_program
from tpcompile.vm.program.instruction import NONE
from tpcompile.vm.program.instruction_set import INSTRUCTIONS

CASE = Case("tiny-qwen3", tp=2)
NAMES = constants()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[StepMemory, EncodedProgram], str]:
    """Open a program without the checks of Python, and return the refusal of the library."""
    monkeypatch.setattr(executor, "verify_program", lambda program: None)
    monkeypatch.setattr(executor, "check_table", lambda table, memory: None)

    def refusal(memory: StepMemory, encoded: EncodedProgram) -> str:
        monkeypatch.setattr(executor, "encode_program", lambda program: encoded)
        try:
            Native(memory).close()
        except VerifyError as error:
            return str(error)
        return ""

    return refusal


Opened = Callable[[StepMemory, EncodedProgram], str]


def test_a_right_program(opened: Opened) -> None:
    alone = replace(CASE, tp=1, workers=1)
    assert not alone.program.counters, "a single worker needs none"
    for case in (CASE, alone, *CASES):
        assert opened(case.memory(), encode_program(case.program)) == ""


@pytest.mark.parametrize(
    ("operand", "value", "message"),
    [
        ("ARGMAX_HISTORY", 10_000, r"argmax.history is buffer 10000 of \d+ buffers"),
        ("ARGMAX_CLOCK", 0, r"argmax.clock is buffer 0, whose role is wrong"),
        ("ARGMAX_STEPS", 2**20, r"argmax.history is buffer \d+, whose shape is wrong"),
        ("ARGMAX_RANKS", 3, "argmax.ranks is 3, expected a number equal to 2"),
        ("ARGMAX_LAYER", -2, "argmax.layer is -2, expected a number at least -1"),
        ("NORM_LM_HEAD_ROWS", -1, "norm_lm_head.rows is -1, expected a number at least 0"),
        ("NORM_LM_HEAD_SLOT", 99, r"norm_lm_head.slot is 99, expected a number at most \d+"),
        ("NORM_LM_HEAD_BIAS", -2, "norm_lm_head.bias is buffer -2"),
        ("LINEAR_TERMS_RESIDUAL", 0, "linear_terms.residual is 0, expected a number equal to -1"),
        ("NORM_QKV_ROPE_APPEND_PART", 3, "norm_qkv_rope_append.part is 3"),
        ("NORM_QKV_ROPE_APPEND_BLOCK", 17, r"is buffer \d+, whose block is wrong"),
        ("EMBED_FORMAT", 2, "embed.format is 2, expected a number equal to 1"),
    ],
)
def test_operands(opened: Opened, operand: str, value: int, message: str) -> None:
    encoded = encode_program(CASE.program)
    kind = next(kind for kind in INSTRUCTIONS if operand.startswith(f"{kind.upper()}_"))
    opcode = INSTRUCTIONS[kind].opcode
    encoded.words[int((encoded.words[:, 0] == opcode).nonzero()[0]), NAMES[operand]] = value
    assert re.search(message, opened(CASE.memory(), encoded))


def test_an_opcode_without_a_kernel(opened: Opened) -> None:
    for opcode in (-1, 0, len(INSTRUCTIONS) + 1, 255, 256, 2**31 - 1):
        encoded = encode_program(CASE.program)
        encoded.words[3, 0] = opcode
        assert f"the opcode {opcode} has no kernel" in opened(CASE.memory(), encoded)


@pytest.mark.parametrize(
    ("operand", "value", "message"),
    [
        ("SIDES", 0, "norm_up_activation.sides is 0, expected a number at least 1"),
        ("SIDES", 2, r"norm_up_activation.weight is buffer \d+, whose shape is wrong"),
        ("ACTIVATION", 0, "norm_up_activation.activation is 0, expected a number at least 1"),
        ("ACTIVATION", 6, "norm_up_activation.activation is 6, expected a number at most 5"),
    ],
)
def test_operands_of_an_activation(opened: Opened, operand: str, value: int, message: str) -> None:
    case = Case(RELU2)
    encoded = encode_program(case.program)
    first = int((encoded.words[:, 0] == NAMES["OP_NORM_UP_ACTIVATION"]).nonzero()[0])
    encoded.words[first, NAMES[f"NORM_UP_ACTIVATION_{operand}"]] = value
    assert re.search(message, opened(case.memory(), encoded))


@pytest.mark.parametrize(
    ("part", "operand", "value", "message"),
    [
        (Part.Q, "FIRST_ROW", 16, "first_row is 16, expected a number at most 0"),
        (Part.K, "FIRST_ROW", 16, "first_row is 16, expected a number at most 0"),
        (Part.V, "FIRST_ROW", 16, "first_row is 16, expected a number equal to 0"),
        (Part.Q, "WEIGHT", Part.K, "first_row is 0, expected a number at most -64"),
        (Part.K, "WEIGHT", Part.Q, "first_row is 0, expected a number equal to 32"),
        (Part.V, "WEIGHT", Part.Q, "first_row is 0, expected a number equal to 64"),
    ],
)
def test_a_part_with_a_weight_of_its_own(
    opened: Opened, part: Part, operand: str, value: int, message: str
) -> None:
    case = Case(APART)
    words = (encoded := encode_program(case.program)).words
    selected = words[:, 0] == NAMES["OP_NORM_QKV_ROPE_APPEND"]
    first = {
        kind: int((selected & (words[:, NAMES["NORM_QKV_ROPE_APPEND_PART"]] == kind)).nonzero()[0])
        for kind in Part
    }
    column = NAMES[f"NORM_QKV_ROPE_APPEND_{operand}"]
    words[first[part], NAMES["NORM_QKV_ROPE_APPEND_BIAS"]] = NONE
    assert opened(case.memory(), encoded) == ""
    words[first[part], column] = words[first[Part(value)], column] if operand == "WEIGHT" else value
    assert re.search(message, opened(case.memory(), encoded))


def test_a_gate_of_another_shape(opened: Opened) -> None:
    case = Case(APART)
    encoded = encode_program(case.program)
    first = int((encoded.words[:, 0] == NAMES["OP_NORM_GATED_UP"]).nonzero()[0])
    residual = encoded.words[first, NAMES["NORM_GATED_UP_NORMED_X"]]
    encoded.words[first, NAMES["NORM_GATED_UP_GATE"]] = residual
    message = r"norm_gated_up.gate is buffer \d+, whose shape is wrong"
    assert re.search(message, opened(case.memory(), encoded))


@pytest.mark.parametrize("name", ["queues", "waits", "signals"])
@pytest.mark.parametrize(
    ("part", "value"), [("values", 2**30), ("values", -(2**30)), ("offsets", 2**30)]
)
def test_lists(opened: Opened, name: str, part: str, value: int) -> None:
    encoded = encode_program(CASE.program)
    getattr(getattr(encoded, name), part).view(-1)[1] = value
    assert name in opened(CASE.memory(), encoded)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("address", 0, "address is wrong"),
        ("address", -64, "address is wrong"),
        ("role", Role.COS, "role is wrong|is buffer -1"),
        ("rank", 1, "rank is wrong|is buffer -1"),
        ("dtype", DType.BF16, "dtype|format"),
        ("dtype", DType.I64, "dtype"),
        ("block", 3, "block is wrong"),
        ("dims", 1, "number of dimensions is wrong"),
        ("dims", 2**40, "number of dimensions is wrong"),
        ("shape", 0, "shape is wrong"),
        ("shape", -1, "shape is wrong"),
        ("strides", 2**40, "layout is wrong"),
        ("strides", -1, "layout is wrong"),
    ],
)
def test_the_table(opened: Opened, column: str, value: int, message: str) -> None:
    roles = (Role.CACHE,) if column == "block" else (Role.WEIGHT, Role.CACHE)
    for role in roles:
        memory = CASE.memory()
        numbered = enumerate(memory.program.buffers)
        number = next(n for n, b in numbered if b.role == role and len(b.shape) > 1)
        table = memory.table()
        table[number, column_offsets()[column]] = value
        memory.table = lambda table=table: table  # type: ignore[method-assign]
        assert re.search(message, opened(memory, encode_program(CASE.program))), role


def test_dtypes_without_a_kernel(opened: Opened) -> None:
    """The table has a dtype of its own for weights with one dimension, which no kernel takes."""
    memory = CASE.memory()
    table, columns = memory.table(), column_offsets()
    vectors = (table[:, columns["role"]] == Role.WEIGHT) & (table[:, columns["dims"]] == 1)
    table[vectors, columns["dtype"]] = table[vectors, columns["format"]] = DType.BF16
    memory.table = lambda: table  # type: ignore[method-assign]
    message = r"has no kernel for the dtypes 1 of values, 1 of weights, 2 of norms and biases"
    assert re.search(message, opened(memory, encode_program(CASE.program)))


def test_words_that_python_refuses(opened: Opened) -> None:
    """The library refuses each damaged operand that the rules in Python refuse."""
    refused = 0
    for seed in range(240):
        case = CASES[seed % len(CASES)]
        damaged = word(Random(seed), Damaged(encode_program(case.program), case.program))
        if _is_about_memory(case, damaged) and _is_refused(damaged):
            refused += 1
            assert opened(case.memory(), damaged.encoded), damaged.what
    assert refused > 100


def _is_refused(damaged: Damaged) -> bool:
    try:
        decode_program(damaged.encoded, damaged.like)
    except UsageError:
        return True
    return False


def _is_about_memory(case: FineCase, damaged: Damaged) -> bool:
    """Return whether the changed word is an operand, and no float, which kernels compute with."""
    changed = (damaged.encoded.words != encode_program(case.program).words).nonzero()
    number, column = changed[0].tolist()
    if column == 0:
        return True
    kind = type(case.program.instructions[number])
    kinds = {place: f.kind for f in layout(kind) for place in range(f.offset, f.offset + f.words)}
    return kinds.get(column) not in (None, float)


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("scales", -(2**62), "layout"),
        ("scales", 1, "layout"),
        ("offsets", 64, "layout"),
        ("first", 8, "layout"),
        ("first", 2**40, "layout"),
        ("strides", 1, "layout"),
        ("dtype", DType.I8 - DType.I32, "dtype"),
        ("format", 1 << 8, "equal to"),
        ("format", 64 << 16, "equal to"),
    ],
)
def test_components_of_a_weight(opened: Opened, column: str, change: int, message: str) -> None:
    """A row describes all components of a weight of few bits."""
    whole, memory = (
        memory_of("tiny-qwen3", torch.float32, 2, 1, few_bits="int4:64") for _ in range(2)
    )
    assert opened(whole, encode_program(whole.program)) == ""
    table, columns = memory.table(), column_offsets()
    few = (table[:, columns["format"]] != table[:, columns["dtype"]]).nonzero()
    table[few[0], columns[column]] += change
    memory.table = lambda: table  # type: ignore[method-assign]
    assert message in opened(memory, encode_program(memory.program))


IN_FORMATS = Case(INT4, tp=2)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("offsets", 0, "layout is wrong"),
        ("offsets", -64, "layout is wrong"),
        ("scales", 0, "layout is wrong"),
        ("scales", 2**63 - 8, "layout is wrong"),
        ("format", Format.int4(torch.float32, 32), "layout is wrong"),
        ("format", Format.int4(torch.float32, 64, offsets=True), "format is .*, expected"),
        ("format", Format.int8(torch.float32, 32, offsets=True), "dtype is wrong|expected"),
        ("format", Kind.F32, "dtype is wrong|expected a number equal to"),
        ("format", 2**40, "dtype is wrong|expected a number equal to"),
        ("first", -16, "layout is wrong"),
        ("first", 2**31, "layout is wrong"),
    ],
)
def test_the_row_of_a_weight_with_offsets(
    opened: Opened, column: str, value: int, message: str
) -> None:
    memory, encoded = IN_FORMATS.memory(), encode_program(IN_FORMATS.program)
    assert opened(IN_FORMATS.memory(), encoded) == ""
    table = memory.table()
    few = next(n for n, buffer in enumerate(memory.program.buffers) if buffer.format is not None)
    table[few, column_offsets()[column]] = value
    memory.table = lambda: table  # type: ignore[method-assign]
    assert re.search(message, opened(memory, encoded))


@pytest.mark.parametrize("name", ["linear_terms", "norm_qkv_rope_append", "norm_gate_up_swiglu"])
@pytest.mark.parametrize(
    "wrong", [0, Kind.F32, Format.int4(torch.float32, 32), Format.int4(torch.bfloat16, 32), -1]
)
def test_the_format_of_an_instruction(opened: Opened, name: str, wrong: int) -> None:
    encoded = encode_program(IN_FORMATS.program)
    rows = (encoded.words[:, 0] == INSTRUCTIONS[name].opcode).nonzero()
    encoded.words[int(rows[0]), NAMES[f"{name.upper()}_FORMAT"]] = wrong
    message = opened(IN_FORMATS.memory(), encoded)
    assert f"{name}.format is {int(wrong)}, expected a number equal to" in message
    with pytest.raises(UsageError, match="format"):
        decode_program(encoded, IN_FORMATS.program)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", None, "Found weight = buffer"),
        ("format", Format.int4(torch.float32, 32), "format"),
        ("format", Format.int8(torch.float32, 32), "format of buffer"),
        ("first", 8, "first of buffer"),
        ("first", -16, "first of buffer"),
        ("first", 2**31, "first of buffer"),
        ("dtype", torch.int8, "format of buffer"),
        ("role", Role.SCRATCH, "format of buffer"),
    ],
)
def test_the_fields_of_a_weight_of_few_bits(field: str, value: Any, message: str) -> None:
    buffers = list(IN_FORMATS.program.buffers)
    few = next(n for n, buffer in enumerate(buffers) if buffer.format is not None)
    buffers[few] = replace(buffers[few], **{field: value})
    damaged = replace(IN_FORMATS.program, buffers=tuple(buffers))
    with pytest.raises(UsageError, match=message):
        decode_program(encode_program(IN_FORMATS.program), damaged)
