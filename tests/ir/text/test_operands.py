"""Operands are read back as they are written, and wrong calls are refused at their place."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import fx

from tpcompile.errors import UsageError
from tpcompile.ir.ops import LINEAR, SPECS
from tpcompile.ir.text.operands import OperandParser
from tpcompile.ir.text.printer import written_operand
from tpcompile.ir.text.scanner import Scanner


def values() -> dict[str, fx.Node]:
    graph = fx.Graph()
    return {name: graph.placeholder(name) for name in ("x", "weight", "bias")}


def parsed(text: str) -> Any:
    line = Scanner(5, text)
    operand = OperandParser(values()).any(line)
    line.expect_end()
    return operand


@pytest.mark.parametrize(
    ("operand", "text"),
    [
        (None, "None"), (True, "True"), (False, "False"),
        (0, "0"), (-7, "-7"), (sys.maxsize, "max"), (10**17, "100000000000000000"),
        (0.5, "0.5"), (1e-06, "1e-06"), (-0.0, "-0.0"), (1e22, "1e+22"), (math.inf, "inf"),
        (-math.inf, "-inf"),
        (torch.bfloat16, "bf16"), (torch.int64, "i64"),
        ([], "[]"), ([1, [2, None]], "[1, [2, None]]"),
        ("", '""'), ("two words", '"two words"'), ('a"b\\', r'"a\"b\\"'),
        ("line\nbreak\t\x00", r'"line\nbreak\t\u0000"'), ("é %x, ) : f32", r'"\u00e9 %x, ) : f32"'),
    ],
)  # fmt: skip
def test_both_ways(operand: object, text: str) -> None:
    assert written_operand(operand) == text
    actual = parsed(text)
    assert actual == operand and type(actual) is type(operand)
    assert math.copysign(1, actual) == -1 if text == "-0.0" else True


def test_a_number_that_is_none() -> None:
    assert written_operand(math.nan) == "nan" and math.isnan(parsed("nan"))


def test_values_are_those_of_lines_before() -> None:
    known = values()
    line = Scanner(5, "[%x, [%weight], 2]")
    assert OperandParser(known).any(line) == [known["x"], [known["weight"]], 2]


def test_a_call() -> None:
    known = values()
    line = Scanner(5, "aten.linear(%x, %weight, bias=None) : rest")
    assert OperandParser(known).call(line) == (LINEAR, (known["x"], known["weight"], None), {})
    assert line.rest() == " : rest"


def test_names_after_a_gap_are_kept() -> None:
    name = next(n for n, spec in SPECS.items() if len(spec.argument_names) > 2)
    spec = SPECS[name]
    last = spec.argument_names[-1]
    _, args, kwargs = OperandParser(values()).call(Scanner(5, f"{spec.name}(%x, {last}=3)"))
    assert (len(args), kwargs) == (1, {last: 3})


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("aten.liner(%x)", 1, r"There is no op aten\.liner.*Did you mean aten\.linear"),
        ("linear(%x)", 1, "an op, `input`, `param` or a value"),
        ("aten.linear %x", 12, r"Expected '\('"),
        ("aten.linear(%x %weight)", 15, "Expected ', '"),
        ("aten.linear(%y)", 13, "%y is not defined before this line.*Known: x, weight, bias"),
        ("aten.linear(%x, wait=%x)", 17, r"takes no such argument here.*\(input, weight, bias\)"),
        ("aten.linear(%x, input=%x)", 17, "takes no such argument here"),
        ("aten.linear(%x, bias=None, %weight)", 28, "has no argument at this place"),
        ("aten.linear(%x, %weight, None, 4)", 32, "has no argument at this place"),
        ("aten.linear(%x, 1234567890123456789)", 17, "at most 18 digits"),
        ("aten.linear(" + "[" * 12, 23, "nested too deeply"),
        ("aten.linear(%x", 15, "end of the line"),
        ('aten.linear("open', 13, "a string"),
        ("aten.linear(?)", 13, "a dtype"),
    ],
)
def test_wrong_calls_are_refused(text: str, column: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        OperandParser(values()).call(Scanner(5, text))
    assert error.value.where == f"line 5, column {column}"
