"""The plan that divides a lowering's work into instructions, and the lowering's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.vm.program import Buffer
from tpcompile.vm.program.instruction import Range, StepInstruction
from tpcompile.vm.targets import INT32_MAX, MOST_WORKERS, Target

LOWERINGS = ("heads", "rows")
"""Whole heads per instruction, or blocks of a head's rows, the last of which finishes the head."""


_MOST = {"workers": MOST_WORKERS, "batch": 1024}
"""The limits of sizes. All other sizes, and the number of cache slots, must fit in int32."""

AUTO = "auto"
"""Whole heads if there are enough of them to keep all workers busy, else rows."""


@dataclass(frozen=True)
class StepPlan:
    """The sizes of a program: its capacity, and the granularity of its instructions.

    The division of work never changes the bits of the results. The exception is the number of
    attention `spans`, which is an option of the graph.
    """

    workers: int
    """The number of workers per rank."""
    batch: int = 1
    """The number of rows."""
    sequence_rows: int = 1
    """The number of rows, from each of its multiples on, that may belong to one sequence."""
    max_seq_len: int = 1024
    context: int = 1024
    """The tokens per sequence that costs assume."""
    lowering: str = AUTO
    column_splits: int = 1
    """The number of instructions that share the columns of a projection."""
    grain: int = 16
    blocks_per_worker: int = 1
    """The blocks per worker into which the work of a phase is divided."""
    steps: int = 64
    """The maximum number of tokens per launch."""
    stops: int = 8
    """The maximum number of stop tokens."""

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
        if self.batch % self.sequence_rows:
            raise UsageError(
                "The rows that may belong to one sequence must divide the batch",
                got=f"{self.sequence_rows} of {self.batch} rows",
            )
        if self.column_splits & (self.column_splits - 1):
            raise UsageError(
                f"column_splits={self.column_splits} is not supported",
                expected="a power of two, so that the parts are subtrees of one sum",
            )

    @classmethod
    def on(cls, target: Target, **sizes: Any) -> StepPlan:
        """Return a plan for the workers of a target."""
        return cls(
            target.workers,
            grain=target.grain,
            blocks_per_worker=target.blocks_per_worker,
            **sizes,
        )

    @property
    def shares(self) -> int:
        """The number of blocks into which the work of a phase is divided."""
        return self.workers * self.blocks_per_worker if self.workers > 1 else 1

    def most_blocks(self, block: int) -> int:
        """Return the number of blocks of the longest sequence, given the tokens per block."""
        return -(-self.max_seq_len // block)

    def spans_on(self, target: Target, block: int) -> int:
        """Return the target's number of spans, or fewer for short sequences.

        In the longest sequence, a span has at least a block, and as much as a worker attends to at
        a time.
        """
        return min(target.spans, -(-self.max_seq_len // max(block, target.span_tokens)))

    def check_room(self, block: int) -> None:
        """Raise if the cache has more slots than int32 can count."""
        slots = self.batch * self.most_blocks(block) * block
        if slots > INT32_MAX:
            raise UsageError(
                f"batch={self.batch:,} with max_seq_len={self.max_seq_len:,} is too large",
                got=f"{slots:,} slots in the KV cache",
                expected=f"at most {INT32_MAX:,}",
            )

    def check_spans(self, spans: int, block: int) -> None:
        """Raise if a span would always be empty. Spans consist of whole blocks."""
        most = self.most_blocks(block)
        if spans > most:
            raise UsageError(
                f"spans={spans:,} exceeds the {most:,} blocks of the longest sequence",
                expected=f"at most one span per block of {block:,} tokens",
            )

    def splits_heads(self, heads: int) -> bool:
        """Return whether to split this number of heads into blocks of rows."""
        return self.lowering == "rows" or (self.lowering == AUTO and heads < self.workers)

    def blocks(self, extent: int, most: int | None = None) -> list[Range]:
        """Split an extent into `shares` ranges, or into `most` ranges.

        The ranges are as even as multiples of the grain allow. There are fewer of them if that
        does not lengthen the longest one.
        """
        units = -(-extent // self.grain)
        longest = -(-units // (most or self.shares))
        return self.pieces(extent, -(-units // longest))

    def pieces(self, extent: int, count: int) -> list[Range]:
        """Split an extent into `count` ranges, as even as multiples of the grain allow."""
        return _cut([*range(0, extent, self.grain), extent], count)

    def sums(self, extent: int) -> list[Range]:
        """Split the columns of a sum more coarsely than `blocks`, because a sum is little work."""
        return self.blocks(extent, min(self.shares, -(-extent // (32 * self.grain))))

    def runs(self, count: int, of: int) -> list[Range]:
        """Split `count` heads or spans into runs, no longer than a share of all `of` of them."""
        longest = -(-of // self.shares)
        return _cut(range(count + 1), -(-count // longest))

    def row_blocks(self, width: int, heads: int) -> list[Range]:
        """Split a head of `width` rows so that `heads` heads finish as early as possible.

        There are at least two blocks if the grain allows. A block costs its rows plus about half
        the grain.
        """
        units = -(-width // self.grain)

        def rows_in_all(count: int) -> float:
            laps = -(-heads * count // self.workers)
            return laps * (-(-units // count) + 0.5)

        count = min(range(min(2, units), units + 1), key=rows_in_all)
        return self.pieces(width, count)


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a positive integer, got {value!r}")
    most = _MOST.get(name, INT32_MAX)
    if value > most:
        raise UsageError(f"{name}={value:,} is too large", expected=f"at most {most:,}")


def _cut(edges: Sequence[int], most: int) -> list[Range]:
    """Return at most `most` ranges between edges, as even as the edges allow."""
    last = len(edges) - 1
    count = min(most, last)
    stops = [edges[last * n // count] for n in range(count + 1)]
    return [Range(a, b) for a, b in pairwise(stops)]


@dataclass(frozen=True)
class Lowered:
    """The instructions of a step in sequential order, and the buffers that they use."""

    name: str
    ranks: int
    plan: StepPlan
    buffers: tuple[Buffer, ...]
    """Buffers of one name are consecutive, one per rank."""
    instructions: tuple[StepInstruction, ...]

    @property
    def layers(self) -> list[int]:
        """The layer of each instruction, -1 outside the layers."""
        return [instruction.layer for instruction in self.instructions]

    def numbers(self, name: str) -> Sequence[int]:
        """Return the numbers of the buffers of this name, by rank."""
        return [n for n, buffer in enumerate(self.buffers) if buffer.name == name]
