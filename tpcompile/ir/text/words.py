"""Names in the text of a graph, which are quoted if they contain more than letters and digits."""

from __future__ import annotations

import json
import re

BARE = re.compile(r"[A-Za-z0-9_./@-]+")
"""The names that need no quotes, unless they are keywords."""
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
KEYWORDS = ("permute", "pad")


def one_line(text: str) -> str:
    """Quote text that could not be read back from the end of a line."""
    plain = text.isprintable() and text == text.strip() and not text.startswith('"')
    return text if plain else json.dumps(text)


def quoted(name: str) -> str:
    bare = BARE.fullmatch(name) and name not in KEYWORDS
    return name if bare else json.dumps(name)
