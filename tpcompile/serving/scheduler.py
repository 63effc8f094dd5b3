"""The scheduler: which sequences run in a step, and in which blocks.

Data in, a plan out. It uses neither torch nor clocks nor threads, so simulations run the same code
as engines.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable
from itertools import count

from tpcompile.errors import UsageError
from tpcompile.serving.blocks import Blocks
from tpcompile.serving.plan import Limits, Piece, Plan, Sequence, order_of
from tpcompile.serving.states import States


class Scheduler:
    """Sequences that run or wait, first come first served.

    A step computes a new token of each running sequence that is past its prompt, and then chunks of
    prompts, as many as its limit of tokens allows. A sequence takes blocks only for the tokens of
    the step. If none are available, the sequence that arrived last loses its blocks and waits; it
    is computed again later, with the new tokens that it already has.

    Only whole chunks are shared, so what a sequence shares does not depend on where the prompts of
    others ended.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._forget_all()
        self.running: list[Sequence] = []
        """The running sequences by `order`, like the waiting ones."""
        self.waiting: deque[Sequence] = deque()
        self._numbers = count()
        self._copies: list[tuple[int, int]] = []

    def _forget_all(self) -> None:
        self.states = States(self.limits.states)
        self.blocks = Blocks(self.limits.blocks, self.limits.block, lost=self.states.drop)

    def add(self, tokens: list[int], salt: Hashable = None, whole: bool = False) -> Sequence:
        """Add a sequence, which waits until its first chunk fits.

        With `whole`, it reuses nothing from the cache.
        """
        if not tokens:
            raise UsageError("A prompt must have at least one token")
        if len(tokens) > self.limits.most_tokens:
            raise UsageError(
                "A sequence must fit in the KV cache",
                got=f"{len(tokens):,} tokens",
                expected=f"at most {self.limits.most_tokens:,} tokens",
            )
        number = next(self._numbers)
        sequence = Sequence((number, number), list(tokens), salt, whole=whole)
        self.waiting.append(sequence)
        return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        """Add a sequence with the same tokens, which shares the blocks of a running one.

        It gets a copy of the last block if this is not full. If it cannot run now, it waits and
        shares only whole chunks. Either way it comes before requests that arrived later.
        """
        order = sequence.order[0], next(self._numbers)
        child = Sequence(order, list(sequence.tokens), sequence.salt)
        full = sequence.computed // self.limits.block
        unshared = len(sequence.blocks) - full
        room = len(self.running) < self.limits.sequences and sequence in self.running
        fresh = self.blocks.take(unshared) if room else None
        if fresh is None:
            insort(self.waiting, child, key=order_of)
            return child
        self.blocks.share(sequence.blocks[:full])
        self._copies += zip(sequence.blocks[full:], fresh, strict=True)
        child.blocks = sequence.blocks[:full] + fresh
        child.computed = sequence.computed
        self.states.fork(sequence, child)
        insort(self.running, child, key=order_of)
        return child

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences that are past their prompts."""
        return [sequence for sequence in self.running if sequence.left == 1]

    def append(self, sequence: Sequence, token: int) -> None:
        """Append a new token. The sequence may have at most `limits.most_tokens`."""
        sequence.tokens.append(token)

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence and release its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def restart(self) -> None:
        """Requeue all sequences, because the KV cache and the states are lost."""
        self._copies = []
        for sequence in self.running:
            self.states.end(sequence)
            sequence.blocks, sequence.computed = [], 0
        self.waiting = deque(sorted([*self.running, *self.waiting], key=order_of))
        self.running = []
        self._forget_all()

    def plan(self) -> Plan:
        """Plan the next step. Its pieces count as computed only after `done`."""
        copies, self._copies = self._copies, []
        plan = Plan([], [], copies, [])
        budget = self.limits.step_tokens
        place = 0
        while place < len(self.running):  # preemption removes sequences from the end
            sequence = self.running[place]
            if sequence.left == 1 and budget and self._room(sequence, len(sequence.tokens), plan):
                guesses = self._guesses(sequence, budget)
                plan.decodes.append(Piece(sequence, sequence.computed, 1, guesses))
                budget -= 1 + len(guesses)
            place += 1
        place = 0
        while place < len(self.running):
            if self.running[place].left > 1:
                budget = self._chunks(self.running[place], plan, budget)
            place += 1
        while self.waiting and not plan.preempted and len(self.running) < self.limits.sequences:
            left = budget
            budget = self._admit(self.waiting[0], plan, budget)
            if budget == left:
                break
        return plan

    def _guesses(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """Return the guesses that a step computes: they take no blocks from other sequences."""
        guesses, sequence.draft = tuple(sequence.draft[: budget - 1]), []
        length = len(sequence.tokens) + len(guesses)
        missing = self._missing(sequence, length)
        if length > self.limits.most_tokens or missing > self.blocks.available:
            return ()
        if not self.states.guess(sequence, len(guesses)):
            return ()
        sequence.blocks += self.blocks.take(missing) or []
        return guesses

    def accept(self, sequence: Sequence, accepted: int) -> None:
        """Count the `accepted` guesses before the last token as computed.

        A sequence that has ended is not changed.
        """
        if sequence in self.running:
            sequence.computed += accepted
            self.states.accept(sequence, accepted)

    def done(self, pieces: Iterable[Piece]) -> None:
        """Count pieces of a plan as computed; others may share their whole chunks now."""
        block, chunk = self.limits.block, self.limits.chunk
        for piece in pieces:
            sequence = piece.sequence
            sequence.computed += piece.count
            self.states.advance(sequence)
            if piece.count == chunk:
                self._know(sequence, piece.first // block)

    def _know(self, sequence: Sequence, first: int) -> None:
        """Record the contents of the blocks of a chunk; take a snapshot where one may be useful.

        Prompts with the same prefix may resume from the last chunks of this one, from
        chunks at regular distances, and from where this one diverges from an earlier one.
        """
        limits, end = self.limits, sequence.computed
        blocks, has_states = sequence.blocks, limits.states > 0
        self.blocks.know(blocks, sequence.tokens[:end], first, sequence.salt, merge=has_states)
        content = self.blocks.content(blocks[end // limits.block - 1])
        if not has_states or content is None:
            return
        far = end % (limits.chunk * limits.snapshot_chunks) == 0
        if far or sequence.left <= limits.chunk or end == sequence.met:
            self.states.keep(sequence, content)

    def _chunks(self, sequence: Sequence, plan: Plan, budget: int) -> int:
        """Plan the next chunks of a running sequence; return the tokens that are left."""
        first = sequence.computed
        while first < len(sequence.tokens):
            end = self._chunk_end(sequence, first)
            if end - first > budget or not self._room(sequence, end, plan):
                break
            plan.chunks.append(Piece(sequence, first, end - first))
            budget -= end - first
            first = end
        return budget

    def _admit(self, sequence: Sequence, plan: Plan, budget: int) -> int:
        """Let a waiting sequence run if its next chunk fits; return the tokens that are left."""
        if not self.blocks.available:
            return budget
        size, chunk = self.limits.block, self.limits.chunk
        contents = [] if sequence.whole else self.blocks.find(sequence.tokens[:-1], sequence.salt)
        in_chunks = contents[: len(contents) * size // chunk * chunk // size]
        known = self.states.resumable(in_chunks)
        held, shared = [content.block for content in known], len(known) * size
        end = self._chunk_end(sequence, shared)
        if end - shared > budget:
            return budget
        self.blocks.share(held)
        fresh = self.blocks.take(-(-end // size) - len(held))
        if fresh is None:
            self.blocks.release(held)
            return budget
        self.waiting.popleft()
        insort(self.running, sequence, key=order_of)
        sequence.blocks, sequence.computed, sequence.shared = held + fresh, shared, shared
        sequence.met = len(in_chunks) * size
        self.states.begin(sequence, known)
        return self._chunks(sequence, plan, budget)

    def _chunk_end(self, sequence: Sequence, first: int) -> int:
        chunk = self.limits.chunk
        return min(len(sequence.tokens), (first // chunk + 1) * chunk)

    def _room(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        """Take blocks for some tokens of a running sequence; return whether there were enough.

        Sequences that arrived later lose theirs. So the first one always makes progress, and the
        last one keeps its blocks until the others need them.
        """
        missing = self._missing(sequence, tokens)
        if not missing:
            return True
        fresh = self.blocks.take(missing)
        while fresh is None and self.running[-1] is not sequence:
            self._preempt(self.running[-1], plan)
            fresh = self.blocks.take(missing)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        """Return the number of blocks that a sequence lacks for some tokens."""
        return max(0, -(-tokens // self.limits.block) - len(sequence.blocks))

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        """Preempt the sequence that arrived last."""
        self.running.pop()
        for pieces in (plan.decodes, plan.chunks):
            pieces[:] = [piece for piece in pieces if piece.sequence is not victim]
        blocks = set(victim.blocks)
        plan.copies[:] = [
            (source, target) for source, target in plan.copies if target not in blocks
        ]
        self._release(victim)
        victim.computed = 0
        plan.preempted.append(victim)
        insort(self.waiting, victim, key=order_of)

    def _release(self, sequence: Sequence) -> None:
        blocks = set(sequence.blocks)
        self._copies = [(source, target) for source, target in self._copies if target not in blocks]
        self.blocks.release(sequence.blocks)
        self.states.end(sequence)
        sequence.blocks = []
