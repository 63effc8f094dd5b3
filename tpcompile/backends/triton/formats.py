"""The formats of weights that tiles of the kernel can read."""

from __future__ import annotations

from functools import cache
from typing import Any

from tpcompile.backends.triton.options import STEP
from tpcompile.errors import UnsupportedError
from tpcompile.ir.format import Format, Kind
from tpcompile.vm.groups.project import LinearTerms
from tpcompile.vm.program import Program
from tpcompile.vm.program.fields import rules_of
from tpcompile.vm.program.rules import FormatOf

_HINT = 'Compile with backend="torch"'


def check_format(program: Program, instruction: Any) -> None:
    """Raise unless the tile of an instruction can read its weight in the weight's format."""
    kind: Any = type(instruction)
    operand = _weight_of(kind)
    if operand is None or instruction.at.format.plain:
        return
    stored: Format = instruction.at.format
    where = program.buffers[getattr(instruction.at, operand)].name
    if stored.rounds or not (stored.basic or stored.kind == Kind.FP8):
        raise UnsupportedError(
            f"The triton backend cannot read weights in {stored}",
            where=where,
            expected="int8, int4 or fp8 with a scale per group, and linears that do not round "
            "their inputs",
            hint=_HINT,
        )
    start = instruction.columns.start if isinstance(instruction, LinearTerms) else 0
    if stored.columns % STEP or start % STEP:
        raise UnsupportedError(
            f"The triton backend multiplies {STEP} columns at a time, which must be in one group",
            where=where,
            got=f"{stored}, from column {start} on",
            expected=f"multiples of {STEP}",
            hint=_HINT,
        )


@cache
def _weight_of(kind: Any) -> str | None:
    """Return the operand of an instruction that is a weight in a format."""
    operands = (rule.operand for _, _, rule in rules_of(kind) if isinstance(rule, FormatOf))
    return next((operand for operand in operands if operand in ("weight", "table")), None)
