"""Values and numbers in texts of the page."""

from __future__ import annotations

import re


def names(texts: list[str]) -> list[str]:
    """Return the values in texts, in order."""
    return re.findall(r"%(\w+)", "\n".join(texts))


def number(text: str) -> int:
    """Return a number with separators of thousands."""
    return int(text.replace(",", ""))
