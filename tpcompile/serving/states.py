"""The states of linear attention: those that sequences read and write, and snapshots."""

from __future__ import annotations

from collections.abc import Sequence as Many

from tpcompile.serving.plan import Sequence
from tpcompile.serving.stock import Content, Stock


class States(Stock):
    """A fixed number of states, of which some are snapshots; without linear attention, none.

    A state is written once, and then only read. Each running sequence holds the state after its
    computed tokens, which others may hold too, and another one, which its next piece writes. A
    snapshot is the state after the tokens up to the end of a known block.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._snapshots: dict[Content, int] = {}

    def resumable(self, known: Many[Content]) -> Many[Content]:
        """Return the known blocks up to the last one at whose end there is a snapshot."""
        if not self.count:
            return known
        ends = (end for end in range(len(known), 0, -1) if known[end - 1] in self._snapshots)
        return known[: next(ends, 0)]

    def begin(self, sequence: Sequence, known: Many[Content]) -> None:
        """Take states for a sequence that resumes after the last of these blocks, if any."""
        self._begin(sequence, self._snapshots[known[-1]] if known and self.count else None)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Take states for a sequence that resumes from the state of another one."""
        self._begin(child, parent.state)

    def advance(self, sequence: Sequence) -> None:
        """Record that a piece of a sequence has written its next state."""
        if not self.count:
            return
        if sequence.state is not None:
            self.release((sequence.state,))
        sequence.state = sequence.next_state
        self._take_next(sequence)

    def guess(self, sequence: Sequence, guesses: int) -> bool:
        """Take a state for each guess, which it writes; return whether there were enough."""
        if not self.count:
            return True
        taken = self.take(guesses) if guesses <= self.available else None
        sequence.guessed = taken or []
        return taken is not None

    def accept(self, sequence: Sequence, accepted: int) -> None:
        """Resume from the state after the accepted guesses, and release all other states."""
        if not sequence.guessed:
            return
        held = [sequence.state, *sequence.guessed]
        sequence.state = held.pop(accepted)
        self.release([state for state in held if state is not None])
        sequence.guessed = []

    def end(self, sequence: Sequence) -> None:
        """Release the states of a sequence that no longer runs."""
        held = (sequence.state, sequence.next_state, *sequence.guessed)
        self.release([state for state in held if state is not None])
        sequence.state = sequence.next_state = None
        sequence.guessed = []

    def keep(self, sequence: Sequence, content: Content) -> None:
        """Keep the state of a sequence whose computed tokens are all in known blocks.

        `content` is the last one of these.
        """
        if content not in self._snapshots:
            assert sequence.state is not None
            self._snapshots[content] = sequence.state
            self._keep(sequence.state, content)

    def drop(self, content: Content) -> None:
        """Drop the snapshot at the end of a block, if there is one."""
        if content in self._snapshots:
            self._forget(self._snapshots[content])

    def _begin(self, sequence: Sequence, state: int | None) -> None:
        if not self.count:
            return
        sequence.state = state
        if state is not None:
            self.share((state,))
        self._take_next(sequence)

    def _take_next(self, sequence: Sequence) -> None:
        taken = self.take(1)
        assert taken is not None, "there are two states for each sequence that may run"
        (sequence.next_state,) = taken

    def _lose(self, content: Content) -> None:
        del self._snapshots[content]
