"""The meaning of instructions at the level of whole values, which proofs use.

An instruction makes a part of some values: its *tile*. The meaning says which values these are, as
calls of ops on the values that the instruction reads, each as a whole on its rank. The tile itself
follows from the regions that the instruction writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tpcompile.vm.program.region import Range

Part = Range | int | None
"""An interval of a dimension, an index, or None for the whole dimension."""


class Result(NamedTuple):
    """A value that instructions make together, and the part of the buffer that stores it."""

    operand: str
    """The operand whose buffer stores the value."""
    value: Any
    part: tuple[Part, ...] = ()
    """The part that the whole value takes; missing intervals are whole dimensions."""


class Values(Protocol):
    """The values that an instruction reads. Operands are paths such as `normed.x`."""

    @property
    def heads(self) -> Sequence[int]:
        """The head that each reader reads, if the instruction has `reads_head`."""

    def __getitem__(self, operand: str) -> Any:
        """Return the value in the buffer of an operand, or None if the operand is absent."""

    def part(self, operand: str, *part: Part, rank: int | None = None) -> Any:
        """Return the value that takes this part of a buffer.

        With `rank`, it is in the buffer of this rank; the operand is the buffer of rank 0.
        """

    def shape(self, operand: str) -> tuple[int, ...]:
        """Return the shape of an operand's buffer."""

    def input(self, name: str) -> Any:
        """Return an input of the graph that has no buffer."""

    def call(self, name: str, *operands: Any) -> Any:
        """Apply a function that is not an op to values and numbers."""

    def new(self, operand: str) -> Any:
        """Return the value that ops of this meaning have stored in a state, such as `tails`."""


class HeadRead(NamedTuple):
    """The own operands that give a head, and the readers that read it."""

    head: str
    readers: str
