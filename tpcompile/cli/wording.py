"""Messages of the Python API in the words of the command line: arguments become options."""

from __future__ import annotations

import re
from collections.abc import Collection

_VALUE = r"\"[^\"]*\"|'[^']*'|[\w.-]*\w"


def with_options(message: str, arguments: Collection[str]) -> str:
    """Write the arguments that a message names as options: `max_seq_len` as --max-seq-len.

    `arguments` are those of the command. Attributes in the text of a graph, and options of passes
    in braces, stay as they are.
    """
    names = "|".join(sorted(map(re.escape, arguments), key=len, reverse=True))
    if not names:
        return message
    given = rf"(?<![\w{{(,=:-])(?<!, )({names})=({_VALUE})"
    message = re.sub(given, lambda found: _option(found[1], found[2]), message)
    message = re.sub(rf"^({names})(?= must )", lambda found: _option(found[1]), message)
    long = "|".join(name for name in names.split("|") if "_" in name)
    if not long:
        return message
    return re.sub(rf"(?<![\w.-])({long})(?![\w=])", lambda found: _option(found[1]), message)


def _option(name: str, value: str = "") -> str:
    option = "--" + name.replace("_", "-")
    value = value.strip("\"'")
    return option if value in ("", "True") else f"{option} {value}"
