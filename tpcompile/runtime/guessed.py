"""Steps of guessed tokens: each has the bits of a step with this token alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from tpcompile.runtime.arguments import Arguments
from tpcompile.runtime.kv.cache import Guesses, PagedCache
from tpcompile.runtime.kv.packing import Packed, pack
from tpcompile.runtime.ranks.step import MOST_ROWS


def run_guessed(
    arguments: Arguments,
    wanted: int,
    cache: PagedCache,
    guesses: Guesses,
    run: Callable[[Packed, bool], torch.Tensor],
) -> torch.Tensor:
    """Compute tokens, of which the last ones are guessed; return the logits of the last `wanted`.

    The first of these columns has the last token that is certain. If there are tokens before it,
    they are computed with it, as a prompt. `run` computes packed tokens, as rows if its second
    argument is true. If it raises, the cache is restored.

    All guesses count as accepted; `crop` subtracts the rejected ones.
    """
    length, before = arguments.input_ids.shape[1], cache.get_seq_length()
    certain = length - wanted + 1
    first = 0 if certain == 1 else certain
    edges = [*range(first, length, MOST_ROWS), length]
    pieces = [(start, end, True) for start, end in pairwise(edges)]
    if first:
        pieces.insert(0, (0, first, False))
    results = []
    try:
        for start, end, are_rows in pieces:
            part = _columns(arguments, start, end, before)
            columns = range(end - start) if are_rows else [end - 1]
            packed = pack(
                part.input_ids, part.attention_mask, part.position_ids, columns, cache.real
            )
            results.append(packed.unpack(run(packed, are_rows)))
    except BaseException:
        cache.guesses = None
        cache.crop(before - cache.get_seq_length())
        raise
    guesses.drafted += wanted - 1
    guesses.accepted += wanted - 1
    return torch.cat(results, 1)


def _columns(arguments: Arguments, start: int, end: int, cached: int) -> Arguments:
    """Return the arguments of some columns, after `cached` columns and those before `start`."""
    mask, positions = arguments.attention_mask, arguments.position_ids
    return replace(
        arguments,
        input_ids=arguments.input_ids[:, start:end],
        attention_mask=None if mask is None else mask[:, : cached + end],
        position_ids=None if positions is None else positions[:, start:end],
    )
