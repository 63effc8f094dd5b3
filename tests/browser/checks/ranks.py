"""The Ranks view: who holds what."""

from __future__ import annotations

from tests.browser.checks.texts import number
from tests.browser.reader import Reader
from tests.browser.subject import LAYERS, Truth
from tpcompile.inspect.plan import plan_report
from tpcompile.ir.info import info_of
from tpcompile.ir.plan import Plan
from tpcompile.runtime.ranks.rank import rank_modules


def shares(reader: Reader, truth: Truth) -> None:
    """Read how much each rank holds."""
    reader.go(view="ranks", c=0)
    report = plan_report(truth.graph)
    table = reader.rows("table.shares")[1:]
    for row, share in zip(table, report.ranks, strict=True):
        counts = (share.q_heads, share.kv_heads, f"{share.ffn:,}", f"{share.vocab:,}")
        assert row[:5] == [f"rank {share.rank}", *map(str, counts)]
        assert row[6] == f"{share.kv_bytes_per_token:,} B"
    total = sum(collective.bytes_per_token for collective in report.collectives)
    assert f"each rank sends {total / 1e3:.2f}".rstrip("0").rstrip(".") in reader.text("#view")
    wires = [row for row in reader.rows('[aria-label="Collectives"]') if row and row[0]]
    assert [(row[1], number(row[3])) for row in wires] == [
        (collective.op, collective.bytes_per_token) for collective in report.collectives
    ]


def heads(reader: Reader, truth: Truth) -> None:
    """Read which KV heads rank 2 holds, and why other ranks hold them too."""
    plan = info_of(truth.graph).plan
    assert plan is not None
    reader.go(view="ranks", c=0)
    told = reader.texts("section.axis ul.repeats li")
    wanted = _repeats(plan)
    assert told == wanted and len(wanted) == 5
    mine = [text for text in told if text.startswith("Rank 2")]
    assert mine == [
        "Rank 2 holds KV head 1, which ranks 1, 3 also hold: its query head 4 reads it."
    ]
    strip = reader.page.locator('svg[role="img"]').nth(1).get_attribute("aria-label")
    assert "rank 2 holds 1;" in strip and "rank 1 holds 0 to 1" in strip


def collectives(reader: Reader, truth: Truth) -> None:
    """Read which passes put the collectives of a decode step in; the panel must say the same."""
    reader.go(view="ranks", c=1)
    rows = [row for row in reader.rows('[aria-label="Collectives"]') if row and row[0]]
    sums = [row for row in rows if row[1] == "all_reduce"]
    assert len(sums) == 1 + 2 * LAYERS
    fused = "shard-linears (inserted), insert-collectives (replaced), fuse-residual (fused)"
    assert [row[4] for row in sums] == [
        "vocab-parallel (replaced), insert-collectives (replaced)",
        *[fused] * (2 * LAYERS),
    ]
    reader.go(view="ranks", c=1, node=sums[-1][2].removeprefix("%"))
    assert f"The collective in it: {fused}." in reader.under("Why")


def _repeats(plan: Plan) -> list[str]:
    """Say of each KV head on several ranks why each of them has it."""
    layouts = next(iter(plan.heads.values()))
    held = {rank: _units(layouts.keys.parts[rank]) for rank in range(plan.tp)}
    queries = {rank: _units(layouts.queries.parts[rank]) for rank in range(plan.tp)}
    group = layouts.queries.units // layouts.keys.units
    told = []
    for rank, held_heads in held.items():
        for head in held_heads:
            sharers = [other for other, theirs in held.items() if other != rank and head in theirs]
            if not sharers:
                continue
            reading = [str(query) for query in queries[rank] if query // group == head]
            many = len(sharers) > 1
            told.append(
                f"Rank {rank} holds KV head {head}, which rank{'s' * many} "
                f"{', '.join(map(str, sharers))} also hold{'' if many else 's'}: its query "
                f"head{'s' * (len(reading) > 1)} {', '.join(reading)} "
                f"read{'' if len(reading) > 1 else 's'} it."
            )
    return told


def _units(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [unit for start, stop in runs for unit in range(start, stop)]


def module(reader: Reader, truth: Truth) -> None:
    """Read the emitted module of each rank."""
    for emitted in rank_modules(truth.graph):
        reader.go(view="ranks", c=0, rank=emitted.rank)
        assert reader.text("pre.module") == emitted.source.strip()
        label = reader.page.eval_on_selector('select[aria-label^="Rank of"]', "one => one.value")
        assert label == str(emitted.rank)
