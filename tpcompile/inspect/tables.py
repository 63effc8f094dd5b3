"""Tables as text, at most 80 columns wide, the same on a terminal and in a file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 80


def table_text(*tables: Table) -> str:
    """Format the tables one below the other, without trailing spaces."""
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=_WIDTH)
    for table in tables:
        console.print(table)
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())
