"""The program: instructions over buffers, their operands, their int32 words and their text."""

from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import Format
from tpcompile.vm.program.buffer import Box, Buffer, Role
from tpcompile.vm.program.program import Instruction, Program, Wait, queue_by_instruction
from tpcompile.vm.program.region import Join, Region, overlap

__all__ = [
    "Box",
    "Buffer",
    "DType",
    "Format",
    "Instruction",
    "Join",
    "Program",
    "Region",
    "Role",
    "Wait",
    "overlap",
    "queue_by_instruction",
]
