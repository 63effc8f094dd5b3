"""What a lowering is told, how it cuts work into instructions, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.vm.program import Buffer
from tpcompile.vm.program.instruction import Range, StepInstruction
from tpcompile.vm.targets import INT32_MAX, MOST_WORKERS

LOWERINGS = ("heads", "rows")
"""Whole heads in each instruction, or blocks of a head's rows of which the last finishes it."""


_MOST = {"workers": MOST_WORKERS, "batch": 1024}
"""Of anything else, and of slots in the cache, there are as many as int32 can count."""

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
            if name != "lowering":
                _check_size(name, value)
        self.check_room(1)
        if self.column_splits & (self.column_splits - 1):
            raise UsageError(
                f"column_splits={self.column_splits}",
                expected="a power of two, so that the parts are parts of one tree",
            )

    def most_blocks(self, block: int) -> int:
        """The blocks of the longest sequence, with so many tokens in each."""
        return -(-self.max_seq_len // block)

    def check_room(self, block: int) -> None:
        """Refuses a cache with more slots than there are numbers for them."""
        slots = self.batch * self.most_blocks(block) * block
        if slots > INT32_MAX:
            raise UsageError(
                f"batch={self.batch:,} of max_seq_len={self.max_seq_len:,}",
                got=f"{slots:,} slots of the cache",
                expected=f"at most {INT32_MAX:,}",
            )

    def check_spans(self, spans: int, block: int) -> None:
        """Refuses spans of which one is always empty: they are of whole blocks."""
        most = self.most_blocks(block)
        if spans > most:
            raise UsageError(
                f"spans={spans:,} of a sequence of at most {most:,} blocks",
                expected=f"at most one span for each block of {block:,} tokens",
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


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name}={value!r} means nothing", expected="a whole number, 1 or more")
    most = _MOST.get(name, INT32_MAX)
    if value > most:
        raise UsageError(f"{name}={value:,} is too many", expected=f"at most {most:,}")


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
