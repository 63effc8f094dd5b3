"""Rows of the experts that sequences have chosen, and the terms of the sum of their results.

An instruction shares the choices of all sequences out to items: an item is an expert with up to
eight of its choices, which are the columns of a matrix instruction. One loop runs over the tiles of
all items, so it loads the first weights of an expert while it multiplies those of the one before.
The weights of an expert are read once for eight sequences that have chosen it.
"""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import count_of, inverse_rms, no_sums, plus_gathered, total
from .mlp import activated
from .numbers import as_rounded, rounded
from .project import store_terms
from .weights import chunks_of, place_of, rows_of, tiles_of


@triton.jit
def norm_experts(words, buffers, scratch, SHAPE):
    """Compute silu(gate) · up for some rows of each chosen expert."""
    x = start_of(buffers, tl.load(words + abi.NORM_EXPERTS_NORMED_X), SHAPE.DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_EXPERTS_NORMED_WEIGHT), SHAPE.DTYPE)
    out = start_of(buffers, tl.load(words + abi.NORM_EXPERTS_OUT), SHAPE.DTYPE)
    first = tl.load(words + abi.NORM_EXPERTS_ROWS)
    rows = tl.load(words + abi.NORM_EXPERTS_ROWS + 1) - first
    number = tl.load(words + abi.NORM_EXPERTS_WEIGHT)
    gate = rows_of(buffers, number, first, 0, SHAPE)
    up = rows_of(buffers, number, SHAPE.EXTENT + first, 0, SHAPE)
    inverses = scratch
    for begin in range(0, SHAPE.BATCH, SHAPE.SEQUENCES):
        inverse = inverse_rms(x, begin, SHAPE)
        tl.store(inverses + begin + tl.arange(0, SHAPE.SEQUENCES), inverse)
    ids = start_of(buffers, tl.load(words + abi.NORM_EXPERTS_IDS), tl.int32)
    items = _items_at(scratch + tl.cdiv(SHAPE.BATCH, SHAPE.SEQUENCES) * SHAPE.SEQUENCES, SHAPE)
    first_expert = tl.load(words + abi.NORM_EXPERTS_FIRST)
    count = _share_out(ids, first_expert, items, SHAPE)
    tiles_per_item = count_of(rows, SHAPE.WIDTH, SHAPE)
    sums = no_sums(2 * SHAPE.TILES, SHAPE)
    for tile in tl.range(0, count * tiles_per_item, num_stages=SHAPE.STAGES):
        row, place, is_last = place_of(tile % tiles_per_item, SHAPE.WIDTH, SHAPE)
        expert, choices = _item(items, tile // tiles_per_item, SHAPE)
        begin = 2 * SHAPE.EXTENT * expert
        tiles = tiles_of(gate, begin + row, begin + rows, place, SHAPE.WIDTH, SHAPE)
        tiles += tiles_of(up, begin + row, begin + rows, place, SHAPE.WIDTH, SHAPE)
        there = choices >= 0
        sequences = tl.where(there, choices // SHAPE.CHOSEN, 0)
        inverse = tl.load(inverses + sequences)
        sums = plus_gathered(
            sums, tiles, x, sequences[None, :], there[None, :], norm, inverse,
            place, SHAPE.WIDTH, True, SHAPE,
        )  # fmt: skip
        if is_last:
            for part in tl.static_range(SHAPE.TILES):
                places = row + part * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)[:, None]
                values = as_rounded(total(sums, part, 2 * SHAPE.TILES), SHAPE.DTYPE)
                values = as_rounded(activated(values, abi.ACTIVATION_SILU), SHAPE.DTYPE)
                values *= as_rounded(total(sums, SHAPE.TILES + part, 2 * SHAPE.TILES), SHAPE.DTYPE)
                offsets = choices[None, :] * SHAPE.EXTENT + first + places
                inside = (places < rows) & there[None, :]
                tl.store(out + offsets, rounded(values, SHAPE.DTYPE), mask=inside)
            sums = no_sums(2 * SHAPE.TILES, SHAPE)


@triton.jit
def expert_terms(words, buffers, scratch, SHAPE):
    """Compute a term of each sum: some rows of the chosen experts' results, times their scores.

    The results of all choices pass through the worker's scratch memory. So those of a sequence are
    added in the order of its choices, whichever items they were in.
    """
    x = start_of(buffers, tl.load(words + abi.EXPERT_TERMS_X), SHAPE.DTYPE)
    number = tl.load(words + abi.EXPERT_TERMS_WEIGHT)
    first = tl.load(words + abi.EXPERT_TERMS_ROWS)
    rows = tl.load(words + abi.EXPERT_TERMS_ROWS + 1) - first
    weight = rows_of(buffers, number, first, 0, SHAPE)
    ids = start_of(buffers, tl.load(words + abi.EXPERT_TERMS_IDS), tl.int32)
    first_expert = tl.load(words + abi.EXPERT_TERMS_FIRST)
    results = scratch
    items = _items_at(scratch + SHAPE.BATCH * SHAPE.CHOSEN * SHAPE.TILES * SHAPE.ROWS, SHAPE)
    count = _share_out(ids, first_expert, items, SHAPE)
    chunks = chunks_of(SHAPE.WIDTH, SHAPE)
    for row in range(0, rows, SHAPE.TILES * SHAPE.ROWS):
        sums = no_sums(SHAPE.TILES, SHAPE)
        for tile in tl.range(0, count * chunks, num_stages=SHAPE.STAGES):
            _, place, is_last = place_of(tile % chunks, SHAPE.WIDTH, SHAPE)
            expert, choices = _item(items, tile // chunks, SHAPE)
            begin = SHAPE.EXTENT * expert
            tiles = tiles_of(weight, begin + row, begin + rows, place, SHAPE.WIDTH, SHAPE)
            sums = plus_gathered(
                sums, tiles, x, choices[None, :], choices[None, :] >= 0, x, 0.0,
                place, SHAPE.WIDTH, False, SHAPE,
            )  # fmt: skip
            if is_last:
                for part in tl.static_range(SHAPE.TILES):
                    offsets = (choices[None, :] * SHAPE.TILES + part) * SHAPE.ROWS
                    offsets += tl.arange(0, SHAPE.ROWS)[:, None]
                    values = total(sums, part, SHAPE.TILES)
                    tl.store(results + offsets, values, mask=choices[None, :] >= 0)
                sums = no_sums(SHAPE.TILES, SHAPE)
        tl.debug_barrier()
        _store_sums(words, buffers, ids, first_expert, results, first + row, rows - row, SHAPE)
        tl.debug_barrier()


@triton.jit
def _store_sums(words, buffers, ids, first_expert, results, first, rows, SHAPE):
    """Add the results of each sequence's experts on this rank, for rows that begin with `first`."""
    scores = start_of(buffers, tl.load(words + abi.EXPERT_TERMS_SCORES), SHAPE.DTYPE)
    number = tl.load(words + abi.EXPERT_TERMS_OUT)
    stride = stride_of(buffers, number, 0)
    out = start_of(buffers, number, tl.float32) + first
    for begin in range(0, SHAPE.BATCH, SHAPE.SEQUENCES):
        sequences = begin + tl.arange(0, SHAPE.SEQUENCES)[None, :]
        for part in tl.static_range(SHAPE.TILES):
            places = part * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)[:, None]
            sums = tl.zeros([SHAPE.ROWS, SHAPE.SEQUENCES], tl.float32)
            for place in range(SHAPE.CHOSEN):
                choice = sequences * SHAPE.CHOSEN + place
                expert = (
                    tl.load(ids + choice, mask=sequences < SHAPE.BATCH, other=abi.NONE)
                    - first_expert
                )
                here = (expert >= 0) & (expert < SHAPE.HELD)
                score = tl.load(scores + choice, mask=here, other=0.0).to(tl.float32)
                addresses = results + choice * (SHAPE.TILES * SHAPE.ROWS) + places
                value = tl.load(addresses, mask=here, other=0.0)
                sums = tl.fma(value, tl.broadcast_to(score, value.shape), sums)
            inside = (places < rows) & (sequences < SHAPE.BATCH)
            tl.store(out + sequences * stride + places, sums, mask=inside)


@triton.jit
def _items_at(memory, SHAPE):
    """Return the addresses of the experts of items, and of their choices, in scratch memory.

    The loop over tiles loads numbers of 2 bytes where it needs them. Triton would load larger ones
    ahead, and weights, whose address depends on them, so much later.
    """
    experts = memory.to(tl.pointer_type(tl.int16))
    return experts, experts + SHAPE.ITEMS


@triton.jit
def _share_out(ids, first, items, SHAPE):
    """Store the items of all choices in the order of experts, and return their number.

    Each expert that the rank holds, from the `first` on, counts and places its choices alone, so no
    values pass between threads. Unused places of an item are NONE.
    """
    experts = tl.arange(0, SHAPE.PLACES)
    choices = tl.zeros([SHAPE.PLACES], tl.int32)
    for choice in range(SHAPE.BATCH * SHAPE.CHOSEN):
        choices += (tl.load(ids + choice) - first == experts).to(tl.int32)
    choices = tl.where(experts < SHAPE.HELD, choices, 0)
    item_counts = tl.cdiv(choices, SHAPE.SEQUENCES)
    begin = tl.cumsum(item_counts, 0) - item_counts
    for item in range(tl.max(item_counts, 0)):
        tl.store(items[0] + begin + item, experts.to(tl.int16), mask=item < item_counts)
    for left in range(SHAPE.SEQUENCES):
        place = choices + left
        addresses = _place_of(items, begin * SHAPE.SEQUENCES + place, SHAPE)
        none = tl.full([SHAPE.PLACES], abi.NONE, tl.int16)
        tl.store(addresses, none, mask=place < item_counts * SHAPE.SEQUENCES)
    place = begin * SHAPE.SEQUENCES
    for choice in range(SHAPE.BATCH * SHAPE.CHOSEN):
        here = (tl.load(ids + choice) - first == experts) & (experts < SHAPE.HELD)
        addresses = _place_of(items, place, SHAPE)
        tl.store(addresses, (tl.zeros([SHAPE.PLACES], tl.int32) + choice).to(tl.int16), mask=here)
        place += here.to(tl.int32)
    tl.debug_barrier()
    return tl.sum(item_counts, 0)


@triton.jit
def _place_of(items, place, SHAPE):
    """Return the address of a choice of an item."""
    return items[1] + place % SHAPE.SEQUENCES * SHAPE.ITEMS + place // SHAPE.SEQUENCES


@triton.jit
def _item(items, item, SHAPE):
    """Return the expert of an item, and its choices."""
    choices = tl.load(items[1] + tl.arange(0, SHAPE.SEQUENCES) * SHAPE.ITEMS + item).to(tl.int32)
    return tl.load(items[0] + item).to(tl.int32), choices


@triton.jit
def shared_terms(words, buffers, scratch, SHAPE):
    """Compute a term of each sum: some rows of the shared expert's result, times its gate."""
    x = start_of(buffers, tl.load(words + abi.SHARED_TERMS_X), SHAPE.DTYPE)
    gates = start_of(buffers, tl.load(words + abi.SHARED_TERMS_GATE), SHAPE.DTYPE)
    number = tl.load(words + abi.SHARED_TERMS_OUT)
    stride = stride_of(buffers, number, 0)
    out = start_of(buffers, number, tl.float32)
    out += tl.load(words + abi.SHARED_TERMS_SLOT) * SHAPE.BATCH * stride
    first = tl.load(words + abi.SHARED_TERMS_ROWS)
    rows = tl.load(words + abi.SHARED_TERMS_ROWS + 1) - first
    number = tl.load(words + abi.SHARED_TERMS_WEIGHT)
    weight = rows_of(buffers, number, first, 0, SHAPE)
    store_terms(x, weight, gates, out + first, stride, rows, SHAPE.WIDTH, True, SHAPE)
