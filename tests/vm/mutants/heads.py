"""Mistakes with blocks of heads: missing, miscounted or separated blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from random import Random
from typing import Any

from tests.vm.mutants.bases import Base, missing
from tests.vm.mutants.orders import Made
from tests.vm.mutations import changed
from tpcompile.vm.groups import NormQkvRows
from tpcompile.vm.program import Instruction, Join, Region
from tpcompile.vm.program.instruction import Memory, Probe, Range, unseen


@dataclass(frozen=True)
class OtherSlot(NormQkvRows):
    """Block that counts arrivals in another head's slot."""

    slot: int = 0

    @cached_property
    def joins(self) -> tuple[Join, ...]:
        count, *joins = super().joins
        region = Region(self.arrivals, ((self.slot, self.slot + 1),))
        return (count._replace(region=region), *joins)

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        brought = self.at.project(memory, self.weight_rows, probe)
        memory[self.raw][:, self.weight_rows.slice] = brought
        memory[self.arrivals][self.slot] += 1
        if int(memory[self.arrivals][self.slot]) % self.blocks == 0:
            whole = memory[self.raw][:, self.raw_head.slice]
            self.at.finish(memory, Range(self.head, self.head + 1), whole, probe)


def block_dropped(base: Base, dice: Random) -> Made:
    """Drop one block of a head."""
    head = _head(base, dice)
    if not head:
        return None
    number = dice.choice(head)
    return _with(base, dice, {number: missing(base.steps[number])}, "is missing")


def rows_shifted(base: Base, dice: Random) -> Made:
    """Move an edge of a block by one row, or shift it."""
    head = _head(base, dice)
    if not head:
        return None
    number = dice.choice(head)
    old = _block(base, number)
    start, stop = old.rows
    moved = [(-1, 0), (1, 0), (0, -1), (0, 1), (1, 1), (-1, -1)]
    first, last = dice.choice(moved)
    rows = Range(start + first, stop + last)
    if not 0 <= rows.start < rows.stop <= old.at.width:
        return None
    return _with(base, dice, {number: replace(old, rows=rows)}, f"has {rows}")


def arrivals_wrong(base: Base, dice: Random) -> Made:
    """Make one block or all of them expect one arrival more or less."""
    head = _head(base, dice)
    if not head:
        return None
    blocks = _block(base, head[0]).blocks + dice.choice([-1, 1])
    if blocks == 0:
        return None
    wrong = dice.choice([head, [dice.choice(head)]])
    new = {number: replace(_block(base, number), blocks=blocks) for number in wrong}
    return _with(base, dice, new, f"waits for {blocks} blocks")


def block_alone(base: Base, dice: Random) -> Made:
    """Treat each block as a whole head, so that it normalises and rotates its own rows."""
    head = _head(base, dice, several=True)
    if not head:
        return None
    new = {number: replace(_block(base, number), blocks=1) for number in head}
    return _with(base, dice, new, "finishes alone")


def slot_shared(base: Base, dice: Random) -> Made:
    """Make two heads count arrivals in one slot."""
    heads = _heads(base)
    if not heads:
        return None
    head = dice.choice(heads)
    first = _block(base, head[0])
    candidates = [h for h in heads if h != head and _block(base, h[0]).arrivals == first.arrivals]
    if not candidates:
        return None
    slot = _block(base, dice.choice(candidates)[0]).joins[0].region.box[0][0]
    return _with(base, dice, _elsewhere(base, head, slot, first.blocks), f"counts in slot {slot}")


def head_in_two(base: Base, dice: Random) -> Made:
    """Make some blocks of a head count in another slot, as if there were two heads."""
    head = _head(base, dice, several=True)
    if not head:
        return None
    cut = dice.randrange(1, len(head))
    slots = base.program.buffers[_block(base, head[0]).arrivals].shape[0]
    if slots == 1:
        return None
    current = _block(base, head[0]).joins[0].region.box[0][0]
    slot = dice.choice([slot for slot in range(slots) if slot != current])
    whole = dice.choice([True, False])
    first = {n: replace(_block(base, n), blocks=len(head) if whole else cut) for n in head[:cut]}
    second = _elsewhere(base, head[cut:], slot, len(head) if whole else len(head) - cut)
    return _with(base, dice, {**first, **second}, f"are two from block {cut} on, in slot {slot}")


def _elsewhere(base: Base, head: list[int], slot: int, blocks: int) -> dict[int, Instruction]:
    instructions: dict[int, Instruction] = {}
    for number in head:
        old = _block(base, number)
        values: dict[str, Any] = {field.name: getattr(old, field.name) for field in fields(old)}
        instructions[number] = OtherSlot(**{**values, "blocks": blocks}, slot=slot)
    return instructions


def _with(base: Base, dice: Random, new: Mapping[int, Instruction], mistake: str) -> Made:
    """Schedule the correct blocks, or the wrong ones."""
    instructions: tuple[Instruction, ...] = base.steps
    for number, instruction in new.items():
        instructions = changed(instructions, number, instruction)
    openly = dice.choice([True, False])
    program = base.scheduled_as(instructions) if openly else base.program
    description = f"{base.steps[min(new)].label} and {len(new) - 1} more {mistake}"
    description += ", and the schedule knows" if openly else ""
    return description, replace(program, instructions=instructions)


def _block(base: Base, number: int) -> NormQkvRows:
    instruction = base.steps[number]
    assert isinstance(instruction, NormQkvRows)
    return instruction


def _heads(base: Base) -> list[list[int]]:
    """Return the numbers of each head's blocks."""
    heads: dict[object, list[int]] = {}
    for number, step in enumerate(base.steps):
        if isinstance(step, NormQkvRows):
            key = step.rank, step.layer, step.at.part, step.head
            heads.setdefault(key, []).append(number)
    return list(heads.values())


def _head(base: Base, dice: Random, several: bool = False) -> list[int]:
    heads = [head for head in _heads(base) if len(head) > several]
    return dice.choice(heads) if heads else []


HEADS = (block_dropped, rows_shifted, arrivals_wrong, block_alone, slot_shared, head_in_two)
