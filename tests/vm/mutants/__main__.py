"""`python -m tests.vm.mutants [COUNT [WORDS]]`: print the verifier's results on mutants.

COUNT is the number per schedule mistake; WORDS is the number with a wrong word per instruction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.vm.mutants.table import KINDS, Count, judged
from tests.vm.mutants.words import MANY, judged_words
from tpcompile.vm.program.instruction_set import INSTRUCTIONS


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if unsafe mutants are accepted or too many safe ones are refused.

    Schedules and words are counted separately.
    """
    count, words = [*map(int, arguments), *(80, 80)[len(arguments) :]]
    table = Table(title=f"Mutants of real programs, at most {max(count, words)} of a kind")
    table.add_column("kind", no_wrap=True)
    for heading in ("mutants", "refused", "accepted", "unsafe", "unsafe accepted", "safe refused"):
        table.add_column(heading, justify="right")
    groups: list[dict[str, Callable[[], tuple[Count, Sequence[object]]]]] = [
        {kind: partial(judged, kind, count) for kind in KINDS} if count else {},
        {
            f"word of {kind.name}": partial(judged_words, kind, words, bases=MANY)
            for kind in (INSTRUCTIONS.values() if words else ())
        },
    ]
    wrong, strange = 0, []
    for group in filter(None, groups):
        together = Count()
        for kind, judge in track(group.items(), "mutants", console=Console(stderr=True)):
            counts, mutants = judge()
            table.add_row(kind, *_columns(counts))
            together.add(counts)
            strange += mutants
        table.add_section()
        table.add_row("all", *_columns(together), style="bold")
        table.add_section()
        wrong += together.unsafe_accepted or together.safe_refused > 0.05 * together.safe
    console = Console(width=130, highlight=False)
    console.print(table)
    for mutant in strange:
        console.print(f"They differ about {mutant}", markup=False, soft_wrap=True)
    return int(wrong > 0)


def _columns(counts: Count) -> list[str]:
    safe = f"{counts.safe_refused} of {counts.safe}"
    share = f" ({100 * counts.safe_refused / counts.safe:.1f} %)" if counts.safe else ""
    numbers = counts.mutants, counts.refused, counts.mutants - counts.refused, counts.unsafe
    return [*map(str, numbers), str(counts.unsafe_accepted), safe + share]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
