"""Program text round-trips, and errors in it are reported with their line."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vm.groups.lowered import CASES, Case, step_program
from tests.vm.groups.operands import INT32
from tests.vm.groups.operands import instructions as any_instructions
from tests.vm.programs import Touch
from tpcompile.errors import UsageError
from tpcompile.ir.dtypes import DTYPES
from tpcompile.vm.groups import Embed, NormGateUpSwiglu
from tpcompile.vm.groups.embed import EmbedOperands
from tpcompile.vm.groups.mlp import GateUpOperands
from tpcompile.vm.groups.normed import Normed
from tpcompile.vm.program import Buffer, Format, Program, Role, Wait
from tpcompile.vm.program.fields import field_types
from tpcompile.vm.program.instruction import NONE, Range, StepInstruction, to_fp32
from tpcompile.vm.program.text import format_layer, format_program, parse_program
from tpcompile.vm.program.text.values import run_of, runs_of
from tpcompile.vm.schedule.policies import POLICIES

SMALL = Case(batch=1)
BF16 = Format.of(torch.bfloat16)
FORMATS = (Format.int8(torch.bfloat16, 64), Format.int4(torch.float16, offsets=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_that_lowering_makes_round_trip(case: Case, policy: str) -> None:
    program = step_program(case, policy)
    text = format_program(program)
    parsed = parse_program(text)
    assert parsed == program
    assert format_program(parsed) == text


def test_operands_that_are_equal_are_one_object() -> None:
    program = parse_program(format_program(step_program(CASES[0])))
    shared = [i.at for i in program.instructions if isinstance(i, StepInstruction)]
    assert len({id(operands) for operands in shared}) == len(set(shared)) < len(shared)
    normed = [operands.normed for operands in shared if hasattr(operands, "normed")]
    assert len({id(norm) for norm in normed}) == len(set(normed))


def test_the_text_of_a_small_program() -> None:
    buffers = (
        Buffer("tokens", (2,), torch.int32, role=Role.TOKENS),
        Buffer("the table", (9, 8), torch.bfloat16, role=Role.WEIGHT),
        Buffer("x", (2, 8), torch.bfloat16),
        Buffer("cache", (1, 2, 2, 1, 2), role=Role.CACHE, storage=(1, 2, 64, 1, 4)),
    )
    embed = EmbedOperands(
        0, NONE, tokens=0, table=1, out=2, batch=2, first=0, rows=9, format=BF16, summed=False
    )
    norm = Normed(2, 4, 2, 8, to_fp32(1e-6), zero_centered=False)
    gate = GateUpOperands(0, 3, norm, 5, NONE, 6, 16, BF16)
    instructions = (
        Embed(embed, Range(0, 4)),
        Embed(embed, Range(4, 8)),
        NormGateUpSwiglu(gate, Range(0, 16)),
    )
    waits = ((), (Wait(1, 0),), (Wait(0, 2), Wait(1, 1)))
    program = Program(
        buffers, instructions, ((1, 2), (0,)), waits, ((0,), (0, 1), ()), repeats=True, name="two"
    )
    assert format_program(program) == SAID
    assert parse_program(SAID, check=False) == program


SAID = """\
program two ranks=1 sharing=1 repeats=true counters=2

buffers
  b0 tokens rank=0 role=tokens dtype=i32 shape=[2]
  b1 "the table" rank=0 role=weight dtype=bf16 shape=[9,8]
  b2 x rank=0 role=scratch dtype=bf16 shape=[2,8]
  b3 cache rank=0 role=cache dtype=f32 shape=[1,2,2,1,2] storage=[1,2,64,1,4]

operands
  a0 embed rank=0 layer=none tokens=0 table=1 out=2 batch=2 first=0 rows=9 format=bf16 summed=false
  a1 gate_up rank=0 layer=3 normed.x=2 normed.weight=4 normed.batch=2 normed.width=8 \
normed.eps=1e-06 normed.zero_centered=false weight=5 bias=none out=6 ffn=16 format=bf16

instructions
  i0 embed a0 columns=0:4 signal c0
  i1 embed a0 columns=4:8 wait c1>=0 signal c0 c1
  i2 norm_gate_up_swiglu a1 rows=0:16 wait c0>=2 c1>=1

queues
  w0 1 2
  w1 0
"""


def test_one_layer_is_lines_of_the_whole_and_what_they_touch() -> None:
    case = CASES[3]
    program = step_program(case)
    whole = set(format_program(program).splitlines())
    for rank in (None, 1):
        lines = format_layer(program, 1, rank).splitlines()
        statements = [line for line in lines if not line.lstrip().startswith("#")]
        assert set(statements) < whole | {""}
        instructions = [i for i in program.instructions if i.label.find(" layer 1 ") > 0]  # type: ignore[attr-defined]
        assert sum(line.startswith("  i") for line in statements) == sum(
            rank in (None, i.rank) for i in instructions
        )
    text = format_layer(program, 1, 1)
    assert "writes partial_values[0:1, 0:1, 0:1, 0:16]" in text
    assert "attention_terms@0[0:1" in text, "terms in another rank's memory"
    assert "rows 0:8 of 16, one of 2 blocks" in text
    assert "embed" not in text.replace("embed_tokens", "")
    assert " embed a0" in format_layer(program, -1)


def test_a_layer_that_there_is_not() -> None:
    with pytest.raises(UsageError, match=r"no instruction of layer 2 on rank 0.*from 0 to 1"):
        format_layer(step_program(SMALL), 2, rank=0)
    with pytest.raises(UsageError, match=r"layer 1 on rank 9.*and a rank from 0 to"):
        format_layer(step_program(SMALL), 1, rank=9)


def test_what_nobody_runs_is_shown_too() -> None:
    """Instructions in no queue are printed too, to make faulty programs inspectable."""
    program = step_program(SMALL)
    broken = replace(program, queues=((),) * len(program.queues))
    assert "# no queue, rank 0" in format_layer(broken, 0)
    assert "  w0\n" in format_program(broken)


def test_what_has_no_text() -> None:
    program = Program((), (Touch(),), ((0,),), ((),), ((),))
    with pytest.raises(UsageError, match="touch has no text form"):
        format_program(program)
    for buffer, message in ((Buffer("b", (1,), torch.complex64), "complex64"),):
        with pytest.raises(UsageError, match=message):
            format_program(Program((buffer,), (), (), (), ()))


@st.composite
def any_program(draw: Any) -> Program:
    """Draw a program with any operands, buffers, waits and signals, valid or not."""
    ranks = draw(st.integers(1, 3))
    extents = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
    buffers = st.builds(
        Buffer,
        name=st.text(max_size=6),
        shape=extents,
        dtype=st.sampled_from(list(DTYPES.values())),
        rank=st.integers(0, ranks - 1),
        role=st.sampled_from(Role),
        storage=st.none() | extents,
    )
    whole = {"format": draw(st.sampled_from(FORMATS)), "first": draw(st.integers(0, 999))}
    buffers |= buffers.map(lambda buffer: replace(buffer, **whole))
    count = draw(st.integers(0, 9))
    instructions = tuple(_on_some_rank(draw(any_instructions()), ranks) for _ in range(count))
    order = draw(st.permutations(range(count)))
    parts = ranks * draw(st.integers(1, 2))
    counters = st.integers(0, 3)
    waits = st.lists(st.builds(Wait, counters, INT32), max_size=2).map(tuple)
    return Program(
        tuple(draw(st.lists(buffers, max_size=3))),
        instructions,
        tuple(tuple(order[place::parts]) for place in range(parts)),
        tuple(draw(waits) for _ in range(count)),
        tuple(tuple(draw(st.lists(counters, max_size=2))) for _ in range(count)),
        ranks,
        draw(st.integers(1, 5)),
        draw(st.booleans()),
        draw(st.text(max_size=6)),
    )


def _on_some_rank(instruction: Any, ranks: int) -> Any:
    operands = vars(instruction.at) | {"rank": instruction.at.rank % ranks}
    values = {name: getattr(instruction, name) for name, _ in field_types(type(instruction))}
    return type(instruction)(**values | {"at": type(instruction.at)(**operands)})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_program())
def test_any_program_round_trips(program: Program) -> None:
    text = format_program(program)
    parsed = parse_program(text, check=False)
    assert parsed == program
    assert format_program(parsed) == text


@given(st.lists(st.integers(0, 40), max_size=20))
def test_runs_of_numbers(numbers: list[int]) -> None:
    words = list(runs_of(numbers))
    assert [number for word in words for number in run_of(word)] == numbers


def test_runs_are_short() -> None:
    assert list(runs_of([*range(0, 30, 3), 7, 6, 5, 4, 9])) == ["0:28:3", "7:3:-1", "9"]
    assert list(runs_of(range(5))) == ["0:5"]
    assert list(runs_of([1, 3, 5, 6, 7])) == ["1", "3", "5:8"]


@lru_cache
def small_text() -> str:
    return format_program(step_program(SMALL, "zigzag"))


def changed_line(draw: Any, text: str) -> str:
    """Change one line of the text."""
    names = sorted(set(re.findall("[a-z_]{3,}", text)))
    lines = text.split("\n")
    number = draw(st.sampled_from([n for n, line in enumerate(lines) if line]))
    words = lines[number].split(" ")
    place = draw(st.integers(0, len(words) - 1))
    word = words[place]
    change = draw(st.sampled_from(["delete", "double", "name", "number", "word", "line", "twice"]))
    if change == "delete":
        del words[place]
    elif change == "double":
        words.insert(place, word)
    elif change == "name":
        words[place] = re.sub("[a-z_]{2,}", draw(st.sampled_from(names)), word, count=1)
    elif change == "number":
        other = draw(st.sampled_from(["0", "1", "-3", "7", "99999999999", "2147483647"]))
        words[place] = re.sub("-?[0-9]+", other, word, count=1)
    elif change == "word":
        other = draw(
            st.sampled_from(["x", "", "٣", "1_0", "1e999", "nan", '"', "=", ":", "[", "#"])
        )
        words[place] = re.sub("-?[0-9.]+", other, word, count=1)
    lines[number] = " ".join(words)
    if change in ("line", "twice"):
        lines[number : number + 1] = [] if change == "line" else [lines[number]] * 2
    return "\n".join(lines)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_changed_line_is_refused_by_number_or_means_something(data: Any) -> None:
    changed = changed_line(data.draw, small_text())
    parsed = parsed_or_refused(changed)
    if isinstance(parsed, Program):
        assert parse_program(format_program(parsed)) == parsed
        return
    number = re.fullmatch("line ([0-9]+)", parsed.where)
    assert number, parsed
    assert 1 <= int(number[1]) <= changed.count("\n") + 1
    assert parsed.got or parsed.expected or parsed.hint, parsed


def parsed_or_refused(text: str) -> Program | UsageError:
    try:
        return parse_program(text)
    except UsageError as refused:
        return refused


REFUSALS = [
    ("program qwen3", "programme qwen3", "not the text of a program.*Found 'programme qwen3"),
    ("ranks=1", "ranks=two", r"value of ranks.*'two'.*32-bit integer"),
    ("ranks=1", "ranks=0", "ranks must be at least 1.*ranks=0"),
    ("ranks=1", "ranks=2", "queues do not divide evenly among 2 ranks"),
    ("repeats=true", "repeats=yes", "true or false"),
    ("counters=", "counters=9", "Counters are missing"),
    ("\nbuffers\n", "\nbufers\n", "A section must begin here.*bufers.*Expected buffers"),
    ("\noperands\n", "\n", "section|buffer"),
    ("  b1 ", "  b0 ", r"The buffer b0 is repeated.*Expected b1"),
    ("  b1 ", "  b2 ", r"The buffer b2 is out of order.*Expected b1"),
    ("dtype=i32", "dtype=i33", r"no dtype 'i33'.*Did you mean i32"),
    ("role=tokens", "role=token", r"Did you mean tokens"),
    ("shape=[1]", "shape=1", r"a shape such as \[4,64\]"),
    ("shape=[1]", "shap=[1]", r"no buffer field 'shap'.*Did you mean shape"),
    (" shape=[1]", "", r"Buffer fields are missing.*shape"),
    ("b0 tokens rank=0", "b0 tokens rank=1", "no rank 1.*0 to 0"),
    ("a0 embed", "a0 embd", r"no operand kind 'embd'.*Did you mean embed"),
    ("summed=false", "sumed=false", r"no operand 'sumed'.*Did you mean summed"),
    ("summed=false", "summed=maybe", r"value of summed.*'maybe'.*true or false"),
    (" summed=false", "", r"Operands are missing.*summed"),
    ("part=q", "part=qu", r"k or v or q"),
    ("part=q", "part=q part=q", r"part is given twice"),
    ("eps=1e-06", "eps=nan", r"a finite number"),
    ("layer=0", "layer=99999999999", r"a 32-bit integer"),
    ("i0 embed", "i0 embedd", r"no instruction 'embedd'.*Did you mean embed"),
    ("i0 embed a0", "i0 embed a999", r"no operands a999.*one of the \d+ operands from a0"),
    (
        "i0 embed a0",
        "i0 embed a1",
        r"operands a1 have the wrong kind.*qkv.*embed for the instruction embed",
    ),
    ("i0 embed a0", "i0 embed b0", r"The operands are not valid.*'b0'.*a word such as a0"),
    ("  i1 ", "  i0 ", r"instruction i0 is repeated"),
    ("columns=0:", "columns=0-", r"a range such as 0:16"),
    (">=", ">", r"wait is not valid.*c0>=4"),
    (" signal c0", " signal", r"No counter follows 'signal'"),
    (" signal c0", " signal c999", r"no counter c999"),
    ("  w1", "  w2", r"queue w2 is out of order"),
    ("w0 0", "w0 1 0", r"is in the queues twice"),
    ("w0 0", "w0", r"instruction i0 is in no queue"),
    ("w0 0", "w0 0 999", r"instructions that do not exist.*Found 999"),
    ("w0 0", "w0 0:5:0", r"The instructions of a queue are not valid.*start:stop:step"),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSALS, ids=[new for _, new, _ in REFUSALS])
def test_refusals(old: str, new: str, message: str) -> None:
    assert old in small_text()
    with pytest.raises(UsageError, match=message) as caught:
        parse_program(small_text().replace(old, new, 1))
    assert re.fullmatch("line [0-9]+", caught.value.where)


def test_the_line_is_that_of_the_mistake() -> None:
    lines = small_text().split("\n")
    number = next(n for n, line in enumerate(lines) if " norm_lm_head " in line)
    lines[number] = lines[number].replace("slot=", "slott=")
    with pytest.raises(UsageError, match="Did you mean slot") as caught:
        parse_program("\n".join(lines))
    assert caught.value.where == f"line {number + 1}"


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_no_program_at_all(text: str) -> None:
    with pytest.raises(UsageError, match="is empty"):
        parse_program(text)


@pytest.mark.parametrize(
    "text",
    ["hello world", "runs/step.txt", "prgram x", "Program x", '"program" x', "\ufeffprogram x"],
)
def test_a_text_that_begins_with_another_word(text: str) -> None:
    """Text with another first word is refused at the first line that is not blank or a comment."""
    for tail in ("", "\nbuffers\n", small_text().partition("\n")[2]):
        with pytest.raises(UsageError, match="This is not the text of a program") as caught:
            parse_program(f"\n# a comment\n{text}\n{tail}")
        assert caught.value.where == "line 3"
        assert caught.value.got == repr(text)
        assert caught.value.expected == "a line that begins with the word program"


def test_of_a_long_line_its_beginning_is_told() -> None:
    with pytest.raises(UsageError, match="not the text of a program") as caught:
        parse_program("x" * 1000)
    assert caught.value.got == repr("x" * 60 + "…")


@pytest.mark.parametrize("text", [None, 3, b"program x", Path("step.txt"), ["program x"]])
def test_what_is_no_text(text: Any) -> None:
    with pytest.raises(UsageError, match="Expected a str") as caught:
        parse_program(text)
    assert type(text).__name__ in caught.value.got


def test_comments_and_empty_lines_say_nothing() -> None:
    loose = small_text().replace("\n", "   # a comment\n\n").replace(" ", "  ")
    assert parse_program(loose) == parse_program(small_text())


def test_names_with_any_sign() -> None:
    for name in ('a "b"', "#", " ", "rank=0", "line\nbreak", "\\", "é\u2028"):
        program = Program((Buffer(name, ()),), (), ((),), (), (), name=name)
        assert parse_program(format_program(program)) == program
