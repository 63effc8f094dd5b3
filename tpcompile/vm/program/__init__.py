"""The program: instructions over buffers, their operands, their int32 words and their text."""

from tpcompile.vm.program.program import Instruction, Program, Wait, queue_by_instruction
from tpcompile.vm.program.region import Box, Buffer, Join, Region, overlap

__all__ = [
    "Box",
    "Buffer",
    "Instruction",
    "Join",
    "Program",
    "Region",
    "Wait",
    "overlap",
    "queue_by_instruction",
]
