"""The generated binary interface agrees with the encoding of programs."""

from __future__ import annotations

import shutil
import subprocess
from enum import IntEnum
from pathlib import Path

import pytest
import torch

from tests.vm.groups.lowered import CASES, lowered
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.vm.groups import LinearTerms, NormLmHead
from tpcompile.vm.program import Buffer, DType, Role, abi
from tpcompile.vm.program.instruction import Range, StepInstruction, word_count, words_of
from tpcompile.vm.program.instruction_set import INSTRUCTIONS, encode

COMPILER = shutil.which("cc")


def _one_of_each() -> dict[str, StepInstruction]:
    instructions: dict[str, StepInstruction] = {}
    for case in CASES:
        for instruction in lowered(case).instructions:
            instructions.setdefault(instruction.name, instruction)
    assert set(instructions) == set(INSTRUCTIONS)
    return instructions


@pytest.mark.parametrize("kind", INSTRUCTIONS.values(), ids=lambda kind: kind.name)
def test_fields_are_the_words_of_a_row(kind: type[StepInstruction]) -> None:
    fields = abi.layout(kind)
    assert [field.offset for field in fields] == [
        1 + sum(before.words for before in fields[:place]) for place in range(len(fields))
    ]
    assert fields[-1].offset + fields[-1].words == 1 + word_count(kind)
    assert len({field.name for field in fields}) == len(fields)


def test_a_field_has_the_value_of_its_operand() -> None:
    """Fields have their operand's value: shared, nested, own and repeated ones."""
    instructions = _one_of_each()

    def word(name: str, field: str) -> list[int]:
        instruction = instructions[name]
        (entry,) = (f for f in abi.layout(type(instruction)) if f.name == field)
        return encode(instruction)[entry.offset : entry.offset + entry.words]

    terms, head = instructions["linear_terms"], instructions["norm_lm_head"]
    assert isinstance(terms, LinearTerms) and isinstance(head, NormLmHead)
    assert word("linear_terms", "width") == [terms.at.width]
    assert word("linear_terms", "columns") == list(terms.columns)
    assert word("linear_terms", "leaves") == [terms.at.leaves]
    assert word("linear_terms", "own_leaves") == [terms.leaves]
    assert word("norm_lm_head", "normed_width") == [head.at.normed.width]
    assert word("norm_lm_head", "normed_eps") == list(words_of(head.at.normed.eps))
    assert word("norm_lm_head", "slot") == [head.slot]


def test_constants_are_numbers_of_the_interface() -> None:
    constants = abi.constants()
    assert constants["ABI_VERSION"] == abi.VERSION
    assert constants["ROW_WORDS"] == INSTRUCTIONS.words
    assert constants["OP_ARGMAX"] == 11
    assert constants["DTYPE_BF16"] == 2
    assert constants["SITE_MLP"] == 2
    (eps,) = (f for f in abi.layout(INSTRUCTIONS["norm_lm_head"]) if f.name == "normed_eps")
    assert constants["NORM_LM_HEAD_NORMED_EPS"] == eps.offset
    fields = sum(len(abi.layout(kind)) for kind in INSTRUCTIONS.values())
    members = sum(len(enumeration) for enumeration in abi.enumerations().values())
    names = 2 + len(INSTRUCTIONS) + len(abi.COLUMNS) + members + fields
    assert len(constants) == names, "names must be unique"
    assert constants["BUFFER_ROLE"] == 1 and constants["ROLE_LOGITS"] == 3


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_c_reads_what_python_wrote(tmp_path: Path) -> None:
    """A C program reads all fields of one row per kind through the header's structs."""
    (tmp_path / "tpc_abi.h").write_text(abi.c_header())
    lines = ['#include "tpc_abi.h"', "#include <stdio.h>", "#include <string.h>"]
    lines += [f"int rows[][TPC_ROW_WORDS] = {{{','.join(map(_braced, _one_of_each().values()))}}};"]
    lines += ["int bits(const void *at) { int word; memcpy(&word, at, 4); return word; }"]
    lines += ["int main(void) {"]
    expected: list[int] = []
    for number, instruction in enumerate(_one_of_each().values()):
        struct = f"((tpc_{instruction.name} *)rows[{number}])"
        lines.append(
            f'  _Static_assert(sizeof(tpc_{instruction.name}) <= 4 * TPC_ROW_WORDS, "too wide");'
        )
        row = encode(instruction)
        for field in abi.layout(type(instruction)):
            ends = (".start", ".stop") if field.kind is Range else ("",)
            lines += [f'  printf("%d\\n", bits(&{struct}->{field.name}{end}));' for end in ends]
            expected += row[field.offset : field.offset + field.words]
        lines.append(f'  printf("%d\\n", {struct}->opcode == TPC_OP_{instruction.name.upper()});')
        expected.append(1)
    lines += ["  return 0;", "}"]
    assert _printed_by(lines, tmp_path) == expected


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_c_reads_the_table_of_buffers(tmp_path: Path) -> None:
    """A C program reads all columns, of a cache and a weight, through the header's struct."""
    cache = Buffer("cache", (1, 2, 2, 3, 2), torch.bfloat16, 1, Role.CACHE, (1, 2, 64, 3, 8))
    weight = Buffer("w", (5, 7), role=Role.WEIGHT)
    held = torch.empty(1, 2, 3, 64, 8, dtype=torch.bfloat16).transpose(2, 3)
    rows = [abi.buffer_row(cache, held, 16), abi.buffer_row(weight, torch.empty(5, 7), 16)]
    (tmp_path / "tpc_abi.h").write_text(abi.c_header())
    lines = ['#include "tpc_abi.h"', "#include <stdio.h>", "int main(void) {"]
    lines += [f"  static const int64_t rows[][{len(rows[0])}] = {{"]
    lines += [f"    {{{','.join(map(str, row))}}}," for row in rows]
    lines += ["  };", f'  _Static_assert(sizeof(tpc_buffer) == {8 * len(rows[0])}, "size");']
    expected: list[int] = []
    for number, row in enumerate(rows):
        lines.append(f"  const tpc_buffer *b{number} = (const tpc_buffer *)rows[{number}];")
        for name, offset in abi.column_offsets().items():
            width = abi.COLUMNS[name]
            members = [name] if width == 1 else [f"{name}[{dim}]" for dim in range(width)]
            lines += [f'  printf("%lld\\n", (long long)b{number}->{member});' for member in members]
            expected += row[offset : offset + width]
    lines += ["  return 0;", "}"]
    assert _printed_by(lines, tmp_path) == expected
    assert rows[0][1:6] == [Role.CACHE, 1, DType.BF16, 16, 5]
    assert rows[0][6:] == [1, 2, 64, 3, 8, 3072, 1536, 8, 512, 1, DType.BF16, *[0] * 7]
    assert rows[1][4:] == [0, 2, 5, 7, 0, 0, 0, 7, 1, 0, 0, 0, DType.F32, *[0] * 7]


def _printed_by(lines: list[str], directory: Path) -> list[int]:
    """Compile a C program, run it, and return the numbers that it prints."""
    assert COMPILER is not None
    source, program = directory / "rows.c", str(directory / "rows")
    source.write_text("\n".join(lines))
    command = [COMPILER, "-Wall", "-Werror", "-fno-strict-aliasing", "-std=c11", "-o", program]
    subprocess.run([*command, str(source)], check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    return list(map(int, done.stdout.split()))


def _braced(instruction: StepInstruction) -> str:
    return "{" + ",".join(map(str, encode(instruction))) + "}"


def test_enumerations_have_names_of_their_own() -> None:
    enumerations = abi.enumerations()
    names = {"Activation", "DType", "Kind", "Part", "Role", "Scales", "Site", "Wanted"}
    assert set(enumerations) == names
    assert all(issubclass(enumeration, IntEnum) for enumeration in enumerations.values())


def test_dtypes() -> None:
    assert DType.of(torch.bfloat16) == DType.BF16
    with pytest.raises(UnsupportedError, match=r"torch\.float64.*torch\.float32"):
        DType.of(torch.float64)


def test_another_version_is_refused() -> None:
    abi.check_version(abi.VERSION, "native")
    other = abi.VERSION + 1
    with pytest.raises(UsageError, match=rf"native was built for another.*version {other}.*again"):
        abi.check_version(other, "native")


def test_a_buffer_with_more_dimensions_than_a_row_holds() -> None:
    buffer = Buffer("deep", (1,) * 6)
    with pytest.raises(UnsupportedError, match=r"deep has too many dimensions.*at most 5"):
        abi.buffer_row(buffer, torch.zeros(buffer.shape), 1)
