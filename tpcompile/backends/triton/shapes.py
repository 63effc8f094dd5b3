"""The shapes of tiles of weights, as constants of the branches of the kernel."""

from __future__ import annotations

from tpcompile.backends.triton.options import LEAST_SEQUENCES, MOST_SEQUENCES, STEP, WARPS
from tpcompile.ir.format import Kind
from tpcompile.vm.groups.experts import MixtureInstruction
from tpcompile.vm.groups.qkv import NormQkvRopeAppend
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import WeightInstruction

_ROW_BYTES = 1024
"""The bytes of a row of a tile, at most, with columns of all slices."""
_TILE_BYTES = 32_768
"""The bytes of tiles and of their values, at most, with columns of one slice."""
_MOST_NUMBERS = 16_384
"""The numbers of few bits of tiles that share values, at most, with columns of all slices."""
_MOST_TILES, _MOST_SCALED = 6, 2
"""The tiles that share values: registers hold their sums and, of few bits, what is scaled. With
columns of all slices, those of weights in the model's dtype share none."""


def sequences(program: Program, instruction: WeightInstruction) -> int:
    """Return the number of sequences that share a load of a tile. Some may be missing."""
    return LEAST_SEQUENCES if _few(instruction) else MOST_SEQUENCES


def _few(instruction: WeightInstruction) -> bool:
    """Return whether a tile has columns of all slices, one for each warp.

    Few sequences of a batch choose the same expert.
    """
    few: bool = instruction.at.batch <= LEAST_SEQUENCES
    return few or isinstance(instruction, MixtureInstruction)


def _parts(instruction: WeightInstruction) -> tuple[int, int]:
    """Return the parts of a weight that are multiplied side by side, and the rows of each."""
    if isinstance(instruction, MixtureInstruction):
        return instruction.sides, instruction.rows.extent
    sides = len(instruction.weight_boxes)
    extent = (
        instruction.at.width
        if isinstance(instruction, NormQkvRopeAppend)
        else instruction.weight_shape[0] // sides
    )
    return sides, extent


def tiles(program: Program, instruction: WeightInstruction) -> int:
    """Return the number of tiles that share values: rows of the instruction, one after another."""
    if _few(instruction) and instruction.at.format.plain:
        return 1
    sides, extent = _parts(instruction)
    most = _MOST_TILES if instruction.at.format.plain else _MOST_SCALED
    return min(-(-extent // rows(program, instruction)), most // sides)


def rows(program: Program, instruction: WeightInstruction) -> int:
    """Return the rows of a tile. Warps that share a slice have rows of two matrix instructions."""
    return STEP if _few(instruction) else 2 * STEP


def columns(program: Program, instruction: WeightInstruction) -> int:
    """Return the columns of a tile, of all slices or of one.

    Registers hold the numbers of few bits while they are widened.
    """
    _, width = instruction.weight_shape
    size: int = program.buffers[instruction.source.x].dtype.itemsize
    plain = instruction.at.format.plain
    together = tiles(program, instruction) * _parts(instruction)[0] * rows(program, instruction)
    if _few(instruction):
        most = _ROW_BYTES // size if plain else min(_ROW_BYTES // size, _MOST_NUMBERS // together)
        return max(min(power_of_two(width), most), WARPS * STEP)
    size *= together + sequences(program, instruction)
    most = (_TILE_BYTES if plain else _TILE_BYTES // 2) // size
    return max(min(power_of_two(-(-width // WARPS)), 1 << most.bit_length() - 1), STEP)


def stages(program: Program, instruction: WeightInstruction) -> int:
    """Return the tiles in shared memory: one in use, the others on their way.

    Those of few bits have fewer bytes.
    """
    if instruction.at.format.plain:
        return 3 if _few(instruction) else 4
    return 6 if instruction.at.format.kind == Kind.INT4 else 4


def items(program: Program, instruction: MixtureInstruction) -> int:
    """Return the maximum number of items: chosen experts with some of their choices."""
    choices = instruction.at.batch * instruction.at.chosen
    count: int = (
        choices + (LEAST_SEQUENCES - 1) * min(instruction.at.held, choices)
    ) // LEAST_SEQUENCES
    return count


def power_of_two(count: int) -> int:
    """Return the smallest power of two of at least `count`."""
    return 1 << max(0, count - 1).bit_length()
