"""`python -m tests.vm.mutants [COUNT]`: the table of what the verifier says of so many mutants."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.vm.mutants.table import KINDS, Count, judged


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 if something unsafe is accepted, or too much that is safe refused."""
    count = int(arguments[0]) if arguments else 80
    table = Table(title=f"Mutants of real programs, at most {count} of a kind")
    table.add_column("kind", no_wrap=True)
    for heading in ("mutants", "refused", "accepted", "unsafe", "unsafe accepted", "safe refused"):
        table.add_column(heading, justify="right")
    together, strange = Count(), []
    for kind in track(KINDS, "mutants", console=Console(stderr=True)):
        found, own = judged(kind, count)
        table.add_row(kind, *_columns(found))
        together.add(found)
        strange += own
    table.add_section()
    table.add_row("all", *_columns(together), style="bold")
    console = Console(width=130, highlight=False)
    console.print(table)
    for mutant in strange:
        console.print(f"They differ about {mutant}", markup=False, soft_wrap=True)
    return int(bool(together.unsafe_accepted) or together.safe_refused > 0.05 * together.safe)


def _columns(found: Count) -> list[str]:
    safe = f"{found.safe_refused} of {found.safe}"
    share = f" ({100 * found.safe_refused / found.safe:.1f} %)" if found.safe else ""
    numbers = found.mutants, found.refused, found.mutants - found.refused, found.unsafe
    return [*map(str, numbers), str(found.unsafe_accepted), safe + share]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
