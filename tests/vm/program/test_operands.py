"""Operands must agree with their buffers; the verifier, decoder, parser and loader check them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

import pytest
import torch

from tests.backends.reference.step_models import APART, DELTA_APART
from tests.backends.reference.stepping import Case
from tests.vm.mutations import changed
from tpcompile.backends.memory import StepMemory
from tpcompile.errors import UnsupportedError, UsageError, VerifyError
from tpcompile.vm.groups import DeltaStep, NormQkvRopeAppend, NormQkvRows
from tpcompile.vm.groups.qkv_operands import Part
from tpcompile.vm.program import Buffer, Format, Program, Role, rules
from tpcompile.vm.program.encoding import decode_program, encode_program
from tpcompile.vm.program.fields import field_rules, field_types
from tpcompile.vm.program.instruction import NONE, Range, StepInstruction
from tpcompile.vm.program.instruction_set import INSTRUCTIONS
from tpcompile.vm.program.names import Names
from tpcompile.vm.program.operands import disagreements, verify_operands
from tpcompile.vm.program.text import format_program, parse_program
from tpcompile.vm.proof.verify import MOST_LISTED, check_program, verify_program

F16 = Format.of(torch.float16)
ONE = Case("tiny-qwen3", lengths=(9, 10))
TWO = Case("tiny-qwen2", 2, lengths=(9, 10), lowering="rows", workers=6, column_splits=2)


@dataclass(frozen=True)
class Mistake:
    """An operand of the first instruction of a kind, and its wrong value."""

    case: Case
    kind: str
    path: str
    change: Callable[[Any], Any]
    said: str


def _half(value: int) -> int:
    return value // 2


MISTAKES = {
    "linear_residual.width / 2": Mistake(ONE, "linear_residual", "at.width", _half, r"width=48"),
    "gate_up normed.width / 2": Mistake(
        ONE, "norm_gate_up_swiglu", "at.normed.width", _half, r"normed.x must be .*width=32"
    ),
    "attention_reduce.spans 2 to 1": Mistake(
        ONE, "attention_reduce", "at.spans", _half, r"values must be .*spans=1"
    ),
    "norm_qkv_rows.first_row - 1": Mistake(
        TWO, "norm_qkv_rows", "at.first_row", lambda row: row - 1, "at least 0, got -1"
    ),
    "norm_qkv_rows.first_row + 1": Mistake(
        TWO, "norm_qkv_rows", "at.first_row", lambda row: row + 1, "first_row must be 0, got 1"
    ),
    "linear_residual.batch": Mistake(ONE, "linear_residual", "at.batch", _half, "batch=1"),
    "argmax.batch": Mistake(ONE, "argmax", "at.batch", _half, "batch=1"),
    "argmax.slots": Mistake(ONE, "argmax", "at.slots", lambda n: n - 1, "best must be .*slots="),
    "all_reduce.slots": Mistake(
        TWO, "all_reduce", "at.slots", lambda n: n + 1, "slots must be .*, got 2"
    ),
    "longest": Mistake(
        ONE, "norm_qkv_rope_append", "at.longest", _half, "cos must be a cos buffer .*longest=32"
    ),
    "qkv most_blocks": Mistake(
        ONE, "norm_qkv_rope_append", "at.most_blocks", _half, r"tables must be .*most_blocks=8"
    ),
    "attention most_blocks": Mistake(
        ONE, "partial_attention", "at.most_blocks", _half, r"tables must be .*most_blocks=8"
    ),
    "qkv block": Mistake(ONE, "norm_qkv_rope_append", "at.block", _half, "stored as"),
    "attention block": Mistake(ONE, "partial_attention", "at.block", _half, "stored as"),
    "head width of qkv": Mistake(ONE, "norm_qkv_rope_append", "at.width", _half, "width=8"),
    "head width of attention": Mistake(ONE, "partial_attention", "at.width", _half, "width=8"),
    "dtype": Mistake(
        ONE,
        "norm_lm_head",
        "at.format",
        lambda _: Format.of(torch.float16),
        "format must be f32, .*, got f16",
    ),
    "an empty window": Mistake(
        ONE, "partial_attention", "at.window", lambda _: 0, "window must be at least 1, got 0"
    ),
    "negative eps": Mistake(
        ONE,
        "norm_lm_head",
        "at.normed.eps",
        lambda _: -1.0,
        "eps must be a finite number.*, got -1.0",
    ),
    "scale is NaN": Mistake(
        ONE,
        "partial_attention",
        "at.scale",
        lambda _: float("nan"),
        "scale must be a finite number, got nan",
    ),
    "width 0": Mistake(
        TWO, "norm_qkv_rows", "at.width", lambda _: 0, "width must be at least 1, got 0"
    ),
    "blocks 0": Mistake(
        TWO, "norm_qkv_rows", "blocks", lambda _: 0, "blocks must be a number from 1 to .*, got 0"
    ),
    "ranks 3 of 2": Mistake(TWO, "all_reduce", "at.ranks", lambda _: 3, "ranks must be 2, got 3"),
    "x of another rank": Mistake(
        TWO, "norm_gate_up_swiglu", "at.normed.x", lambda x: x + 1, "must be a buffer of rank 0"
    ),
    "terms without a rank": Mistake(
        TWO, "all_reduce", "at.terms", lambda terms: terms + 1, "terms must be .*, got buffer"
    ),
    "a bias that is not used": Mistake(
        TWO, "linear_terms", "at.bias", lambda _: 0, "bias must be none.*, got 0"
    ),
    "a missing weight": Mistake(
        ONE, "norm_lm_head", "at.weight", lambda _: NONE, "weight must be .*, got buffer -1"
    ),
    "leaves without columns": Mistake(
        TWO, "linear_terms", "columns", lambda _: Range(0, 1), "a range of length 2 or more"
    ),
    "a sequence out of range": Mistake(
        ONE, "attention_reduce", "sequence", lambda _: 2, "from 0 to 1, got 2"
    ),
    "an empty range": Mistake(
        ONE, "embed", "columns", lambda _: Range(4, 4), "within 0:64, got 4:4"
    ),
}
SWAPS = {
    f"{operand} and {other} of {kind}": (kind, operand, other)
    for kind, operand, other in (
        ("norm_qkv_rope_append", "lengths", "positions"),
        ("norm_qkv_rope_append", "lengths", "tables"),
        ("norm_qkv_rope_append", "positions", "tables"),
        ("norm_qkv_rope_append", "cos", "sin"),
        ("partial_attention", "lengths", "tables"),
        ("argmax", "lengths", "positions"),
        ("argmax", "tokens", "finished"),
    )
}


def _changed(value: Any, path: str, change: Callable[[Any], Any]) -> Any:
    name, _, inner = path.partition(".")
    old = getattr(value, name)
    return replace(value, **{name: _changed(old, inner, change) if inner else change(old)})


def _with(program: Program, kind: str, change: Callable[[Any], Any]) -> Program:
    number = next(
        n for n, instruction in enumerate(program.instructions) if _name(instruction) == kind
    )
    instruction = change(program.instructions[number])
    return replace(program, instructions=changed(program.instructions, number, instruction))


def _name(instruction: Any) -> str:
    name: str = instruction.name
    return name


def mistaken(name: str) -> Program:
    mistake = MISTAKES[name]
    return _with(
        mistake.case.program,
        mistake.kind,
        lambda instruction: _changed(instruction, mistake.path, mistake.change),
    )


def swapped(name: str) -> Program:
    kind, first, second = SWAPS[name]

    def swap(instruction: Any) -> Any:
        new = {first: getattr(instruction.at, second), second: getattr(instruction.at, first)}
        return replace(instruction, at=replace(instruction.at, **new))

    return _with(ONE.program, kind, swap)


def _refused_everywhere(program: Program, message: str) -> None:
    """Assert that verifier, decoder, parser and machine refuse it before computing regions."""
    faults = check_program(program)
    assert any(re.search(message, fault.message) for fault in faults), faults
    with pytest.raises(VerifyError):
        verify_program(program)
    with pytest.raises(VerifyError):
        verify_operands(program)
    with pytest.raises(UsageError, match=r"does not agree.*\(instruction \d+\)"):
        decode_program(encode_program(program), program)
    text = format_program(program)
    with pytest.raises(UsageError) as caught:
        parse_program(text)
    number = re.fullmatch(r"line (\d+)", caught.value.where)
    assert number and re.match(r"  [ai]\d+ ", text.split("\n")[int(number[1]) - 1])


@pytest.mark.parametrize("name", MISTAKES)
def test_an_operand_that_disagrees_is_refused_by_name(name: str) -> None:
    _refused_everywhere(mistaken(name), MISTAKES[name].said)


@pytest.mark.parametrize("name", SWAPS)
def test_buffers_of_one_shape_are_told_apart_by_their_roles(name: str) -> None:
    _, first, second = SWAPS[name]
    _refused_everywhere(swapped(name), f"({first}|{second}) must be .*, got buffer")


@pytest.mark.parametrize("case", [ONE, TWO], ids=["one rank", "two ranks"])
def test_each_part_of_qkv_reads_its_own_rows(case: Case) -> None:
    """Queries, keys and values use consecutive rows of one weight; other rows are refused."""
    program = case.program
    parts = {
        (instruction.at.rank, instruction.at.part): (number, instruction)
        for number, instruction in enumerate(program.instructions)
        if isinstance(instruction, NormQkvRopeAppend | NormQkvRows)
    }
    assert len(parts) == 3 * program.ranks
    for (rank, part), (number, instruction) in parts.items():
        for other in set(Part) - {part}:
            first = parts[rank, other][1].at.first_row
            wrong = replace(instruction, at=replace(instruction.at, first_row=first))
            mutant = replace(program, instructions=changed(program.instructions, number, wrong))
            (fault,) = check_program(mutant)
            assert fault.message.endswith(
                f"first_row must be {instruction.at.first_row}, got {first}"
            )


DELTAS = [replace(ONE, model="tiny-qwen3.5"), replace(TWO, model=DELTA_APART)]
APARTS = [replace(ONE, model=APART), replace(TWO, model=APART)]


@pytest.mark.parametrize("case", APARTS, ids=["one rank", "two ranks"])
def test_a_part_with_a_weight_of_its_own_reads_all_its_rows(case: Case) -> None:
    """Other rows, and the weight of a part with more or fewer heads, are refused."""
    program = case.program
    parts: dict[Part, tuple[int, Any]] = {}
    for number, instruction in enumerate(program.instructions):
        if (
            isinstance(instruction, NormQkvRopeAppend | NormQkvRows)
            and instruction.at.layer == instruction.at.rank == 0
        ):
            parts.setdefault(
                instruction.at.part,
                (number, replace(instruction, at=replace(instruction.at, bias=NONE))),
            )
    weights = {part: instruction.at.weight for part, (_, instruction) in parts.items()}
    many, few = (program.buffers[weights[part]].shape[0] for part in (Part.Q, Part.K))
    wrong: list[tuple[Part, dict[str, int], str]] = [
        *((part, {"first_row": 16}, "first_row must be 0, got 16") for part in Part),
        (Part.Q, {"weight": weights[Part.K]}, f"first_row must be at most {few - many}, got 0"),
        (Part.K, {"weight": weights[Part.Q]}, f"first_row must be {many - 2 * few}, got 0"),
        (Part.V, {"weight": weights[Part.Q]}, f"first_row must be {many - few}, got 0"),
    ]
    for part, operands, message in wrong:
        number, instruction = parts[part]
        other = replace(instruction, at=replace(instruction.at, **operands))
        instructions = changed(program.instructions, number, other)
        (fault,) = check_program(replace(program, instructions=instructions))
        assert fault.message.endswith(message)


def test_a_weight_with_fewer_heads_than_the_cache() -> None:
    """Rows before or after those of the weight are refused."""
    program = APARTS[0].program
    number, instruction = next(
        (number, instruction)
        for number, instruction in enumerate(program.instructions)
        if isinstance(instruction, NormQkvRopeAppend) and instruction.at.part == Part.K
    )
    buffers, weight = list(program.buffers), instruction.at.weight
    assert buffers[weight].shape == (32, 96)
    buffers[weight] = replace(buffers[weight], shape=(16, 96))
    for first in (0, 16):
        other = replace(instruction, at=replace(instruction.at, bias=NONE, first_row=first))
        instructions = changed(program.instructions, number, other)
        mutant = replace(program, buffers=tuple(buffers), instructions=instructions)
        assert any(
            re.search(f"first_row must be .*, got {first}$", fault.message)
            for fault in check_program(mutant)
        )


@pytest.mark.parametrize("case", DELTAS, ids=["fused", "apart"])
def test_gates_of_linear_attention_are_all_columns_of_their_own_or_the_last(case: Case) -> None:
    program = case.program
    number, instruction = next(
        (number, instruction)
        for number, instruction in enumerate(program.instructions)
        if isinstance(instruction, DeltaStep)
    )
    operands = instruction.at
    assert operands.first_z == (operands.channels if operands.z == operands.projected else 0)
    wrong: list[tuple[dict[str, int], str]] = [
        (
            {"first_z": operands.first_z + operands.value},
            f"first_z must be {operands.first_z}, got",
        ),
        ({"z": operands.gates}, "first_z must be"),
        ({"projected": operands.gates}, "channels must be"),
    ]
    for changes, message in wrong:
        other = replace(instruction, at=replace(operands, **changes))
        instructions = changed(program.instructions, number, other)
        faults = check_program(replace(program, instructions=instructions))
        assert any(message in fault.message for fault in faults)


@pytest.mark.parametrize("case", [ONE, TWO, *APARTS, *DELTAS], ids=str)
def test_programs_that_lowering_makes_agree(case: Case) -> None:
    assert list(disagreements(case.program)) == []


def test_the_machine_refuses_a_program_that_nobody_verified() -> None:
    """The machine verifies operands before it loads weights."""
    never: Any = pytest.fail
    with pytest.raises(VerifyError, match="most_blocks"):
        StepMemory(mistaken("attention most_blocks"), lambda rank, name: never(name), never)


@pytest.mark.parametrize("kind", ["sum", "argmax"])
def test_a_million_ranks_are_refused_at_once(kind: str) -> None:
    """Absurd rank counts are refused before any enumeration."""
    text = format_program(TWO.program)
    line = next(line for line in text.split("\n") if re.match(rf"  a\d+ {kind} ", line))
    many = text.replace(line, line.replace("ranks=2", "ranks=1000000"))
    started = time.process_time()
    with pytest.raises(UsageError, match=r"ranks = 1000000. Expected 2"):
        parse_program(many)
    faults = check_program(parse_program(many, check=False))
    assert time.process_time() - started < 5
    assert [fault.rule for fault in faults] == ["operands"]


def test_the_list_of_faults_ends() -> None:
    """The list of faults is truncated, with the number of remaining ones."""
    program = Case("tiny-qwen2", 2, lengths=(9,), lowering="rows", workers=6).program
    wrong = [
        replace(
            instruction, at=replace(instruction.at, format=Format.of(torch.float16))
        )  # each has its own operands
        for instruction in program.instructions
        if isinstance(instruction, StepInstruction) and hasattr(instruction.at, "format")
    ]
    unchanged = [
        instruction
        for instruction in program.instructions
        if not hasattr(instruction.at, "format")  # type: ignore[attr-defined]
    ]
    count = len(program.instructions)
    alone = replace(
        program,
        instructions=(*wrong, *unchanged),
        ranks=1,
        queues=(tuple(range(count)),),
        waits=((),) * count,
        signals=((),) * count,
    )
    by_rank = [instruction.rank for instruction in alone.instructions]
    alone = replace(
        alone,
        ranks=2,
        queues=tuple(tuple(n for n in range(count) if by_rank[n] == rank) for rank in (0, 1)),
    )
    faults = check_program(alone)
    assert len(faults) == MOST_LISTED + 1
    assert faults[-1].rule == "more"
    assert sum(fault.count for fault in faults) == len(wrong)
    with pytest.raises(VerifyError, match=rf"{len(wrong)} faults in all"):
        verify_program(alone)


def test_a_sum_is_added_to_the_residual_unless_it_is_the_embedding() -> None:
    program = TWO.program
    sums = [
        n
        for n, instruction in enumerate(program.instructions)
        if _name(instruction) == "all_reduce"
    ]
    for number in (sums[0], sums[-1]):
        instruction: Any = program.instructions[number]
        of = NONE if instruction.at.residual != NONE else instruction.at.out
        wrong = replace(instruction, at=replace(instruction.at, residual=of))
        faults = check_program(
            replace(program, instructions=changed(program.instructions, number, wrong))
        )
        wanted = "a scratch buffer" if of == NONE else "none, because"
        assert any(f"residual must be {wanted}" in fault.message for fault in faults), faults
    assert program.instructions[sums[0]].at.residual == NONE  # type: ignore[attr-defined]


def test_two_buffers_of_one_role() -> None:
    program = ONE.program
    lengths = next(b for b in program.buffers if b.role == Role.LENGTHS)
    faults = check_program(replace(program, buffers=(*program.buffers, lengths)))
    assert "the only buffer of role lengths" in faults[0].message


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.int64},
        {"role": Role.POSITIONS},
        {"shape": (2, 1)},
        {"shape": (3,)},
    ],
    ids=str,
)
def test_a_buffer_of_another_look(change: dict[str, Any]) -> None:
    program = ONE.program
    buffers = [replace(b, **change) if b.role == Role.LENGTHS else b for b in program.buffers]
    faults = check_program(replace(program, buffers=tuple(buffers)))
    assert any(re.search("lengths must be .*, got buffer", fault.message) for fault in faults), (
        faults
    )


def test_blocks_of_a_head_are_finished_alike() -> None:
    """All blocks of a head must agree, since the last to arrive completes it."""
    program = _with(
        TWO.program,
        "norm_qkv_rows",
        lambda instruction: _changed(instruction, "at.head_eps", lambda _: 0.5),
    )
    faults = check_program(program)
    assert any(f.rule == "heads" and "with different operands" in f.message for f in faults), faults
    program = _with(
        TWO.program,
        "norm_qkv_rows",
        lambda instruction: _changed(instruction, "at.normed.eps", lambda _: 0.5),
    )
    assert check_program(program) == [], "each block computes its own norm"


@lru_cache
def _words() -> tuple[Program, torch.Tensor]:
    return ONE.program, encode_program(ONE.program).words


@pytest.mark.parametrize(("kind", "word"), [("norm_qkv_rope_append", 3), ("linear_residual", 3)])
def test_a_word_that_is_no_value_of_its_operand(kind: str, word: int) -> None:
    program, words = _words()
    number = next(
        n for n, instruction in enumerate(program.instructions) if _name(instruction) == kind
    )
    wrong = words.clone()
    wrong[number, word] = 9
    with pytest.raises(UsageError, match=rf"not valid operands of {kind}.*9 is not a valid"):
        decode_program(replace(encode_program(program), words=wrong), program)


def test_a_bool_is_one_of_two_words() -> None:
    program, words = _words()
    wrong = words.clone()
    wrong[0, 10] = 2
    with pytest.raises(UsageError, match="2 is not a valid bool"):
        decode_program(replace(encode_program(program), words=wrong), program)


def test_decoded_operands_that_are_equal_are_one_object() -> None:
    decoded = decode_program(encode_program(ONE.program), ONE.program)
    shared = [
        instruction.at
        for instruction in decoded.instructions
        if isinstance(instruction, StepInstruction)
    ]
    assert len({id(operands) for operands in shared}) == len(set(shared)) < len(shared)


@pytest.mark.parametrize("kind", INSTRUCTIONS.values(), ids=lambda kind: kind.name)
def test_every_number_has_a_rule(kind: type[StepInstruction]) -> None:
    """All operands have a rule, since one without could contradict a buffer."""
    types: dict[str, Any] = dict(field_types(kind))
    instead = field_rules(kind).get("at", {})
    assert _without(types.pop("at"), set(instead)) == []
    assert [name for name in types if name not in field_rules(kind)] == []


def _without(kind: Any, known: set[str]) -> list[str]:
    known = known | set(field_rules(kind))
    names = []
    for field in fields(kind):
        inner = dict(field_types(kind))[field.name]
        if is_dataclass(inner):
            names += _without(inner, set())
        elif inner in (int, float, Range) and field.name not in known:
            names.append(field.name)
    return names


def test_abstract_programs_have_no_operands() -> None:
    assert list(disagreements(Program((Buffer("b", (1,)),), (), ((),), (), ()))) == []


def _with_extra(rule: Any, extra: int) -> Program:
    """Return a program in which one instruction has an additional operand with this rule."""
    program = replace(ONE, lowering="rows").program
    number, first = next(
        (n, instruction)
        for n, instruction in enumerate(program.instructions)
        if isinstance(instruction, NormQkvRows)
    )
    kind: Any = make_dataclass(
        "Extended", [("extra", Annotated[int, rule])], bases=(NormQkvRows,), frozen=True
    )
    other = kind(**{field.name: getattr(first, field.name) for field in fields(first)}, extra=extra)
    instructions = (*program.instructions[:number], other, *program.instructions[number + 1 :])
    return replace(program, instructions=instructions)


def test_an_own_number_without_a_limit() -> None:
    assert not list(disagreements(_with_extra(rules.COUNT, 2**31 - 1)))
    (disagreement,) = disagreements(_with_extra(rules.COUNT, 0))
    assert (disagreement.problem.operand, disagreement.problem.got) == ("extra", "0")


@pytest.mark.parametrize("rule", [rules.Real(0.0), rules.RANKS, rules.Missing()], ids=repr)
def test_a_rule_that_own_operands_cannot_have(rule: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"rule of extra is not supported.*operands `at`"):
        list(disagreements(_with_extra(rule, 1)))


def test_a_dimension_with_two_free_names_is_refused() -> None:
    program = ONE.program
    names = Names(program.instructions[0].at, 1)  # type: ignore[attr-defined]
    assert names.bind(12, "4*free", "", bound := {}) and bound == {"free": 3}
    with pytest.raises(UnsupportedError, match=r"two free names.*free and other"):
        names.bind(12, "free*other", "", {})
