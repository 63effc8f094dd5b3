"""The dependencies of each instruction, derived from the regions that instructions access.

A dependency is a read after write, a write after read or a write after write. It follows from the
last writer of each part of a buffer and the readers since that write. Groups of instructions are
shared, because all readers of a value wait for the same writers. The blocks of a head count as one
writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.vm.program import Instruction
from tpcompile.vm.proof.cells import Parts


@dataclass(frozen=True, eq=False)
class Group:
    """Instructions that are waited for together, in ascending order.

    `dependencies` makes each group once, so groups compare by identity.
    """

    members: tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Access:
    """The instructions that have read, or written, a part since it was last written."""

    numbers: list[int]
    left: int
    """The cells that have not been written since."""
    before: tuple[Group, ...] = ()
    """The groups that the readers wait for."""
    group: Group | None = None
    """`numbers` as a group, made on first use. No number is added from then on."""


@dataclass(eq=False, slots=True)
class _Head:
    """A head of which some blocks have arrived and others have not."""

    access: _Access
    arrivals: int
    touched: list[_Access]
    """The accesses by other instructions before the first block."""
    before: tuple[Group, ...] | None = None
    """The groups that all blocks but the first wait for. The first is handled separately: it may
    also access the part in another way, and does not wait for itself."""


class _Memory:
    """The parts of all buffers, with their last writes and the reads since then."""

    def __init__(self, parts: Parts) -> None:
        self._cells, self._near = parts.cells, parts.near
        count = len(parts.near)
        self._wrote: list[_Access | None] = [None] * count
        """By part, its last write."""
        self._read: list[list[_Access]] = [[] for _ in range(count)]
        self._reading: list[_Access | None] = [None] * count
        """By part, its last entry in `_read`, until one of its cells is written."""
        self._heads: dict[int, _Head] = {}
        self._groups: dict[tuple[int, ...], Group] = {}

    def read(self, part: int, number: int) -> tuple[Group, ...]:
        """Return the last writers of the cells of `part`, and record a read by `number`."""
        access = self._reading[part]
        if access is None:
            self._close_heads(part)
            cells = self._cells[part]
            writers = (self._wrote[other] for other in self._near[part])
            before = self._together([w for w in writers if w and w.left & cells], number)
            access = self._reading[part] = _Access([], cells, before)
            self._read[part].append(access)
        if not access.numbers or access.numbers[-1] != number:
            access.numbers.append(number)
        return access.before

    def write(self, part: int, number: int) -> tuple[Group, ...]:
        """Return the last readers and writers of the part's cells; record a write by `number`."""
        self._close_heads(part)
        return self._together(self._put(part, _Access([number], self._cells[part])), number)

    def join(self, part: int, arrivals: int, number: int) -> tuple[Group, ...]:
        """Return the groups that the blocks of a head wait for, and record `number` as a block."""
        if part not in self._heads:
            self._close_heads(part)
            access = _Access([], self._cells[part])
            self._heads[part] = _Head(access, arrivals, self._put(part, access))
        head = self._heads[part]
        blocks = head.access.numbers
        blocks.append(number)
        if len(blocks) == head.arrivals:
            del self._heads[part]
        if blocks[0] == number:
            return self._together(head.touched, number)
        if head.before is None:
            head.before = self._together(head.touched, number)
        return head.before

    def _close_heads(self, part: int) -> None:
        if self._heads:
            for other in self._near[part]:
                self._heads.pop(other, None)

    def _put(self, part: int, access: _Access) -> list[_Access]:
        """Record a write of the part; return the earlier accesses that it must wait for.

        These are the overwritten reads, and the overwritten writes that these reads do not cover.
        """
        cells, read_cells = self._cells[part], 0
        earlier: list[_Access] = []
        for other in self._near[part]:
            self._reading[other] = None
            if self._read[other]:
                for reader in self._read[other]:
                    if reader.left & cells:
                        read_cells |= reader.left
                        earlier.append(reader)
                        reader.left &= ~cells
                self._read[other] = [reader for reader in self._read[other] if reader.left]
        for other in self._near[part]:
            writer = self._wrote[other]
            if writer is not None:
                if writer.left & cells & ~read_cells:
                    earlier.append(writer)
                writer.left &= ~cells
        self._wrote[part] = access
        return earlier

    def _together(self, accesses: Sequence[_Access], number: int) -> tuple[Group, ...]:
        """Return the groups that `number` must wait for to run after these accesses.

        Accesses by one instruction share a group; each access by several has a group of its own.
        """
        alone: list[int] = []
        groups: list[Group] = []
        for access in accesses:
            numbers = access.numbers
            if numbers[-1] == number:  # `number` also accesses the part in another way
                numbers = [other for other in numbers if other != number]
                if len(numbers) > 1:
                    groups.append(self._group(numbers))
                    continue
            if len(numbers) > 1:
                if access.group is None:
                    access.group = self._group(numbers)
                groups.append(access.group)
            else:
                alone += numbers
        if alone:
            groups.append(self._group(alone if len(alone) == 1 else sorted(set(alone))))
        return tuple(groups)

    def _group(self, numbers: Sequence[int]) -> Group:
        members = tuple(dict.fromkeys(numbers))
        group = self._groups.get(members)
        if group is None:
            group = self._groups[members] = Group(members)
        return group


def dependencies(instructions: Sequence[Instruction]) -> list[tuple[Group, ...]]:
    """Return, for each instruction, the groups that must complete before it starts."""
    return dependencies_of(Parts(instructions))


def dependencies_of(parts: Parts) -> list[tuple[Group, ...]]:
    """Return, for each instruction of these parts, the groups that must complete before it."""
    memory = _Memory(parts)
    predecessors: list[tuple[Group, ...]] = []
    for number in range(len(parts.instructions)):
        groups: list[Group] = []
        for part in parts.reads[number]:
            groups += memory.read(part, number)
        for part in parts.writes[number]:
            groups += memory.write(part, number)
        for part, arrivals in zip(parts.joins[number], parts.arrivals[number], strict=True):
            groups += memory.join(part, arrivals, number)
        predecessors.append(tuple(dict.fromkeys(groups) if len(groups) > 1 else groups))
    return predecessors
