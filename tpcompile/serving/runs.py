"""Plans run by the model: new tokens by programs, and chunks of prompts by modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from itertools import islice
from typing import Any

import torch

from tpcompile.runtime.launches import Reserved
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.parts import groups_of_rows
from tpcompile.runtime.ranks.step import MOST_ROWS
from tpcompile.serving.params import SamplingParams
from tpcompile.serving.plan import Piece, Plan, groups
from tpcompile.serving.rows import ROWS, independent_from
from tpcompile.serving.sampling import Chosen
from tpcompile.serving.steps import step_of

Found = tuple[Piece, Any]
"""A piece after which a sequence continues, with the logits of its next token and of the tokens
after its guesses, or with these tokens."""


class Runs:
    """Runs of one model, in blocks of its KV cache.

    Chunks share a run if their results stay bitwise identical: see `independent_from`. A program
    computes chunks of few tokens, whether they come with the rest of their prompts or later, and
    they share its steps.
    """

    def __init__(
        self,
        model: CompiledModel,
        reserved: Reserved,
        params: Callable[[Piece], SamplingParams],
        describe: Callable[[Piece, torch.Tensor], None],
    ) -> None:
        """`params` returns the options of a piece's request; `describe` gets all its logits."""
        self._model, self._reserved = model, reserved
        self._params, self._describe = params, describe
        self._least = independent_from(model)
        self._few = model.most_program_tokens
        self._copies: Many[tuple[int, int]] = ()

    def run(self, plan: Plan) -> Iterator[tuple[Many[Piece], list[Found]]]:
        """Run a plan; yield the pieces of each run, and the sequences that continue after it.

        Chunks come first: new requests get their first token sooner, and others wait no longer,
        since each of their tokens waits for one step's chunks in either order.
        """
        self._copies = plan.copies
        many = [piece for piece in plan.chunks if piece.count > self._few]
        for pieces in groups(many, self._alone, apart=bool(self._reserved.states)):
            rows = 1 if self._least is None or pieces[0].count == 1 else ROWS
            yield pieces, self._chunks(pieces, rows)
        few = [piece for piece in plan.chunks if piece.count <= self._few]
        for pieces in groups_of_rows(few, self._rows):
            yield pieces, self._chunks(pieces, 1)
        if plan.decodes:
            yield plan.decodes, self._together(plan.decodes, 1)

    def release(self) -> None:
        """Free the blocks and the states."""
        self._reserved.release()

    def _chunks(self, pieces: Many[Piece], rows: int) -> list[Found]:
        run = self._described if self._describes(pieces[0]) else self._together
        return run(pieces, rows)

    def _together(self, pieces: Many[Piece], rows: int) -> list[Found]:
        """Run pieces; the number of their logits is padded to a multiple of `rows`."""
        last = [piece for piece in pieces if piece.last]
        plain = all(self._params(piece).plain for piece in last)
        output = "tokens" if last and plain else "logits"
        values = self._run(step_of(pieces, output, self._reserved, self._copies, pad=rows))
        results = iter(
            [Chosen(token) for token in values.tolist()] if output == "tokens" else values
        )
        return [(piece, list(islice(results, 1 + len(piece.guesses)))) for piece in last]

    def _described(self, pieces: Many[Piece], rows: int) -> list[Found]:
        """Run a chunk whose logits are all requested."""
        (piece,) = pieces
        step = step_of([piece], "logits", self._reserved, self._copies, every=True, pad=rows)
        logits = self._run(step)[: piece.count]
        self._describe(piece, logits)
        return [(piece, [logits[-1]])] if piece.last else []

    def _run(self, step: Any) -> torch.Tensor:
        self._copies = ()
        return self._model.run_step(step).cpu()

    def _alone(self, piece: Piece) -> bool:
        return self._least is None or piece.count < self._least or self._describes(piece)

    def _rows(self, piece: Piece) -> int:
        """Return the rows of a piece in a step that it may share; all of them if it runs alone."""
        return MOST_ROWS if self._describes(piece) else piece.count

    def _describes(self, piece: Piece) -> bool:
        return self._params(piece).prompt_logprobs is not None
