"""The data of the scheduler: limits, sequences, and the pieces of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from tpcompile.errors import UsageError

_RUN_TOKENS = 512
"""The maximum tokens of chunks that share a run. Requests get their first tokens after each run."""


@dataclass(frozen=True)
class Limits:
    """The limits of a scheduler."""

    blocks: int
    """The number of blocks of the KV cache."""
    block: int = 32
    """The tokens in a block."""
    sequences: int = 16
    """The maximum number of sequences that run at the same time."""
    step_tokens: int = 512
    """The maximum number of tokens of a step, of prompts and new ones together."""
    chunk: int = 128
    """The tokens of a chunk. Prompts are cut at its multiples, wherever computation resumes."""
    states: int = 0
    """The states of linear attention, two for each sequence and snapshots; 0 if there are none."""
    snapshot_chunks: int = 16
    """The chunks of a prompt between snapshots."""

    def __post_init__(self) -> None:
        for name in ("blocks", "block", "sequences", "step_tokens", "chunk", "snapshot_chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a positive int, got {value!r}")
        if self.chunk % self.block:
            raise UsageError(
                "A chunk must be a multiple of a block",
                got=f"chunks of {self.chunk} tokens and blocks of {self.block}",
            )
        if self.step_tokens < self.sequences + self.chunk:
            raise UsageError(
                "A step must have room for a token of every sequence and for a chunk of a prompt",
                got=f"{self.step_tokens} tokens",
                expected=f"at least {self.sequences} + {self.chunk}",
            )
        if self.states and self.states < 2 * self.sequences:
            raise UsageError(
                "Each sequence that runs must have a state to read and one to write",
                got=f"{self.states} states for {self.sequences} sequences",
                expected=f"at least {2 * self.sequences} states, or 0 without linear attention",
            )

    @property
    def most_tokens(self) -> int:
        """The tokens of a sequence that has all blocks."""
        return self.blocks * self.block


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence of tokens that is continued."""

    order: tuple[int, int]
    """The number of its request in the order of arrival, and its own number."""
    tokens: list[int]
    """The prompt and all new tokens. K and V of the last one are not in the cache yet."""
    salt: Hashable = None
    """Sequences share blocks only with sequences of the same salt."""
    computed: int = 0
    """The tokens whose K and V are in the cache."""
    blocks: list[int] = field(default_factory=list)
    shared: int = 0
    """The tokens that were in the cache when it was last admitted."""
    whole: bool = False
    """Whether all of its tokens are computed, because their logits are requested."""
    state: int | None = None
    """The state of linear attention after the computed tokens; None before the first one."""
    next_state: int | None = None
    """The state that its next piece writes, while it runs."""
    met: int = 0
    """The tokens that were in known blocks when it was last admitted, also without a snapshot."""
    draft: list[int] = field(default_factory=list)
    """Guesses of the tokens after `tokens`, which the next step may compute as rows."""
    guessed: list[int] = field(default_factory=list)
    """The states that the guesses of its piece write."""

    @property
    def left(self) -> int:
        """The tokens to compute before the next one is known."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a sequence to compute: a new one and guesses after it, or a chunk of a prompt."""

    sequence: Sequence
    first: int
    count: int
    """The number of tokens, without guesses."""
    guesses: tuple[int, ...] = ()
    """Guesses of the tokens after these, which are the last ones that are known."""

    @property
    def last(self) -> bool:
        """Whether the next token of the sequence is known after it."""
        return self.first + self.count == len(self.sequence.tokens)

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute."""
        return [*self.sequence.tokens[self.first : self.first + self.count], *self.guesses]


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces of a step."""

    decodes: list[Piece]
    """A new token each, of different sequences, and guesses after it."""
    chunks: list[Piece]
    """Chunks of prompts, in the order in which they must be computed."""
    copies: list[tuple[int, int]]
    """Blocks to copy first, as pairs (source, target)."""
    preempted: list[Sequence]
    """Sequences that lost their blocks, and will be computed again."""

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def pieces(self) -> list[Piece]:
        """All pieces, in the order in which they are computed."""
        return [*self.decodes, *self.chunks]

    @property
    def complete(self) -> list[Sequence]:
        """The sequences whose next token is known after this step."""
        return [piece.sequence for piece in self.pieces if piece.last]


def groups(
    chunks: Iterable[Piece], alone: Callable[[Piece], bool], apart: bool = False
) -> Iterator[list[Piece]]:
    """Yield the chunks that share a run. Those of one sequence stay in order.

    With `apart`, a run has at most one chunk of each sequence, because the next one reads the state
    that it writes.
    """
    shared: list[list[Piece]] = []
    later: list[Piece] = []
    for piece in chunks:
        if alone(piece) or _has(later, piece.sequence):
            later.append(piece)
            continue
        runs = _after(shared, piece.sequence) if apart else shared[-1:]
        run = next((run for run in runs if _tokens(run) + piece.count <= _RUN_TOKENS), None)
        if run is None:
            shared.append(run := [])
        run.append(piece)
    yield from shared
    for piece in later:
        yield [piece]


def _has(run: Iterable[Piece], sequence: Sequence) -> bool:
    return any(piece.sequence is sequence for piece in run)


def _after(runs: list[list[Piece]], sequence: Sequence) -> list[list[Piece]]:
    """Return the runs after the last one that has a piece of this sequence."""
    last = max((place for place, run in enumerate(runs) if _has(run, sequence)), default=-1)
    return runs[last + 1 :]


def _tokens(run: Iterable[Piece]) -> int:
    return sum(piece.count for piece in run)


def order_of(sequence: Sequence) -> tuple[int, int]:
    """Return the order of a sequence among all others."""
    return sequence.order
