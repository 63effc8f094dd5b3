"""The inputs of the model for a planned step."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from tpcompile.runtime.launches import Reserved
from tpcompile.runtime.ranks.step import Step
from tpcompile.serving.plan import Piece


def step_of(
    pieces: Many[Piece],
    output: str,
    reserved: Reserved,
    copies: Many[tuple[int, int]] = (),
    every: bool = False,
) -> Step:
    """Return the step that computes pieces of different sequences.

    It returns `output` for each piece after which the next token of its sequence is known, or with
    `every` for all tokens.
    """
    numbers, size = reserved.numbers, reserved.size
    tokens: list[int] = []
    positions: list[int] = []
    starts, rows, slots, lengths = [0], list[int](), list[int](), list[int]()
    tables: list[list[int]] = []
    for piece in pieces:
        end = piece.first + piece.count
        held = piece.sequence.blocks[: -(-end // size)]
        table = [numbers[block] for block in held]
        tokens += piece.sequence.tokens[piece.first : end]
        positions += range(piece.first, end)
        slots += [table[at // size] * size + at % size for at in range(piece.first, end)]
        starts.append(len(tokens))
        if every:
            rows += range(starts[-2], len(tokens))
        elif piece.last:
            rows.append(len(tokens) - 1)
        lengths.append(end)
        tables.append(table)
    longest = max(map(len, tables))
    padded = [[*table, *[-1] * (longest - len(table))] for table in tables]
    inputs = {
        "input_ids": tokens,
        "positions": positions,
        "starts": starts,
        "logit_rows": rows,
        "slots": slots,
        "tables": padded,
        "lengths": lengths,
    }
    return Step(
        {name: torch.tensor(value, dtype=torch.long) for name, value in inputs.items()},
        output,
        reserved.in_all,
        [(numbers[source], numbers[target]) for source, target in copies],
    )
