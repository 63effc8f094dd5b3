"""What a lowering is told, how it cuts work into instructions, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.vm.instructions import Range, StepInstruction
from tpcompile.vm.region import Buffer

LOWERINGS = ("heads", "rows")
"""Whole heads in each instruction, or blocks of a head's rows of which the last finishes it."""


AUTO = "auto"
"""Whole heads as long as there are enough of them to keep all workers busy."""


@dataclass(frozen=True)
class StepPlan:
    """The sizes of a program: what it must have room for, and how finely work is cut.

    Where work is cut never changes a bit of the results, except for `spans` of attention, which
    are an option of the graph.
    """

    workers: int
    """Of each rank."""
    batch: int = 1
    max_seq_len: int = 1024
    context: int = 1024
    """The tokens of a sequence that costs are reckoned with."""
    lowering: str = AUTO
    column_splits: int = 1
    """Into how many instructions the columns of a projection are split."""
    grain: int = 16
    steps: int = 64
    """The most tokens of one launch."""
    stops: int = 8
    """The most tokens that end a sequence."""

    def __post_init__(self) -> None:
        if self.lowering not in (AUTO, *LOWERINGS):
            raise UsageError(
                f"There is no lowering {self.lowering!r}",
                hint=did_you_mean(self.lowering, (AUTO, *LOWERINGS)),
            )
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                raise UsageError(f"{name}={value} means nothing", expected="1 or more")
        if self.column_splits & (self.column_splits - 1):
            raise UsageError(
                f"column_splits={self.column_splits}",
                expected="a power of two, so that the parts are parts of one tree",
            )

    def splits_heads(self, heads: int) -> bool:
        """Whether so many heads are better cut into blocks of rows."""
        return self.lowering == "rows" or (self.lowering == AUTO and heads < self.workers)

    def blocks(self, extent: int, most: int | None = None) -> list[Range]:
        """One for every worker, or `most`, as even as multiples of the grain come.

        Fewer, where that makes the longest no longer.
        """
        units = -(-extent // self.grain)
        longest = -(-units // (most or self.workers))
        return self.pieces(extent, -(-units // longest))

    def pieces(self, extent: int, count: int) -> list[Range]:
        """So many, as even as multiples of the grain come."""
        return _cut([*range(0, extent, self.grain), extent], count)

    def sums(self, extent: int) -> list[Range]:
        """The columns of a sum, which is little work: coarser than blocks of rows."""
        return self.blocks(extent, min(self.workers, -(-extent // (32 * self.grain))))

    def head_runs(self, heads: int, of: int) -> list[Range]:
        """Runs of `heads`, as long as it takes to give each worker one of all `of` heads."""
        longest = -(-of // self.workers)
        return _cut(range(heads + 1), -(-heads // longest))

    def row_blocks(self, width: int, heads: int) -> list[Range]:
        """A head of `width` rows in two blocks or more, as many as get `heads` heads done soonest.

        Workers take block after block; beside its rows each costs about half the grain.
        """
        units = -(-width // self.grain)

        def rows_in_all(count: int) -> float:
            laps = -(-heads * count // self.workers)
            return laps * (-(-units // count) + 0.5)

        count = min(range(min(2, units), units + 1), key=rows_in_all)
        return _cut([*range(0, width, self.grain), width], count)


def _cut(edges: Sequence[int], most: int) -> list[Range]:
    """At most so many ranges from edge to edge, as even as edges allow."""
    last = len(edges) - 1
    count = min(most, last)
    stops = [edges[last * n // count] for n in range(count + 1)]
    return [Range(a, b) for a, b in pairwise(stops)]


@dataclass(frozen=True)
class Lowered:
    """The instructions of a step in the order that gives them meaning, and what they work on."""

    name: str
    ranks: int
    plan: StepPlan
    buffers: tuple[Buffer, ...]
    """Those of one name follow each other, one for each rank."""
    instructions: tuple[StepInstruction, ...]

    def numbers(self, name: str) -> Sequence[int]:
        """The numbers of the buffers of this name, by rank."""
        return [n for n, buffer in enumerate(self.buffers) if buffer.name == name]
