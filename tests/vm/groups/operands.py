"""Instructions with random operands that their types can hold."""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import IntEnum
from typing import Any

import torch
from hypothesis import strategies as st

from tpcompile.ir.format import Format, Kind
from tpcompile.vm.program.fields import field_types
from tpcompile.vm.program.instruction import Range, StepInstruction, to_fp32
from tpcompile.vm.program.instruction_set import INSTRUCTIONS

INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def values(draw: Any, kind: Any) -> Any:
    """Draw any value of this type."""
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return kind(**{name: draw(values(inner)) for name, inner in field_types(kind)})
    if kind is Range:
        return Range(draw(INT32), draw(INT32))
    if kind is float:
        finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
        return to_fp32(draw(finite)) + 0.0  # minus zero equals zero, but has other words
    if kind is bool:
        return draw(st.booleans())
    if kind is Format:
        floats = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
        kinds, columns = st.sampled_from([Kind.INT8, Kind.INT4]), st.integers(0, 2**15 - 1)
        in_groups = st.builds(Format.grouped, kinds, floats, columns, offsets=st.booleans())
        return draw(st.builds(Format.of, floats) | in_groups)
    if issubclass(kind, IntEnum):
        return draw(st.sampled_from(list(kind)))
    return draw(INT32)


def instructions(kind: type[StepInstruction] | None = None) -> st.SearchStrategy[StepInstruction]:
    """Draw an instruction of this kind, or of any kind."""
    if kind is not None:
        return values(kind)
    return st.sampled_from(list(INSTRUCTIONS.values())).flatmap(values)
