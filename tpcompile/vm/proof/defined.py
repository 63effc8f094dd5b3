"""Proof that scratch memory is written before it is read, in each step.

Scratch memory is undefined before a step, and a cell stays defined once it is written. So the first
access to each part decides. The check of the order proves that the writers run before the reader,
and the check of the heads that all blocks of a head do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpcompile.vm.program import Box, Program, Region
from tpcompile.vm.program.program import joined
from tpcompile.vm.program.region import box_text, remainder
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.fault import Fault, cited, listed


def check_defined(program: Program, parts: Parts) -> Iterator[Fault]:
    """Check that instructions read only defined memory. `parts` are those of the program."""
    undefined = _undefined(program, parts)
    if not undefined:
        return
    written: dict[int, dict[Box, None]] = {}
    for number, instruction in enumerate(program.instructions):
        for region in dict.fromkeys(instruction.reads):
            if region in undefined:
                pieces = remainder(region.box, written.get(region.buffer, ()))
                if pieces:
                    yield Fault("undefined", _description(program, number, region, pieces))
        for buffer, box in (*instruction.writes, *joined(instruction)):
            written.setdefault(buffer, {})[box] = None


def _undefined(program: Program, parts: Parts) -> set[Region]:
    """Return all regions that may be read before they are written; none if the program is correct.

    Parts are numbered by first access. So the parts written before the first access to a part are
    those with lower numbers whose own first access is a write. A part with a lower number that is
    itself read first adds nothing: its cells are defined by such parts, or it is returned too.
    """
    scratch = {n for n, buffer in enumerate(program.buffers) if buffer.role.kind == "scratch"}
    unwritten = scratch.intersection(parts.boxes) - parts.written
    early_reads = {Region(buffer, box) for buffer in unwritten for box in parts.boxes[buffer]}
    regions, cells, read_first = parts.regions, parts.cells, set(parts.read_first)
    for part in parts.read_first:
        if regions[part].buffer in scratch:
            left = cells[part]
            for other in parts.near[part]:
                if other < part and other not in read_first:
                    left &= ~cells[other]
            if left:
                early_reads.add(regions[part])
    return early_reads


def _description(program: Program, number: int, region: Region, pieces: Sequence[Box]) -> str:
    name = program.buffers[region.buffer].name
    return (
        f"{cited(program, number)} reads {name}{box_text(region.box)}, but no earlier instruction "
        f"of the step writes {listed(name, pieces)}; scratch memory is undefined before a step"
    )
