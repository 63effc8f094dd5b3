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


def sequences(program: Program, one: WeightInstruction) -> int:
    """Return the number of sequences that share a load of a tile. Some may be missing."""
    return LEAST_SEQUENCES if _few(one) else MOST_SEQUENCES


def _few(one: WeightInstruction) -> bool:
    """Return whether a tile has columns of all slices, one for each warp.

    Few sequences of a batch choose the same expert.
    """
    few: bool = one.at.batch <= LEAST_SEQUENCES
    return few or isinstance(one, MixtureInstruction)


def _parts(one: WeightInstruction) -> tuple[int, int]:
    """Return the parts of a weight that are multiplied side by side, and the rows of each."""
    if isinstance(one, MixtureInstruction):
        return one.sides, one.rows.extent
    sides = len(one.weight_boxes)
    extent = one.at.width if isinstance(one, NormQkvRopeAppend) else one.weight_shape[0] // sides
    return sides, extent


def tiles(program: Program, one: WeightInstruction) -> int:
    """Return the number of tiles that share values: rows of the instruction, one after another."""
    if _few(one) and one.at.format.plain:
        return 1
    sides, extent = _parts(one)
    most = _MOST_TILES if one.at.format.plain else _MOST_SCALED
    return min(-(-extent // rows(program, one)), most // sides)


def rows(program: Program, one: WeightInstruction) -> int:
    """Return the rows of a tile. Warps that share a slice have rows of two matrix instructions."""
    return STEP if _few(one) else 2 * STEP


def columns(program: Program, one: WeightInstruction) -> int:
    """Return the columns of a tile, of all slices or of one.

    Registers hold the numbers of few bits while they are widened.
    """
    _, width = one.weight_shape
    size: int = program.buffers[one.source.x].dtype.itemsize
    plain = one.at.format.plain
    together = tiles(program, one) * _parts(one)[0] * rows(program, one)
    if _few(one):
        most = _ROW_BYTES // size if plain else min(_ROW_BYTES // size, _MOST_NUMBERS // together)
        return max(min(power_of_two(width), most), WARPS * STEP)
    size *= together + sequences(program, one)
    most = (_TILE_BYTES if plain else _TILE_BYTES // 2) // size
    return max(min(power_of_two(-(-width // WARPS)), 1 << most.bit_length() - 1), STEP)


def stages(program: Program, one: WeightInstruction) -> int:
    """Return the tiles in shared memory: one in use, the others on their way.

    Those of few bits have fewer bytes.
    """
    if one.at.format.plain:
        return 3 if _few(one) else 4
    return 6 if one.at.format.kind == Kind.INT4 else 4


def items(program: Program, one: MixtureInstruction) -> int:
    """Return the maximum number of items: chosen experts with some of their choices."""
    choices = one.at.batch * one.at.chosen
    found: int = (choices + (LEAST_SEQUENCES - 1) * min(one.at.held, choices)) // LEAST_SEQUENCES
    return found


def power_of_two(count: int) -> int:
    """Return the smallest power of two of at least `count`."""
    return 1 << max(0, count - 1).bit_length()
