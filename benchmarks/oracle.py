"""A drafter that knows the continuations, and is right as often as it is told."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from random import Random

from tpcompile.serving.speculation import Wanted


class Oracle:
    """Guesses from known texts. A guess is replaced by another token with a probability."""

    free = False

    def __init__(
        self, texts: Sequence[Sequence[int]], right: float = 1.0, most: int = 8, seed: int = 0
    ) -> None:
        """`texts` are prompts with their continuations."""
        self.most = most
        self.forgotten: list[Hashable] = []
        self._after: Mapping[tuple[int, ...], int] = {
            tuple(text[:end]): text[end] for text in texts for end in range(1, len(text))
        }
        self._right, self._dice = right, Random(seed)

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Return known continuations, some with wrong tokens."""
        return [self._continued(request) for request in wanted]

    def forget(self, key: Hashable) -> None:
        """Record the sequence."""
        self.forgotten.append(key)

    def _continued(self, wanted: Wanted) -> list[int]:
        text, guesses = list(wanted.tokens), list[int]()
        while len(guesses) < wanted.most and (token := self._after.get(tuple(text))) is not None:
            wrong = self._dice.random() >= self._right
            guesses.append((token + 1) % 199 if wrong else token)
            text.append(token)
        return guesses
