"""The inputs of the model for a planned step."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from tpcompile.runtime.kv.blocks import Row, blocks_for, tables_of
from tpcompile.runtime.launches import Reserved
from tpcompile.runtime.ranks.step import Step
from tpcompile.serving.plan import Piece


def step_of(
    pieces: Many[Piece],
    output: str,
    reserved: Reserved,
    copies: Many[tuple[int, int]] = (),
    every: bool = False,
    pad: int = 1,
) -> Step:
    """Return the step that computes pieces of sequences.

    It returns `output` for each piece after which the next token of its sequence is known, and for
    each of its guesses, or with `every` for all tokens. Further results follow, up to a multiple of
    `pad`.
    """
    numbers, size = reserved.numbers, reserved.size
    tokens: list[int] = []
    positions: list[int] = []
    starts, rows, slots, lengths = [0], list[int](), list[int](), list[int]()
    held: list[Row] = []
    for piece in pieces:
        new = piece.tokens
        end = piece.first + len(new)
        blocks = piece.sequence.blocks[: blocks_for(end, size)]
        table = tuple(numbers[block] for block in blocks)
        tokens += new
        positions += range(piece.first, end)
        slots += [
            table[position // size] * size + position % size for position in range(piece.first, end)
        ]
        starts.append(len(tokens))
        if every or piece.guesses:
            rows += range(starts[-2], len(tokens))
        elif piece.last:
            rows.append(len(tokens) - 1)
        lengths.append(end)
        held.append(Row(table, end))
    rows += rows[:1] * (-len(rows) % pad)
    inputs = {
        "input_ids": tokens,
        "positions": positions,
        "starts": starts,
        "logit_rows": rows,
        "slots": slots,
        "lengths": lengths,
        **_states(pieces, reserved.states),
    }
    tensors = {name: torch.tensor(value, dtype=torch.long) for name, value in inputs.items()}
    return Step(
        {**tensors, "tables": tables_of(held)},
        output,
        reserved.in_all,
        [(numbers[source], numbers[target]) for source, target in copies],
        states=reserved.states_in_all,
        few=True,
        rows=any(piece.guesses for piece in pieces),
    )


def _states(pieces: Many[Piece], numbers: Many[int]) -> dict[str, list[int]]:
    """Return the states that pieces and guesses read and write; without linear attention, nothing.

    A new sequence reads no state, so its number is arbitrary. Each guess reads the state that the
    token before it writes.
    """
    if not numbers:
        return {}
    read, write = [], []
    for piece in pieces:
        assert piece.sequence.next_state is not None
        written = [piece.sequence.next_state, *piece.sequence.guessed[: len(piece.guesses)]]
        read += [numbers[state] for state in (piece.sequence.state or 0, *written[:-1])]
        write += [numbers[state] for state in written]
    return {
        "read": read,
        "write": write,
    }
