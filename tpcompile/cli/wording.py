"""Messages of the Python API in the words of the command line: arguments become options."""

from __future__ import annotations

import re
from collections.abc import Collection

_VALUE = r"\"[^\"]*\"|'[^']*'|[\w.-]*\w"


def with_options(message: str, arguments: Collection[str], specified: Collection[str]) -> str:
    """Write the arguments that a message names as options: `max_seq_len` as --max-seq-len.

    `arguments` are those of the command. Attributes in the text of a graph, and options of passes
    in braces, stay as they are. So do numbers of arguments that are not among the `specified` ones:
    `workers=0` may be that of a file.
    """
    if "prompt_ids" in arguments:
        message = message.replace("input_ids", "prompt_ids")
    names = "|".join(sorted(map(re.escape, arguments), key=len, reverse=True))
    if not names:
        return message
    pair = rf"(?<![\w{{(,=:-])(?<!, )({names})=({_VALUE})"

    def replaced(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        elsewhere = value[0].isdigit() and name not in specified and "_" not in name
        return match[0] if elsewhere else _option(name, value)

    message = re.sub(pair, replaced, message)
    message = re.sub(rf"^({names})(?= must )", lambda match: _option(match[1]), message)
    long = "|".join(name for name in names.split("|") if "_" in name)
    if not long:
        return message
    return re.sub(rf"(?<![\w.-])({long})(?![\w=])", lambda match: _option(match[1]), message)


def _option(name: str, value: str = "") -> str:
    option = "--" + name.replace("_", "-")
    value = value.strip("\"'")
    return option if value in ("", "True") else f"{option} {value}"
