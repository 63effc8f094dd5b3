"""Random damage to one line of a text."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_WORDS = re.compile(r"\w+|\W")
_NUMBERS = ("0", "1", "2", "7", "99", "-1", "4096", "1000000000", "12345678901234567890123")


class Damage:
    """Damage to texts, which takes lines and words from all of them."""

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self._random = random.Random(seed)
        self._texts = [text.splitlines() for text in texts]
        self._lines = sorted({line for lines in self._texts for line in lines})
        self._words = sorted({word for line in self._lines for word in _WORDS.findall(line)})

    def text(self) -> str:
        """Return one of the texts with one line changed."""
        choice, place = self._random.choice, self._random.randrange
        lines = list(choice(self._texts))
        index = place(len(lines))
        line, words = lines[index], _WORDS.findall(lines[index])
        cut, word = place(len(line)), place(len(words))
        other = place(len(words))
        numbers = [i for i, token in enumerate(words) if token.isdigit()] or [word]
        swapped = list(words)
        swapped[word], swapped[other] = words[other], words[word]
        changed = [
            [],
            [line, line],
            [choice(self._lines)],
            [choice(self._lines), line],
            [line[:cut]],
            [line[:cut] + chr(place(0x3000)) + line[cut + 1 :]],
            [_with(words, word, choice(self._words))],
            [_with(words, choice(numbers), choice(_NUMBERS))],
            ["".join(swapped)],
        ]
        return "\n".join([*lines[:index], *choice(changed), *lines[index + 1 :]]) + "\n"


def _with(words: list[str], place: int, word: str) -> str:
    return "".join([*words[:place], word, *words[place + 1 :]])
