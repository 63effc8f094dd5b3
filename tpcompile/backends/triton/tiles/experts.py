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
def norm_experts(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    CHOSEN: tl.constexpr,
    EXTENT: tl.constexpr,
    HELD: tl.constexpr,
    PLACES: tl.constexpr,
    ITEMS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute silu(gate) · up for some rows of each chosen expert."""
    x = start_of(buffers, tl.load(words + abi.NORM_EXPERTS_NORMED_X), DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_EXPERTS_NORMED_WEIGHT), DTYPE)
    out = start_of(buffers, tl.load(words + abi.NORM_EXPERTS_OUT), DTYPE)
    first = tl.load(words + abi.NORM_EXPERTS_ROWS)
    rows = tl.load(words + abi.NORM_EXPERTS_ROWS + 1) - first
    number = tl.load(words + abi.NORM_EXPERTS_WEIGHT)
    gate = rows_of(buffers, number, first, 0, WIDTH, DTYPE, FORMAT)
    up = rows_of(buffers, number, EXTENT + first, 0, WIDTH, DTYPE, FORMAT)
    inverses = own
    for begin in range(0, BATCH, SEQUENCES):
        inverse = inverse_rms(x, begin, BATCH, SEQUENCES, WIDTH, EPS)
        tl.store(inverses + begin + tl.arange(0, SEQUENCES), inverse)
    ids = start_of(buffers, tl.load(words + abi.NORM_EXPERTS_IDS), tl.int32)
    items = _items_at(own + tl.cdiv(BATCH, SEQUENCES) * SEQUENCES, ITEMS)
    held = tl.load(words + abi.NORM_EXPERTS_FIRST)
    count = _share_out(ids, held, items, BATCH * CHOSEN, HELD, PLACES, ITEMS, SEQUENCES)
    each = count_of(rows, WIDTH, TILES * ROWS, COLUMNS, SEQUENCES)
    sums = no_sums(ROWS, SEQUENCES, 2 * TILES)
    for tile in tl.range(0, count * each, num_stages=STAGES):
        row, place, is_last = place_of(tile % each, WIDTH, TILES * ROWS, COLUMNS, SEQUENCES)
        expert, choices = _item(items, tile // each, ITEMS, SEQUENCES)
        begin = 2 * EXTENT * expert
        tiles = tiles_of(
            gate, begin + row, begin + rows, place, WIDTH, WIDTH, TILES, ROWS, COLUMNS,
            DTYPE, FORMAT,
        )  # fmt: skip
        tiles += tiles_of(
            up, begin + row, begin + rows, place, WIDTH, WIDTH, TILES, ROWS, COLUMNS, DTYPE, FORMAT
        )
        there = choices >= 0
        sequences = tl.where(there, choices // CHOSEN, 0)
        inverse = tl.load(inverses + sequences)
        sums = plus_gathered(
            sums, tiles, x, sequences[None, :], there[None, :], norm, inverse, place, WIDTH,
            WIDTH, True, ZERO_CENTERED, DTYPE, COLUMNS,
        )  # fmt: skip
        if is_last:
            for part in tl.static_range(TILES):
                places = row + part * ROWS + tl.arange(0, ROWS)[:, None]
                found = as_rounded(total(sums, part, 2 * TILES), DTYPE)
                found = as_rounded(activated(found, abi.ACTIVATION_SILU), DTYPE)
                found *= as_rounded(total(sums, TILES + part, 2 * TILES), DTYPE)
                at = choices[None, :] * EXTENT + first + places
                inside = (places < rows) & there[None, :]
                tl.store(out + at, rounded(found, DTYPE), mask=inside)
            sums = no_sums(ROWS, SEQUENCES, 2 * TILES)


@triton.jit
def expert_terms(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    EXTENT: tl.constexpr,
    HELD: tl.constexpr,
    PLACES: tl.constexpr,
    ITEMS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute a term of each sum: some rows of the chosen experts' results, times their scores.

    The results of all choices pass through the worker's scratch memory. So those of a sequence are
    added in the order of its choices, whichever items they were in.
    """
    x = start_of(buffers, tl.load(words + abi.EXPERT_TERMS_X), DTYPE)
    number = tl.load(words + abi.EXPERT_TERMS_WEIGHT)
    first = tl.load(words + abi.EXPERT_TERMS_ROWS)
    rows = tl.load(words + abi.EXPERT_TERMS_ROWS + 1) - first
    weight = rows_of(buffers, number, first, 0, WIDTH, DTYPE, FORMAT)
    ids = start_of(buffers, tl.load(words + abi.EXPERT_TERMS_IDS), tl.int32)
    held = tl.load(words + abi.EXPERT_TERMS_FIRST)
    results = own
    items = _items_at(own + BATCH * CHOSEN * TILES * ROWS, ITEMS)
    count = _share_out(ids, held, items, BATCH * CHOSEN, HELD, PLACES, ITEMS, SEQUENCES)
    each = chunks_of(WIDTH, COLUMNS, SEQUENCES)
    for row in range(0, rows, TILES * ROWS):
        sums = no_sums(ROWS, SEQUENCES, TILES)
        for tile in tl.range(0, count * each, num_stages=STAGES):
            _, place, is_last = place_of(tile % each, WIDTH, TILES * ROWS, COLUMNS, SEQUENCES)
            expert, choices = _item(items, tile // each, ITEMS, SEQUENCES)
            begin = EXTENT * expert
            tiles = tiles_of(
                weight, begin + row, begin + rows, place, WIDTH, WIDTH, TILES, ROWS, COLUMNS,
                DTYPE, FORMAT,
            )  # fmt: skip
            sums = plus_gathered(
                sums, tiles, x, choices[None, :], choices[None, :] >= 0, x, 0.0, place, WIDTH,
                WIDTH, False, False, DTYPE, COLUMNS,
            )  # fmt: skip
            if is_last:
                for part in tl.static_range(TILES):
                    at = (choices[None, :] * TILES + part) * ROWS + tl.arange(0, ROWS)[:, None]
                    found = total(sums, part, TILES)
                    tl.store(results + at, found, mask=choices[None, :] >= 0)
                sums = no_sums(ROWS, SEQUENCES, TILES)
        tl.debug_barrier()
        _store_sums(
            words, buffers, ids, held, results, first + row, rows - row,
            BATCH, SEQUENCES, TILES, ROWS, CHOSEN, HELD, DTYPE,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def _store_sums(
    words,
    buffers,
    ids,
    held,
    results,
    first,
    rows,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    CHOSEN: tl.constexpr,
    HELD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add the results of each sequence's experts on this rank, for rows that begin with `first`."""
    scores = start_of(buffers, tl.load(words + abi.EXPERT_TERMS_SCORES), DTYPE)
    number = tl.load(words + abi.EXPERT_TERMS_OUT)
    stride = stride_of(buffers, number, 0)
    out = start_of(buffers, number, tl.float32) + first
    for begin in range(0, BATCH, SEQUENCES):
        sequences = begin + tl.arange(0, SEQUENCES)[None, :]
        for part in tl.static_range(TILES):
            places = part * ROWS + tl.arange(0, ROWS)[:, None]
            found = tl.zeros([ROWS, SEQUENCES], tl.float32)
            for place in range(CHOSEN):
                choice = sequences * CHOSEN + place
                expert = tl.load(ids + choice, mask=sequences < BATCH, other=abi.NONE) - held
                here = (expert >= 0) & (expert < HELD)
                score = tl.load(scores + choice, mask=here, other=0.0).to(tl.float32)
                value = tl.load(results + choice * (TILES * ROWS) + places, mask=here, other=0.0)
                found = tl.fma(value, tl.broadcast_to(score, value.shape), found)
            inside = (places < rows) & (sequences < BATCH)
            tl.store(out + sequences * stride + places, found, mask=inside)


@triton.jit
def _items_at(memory, ITEMS: tl.constexpr):
    """Return the addresses of the experts of items, and of their choices, in scratch memory.

    The loop over tiles loads numbers of 2 bytes where it needs them. Triton would load larger ones
    ahead, and weights, whose address depends on them, so much later.
    """
    experts = memory.to(tl.pointer_type(tl.int16))
    return experts, experts + ITEMS


@triton.jit
def _share_out(
    ids,
    first,
    items,
    COUNT: tl.constexpr,
    HELD: tl.constexpr,
    PLACES: tl.constexpr,
    ITEMS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Store the items of COUNT choices in the order of experts, and return their number.

    Each expert that the rank holds, from the `first` on, counts and places its choices alone, so no
    values pass between threads. Places that an item has left are no choices.
    """
    own = tl.arange(0, PLACES)
    choices = tl.zeros([PLACES], tl.int32)
    for choice in range(COUNT):
        choices += (tl.load(ids + choice) - first == own).to(tl.int32)
    choices = tl.where(own < HELD, choices, 0)
    each = tl.cdiv(choices, SEQUENCES)
    begin = tl.cumsum(each, 0) - each
    for item in range(tl.max(each, 0)):
        tl.store(items[0] + begin + item, own.to(tl.int16), mask=item < each)
    for left in range(SEQUENCES):
        place = choices + left
        at = _place_of(items, begin * SEQUENCES + place, ITEMS, SEQUENCES)
        tl.store(at, tl.full([PLACES], abi.NONE, tl.int16), mask=place < each * SEQUENCES)
    place = begin * SEQUENCES
    for choice in range(COUNT):
        here = (tl.load(ids + choice) - first == own) & (own < HELD)
        at = _place_of(items, place, ITEMS, SEQUENCES)
        tl.store(at, (tl.zeros([PLACES], tl.int32) + choice).to(tl.int16), mask=here)
        place += here.to(tl.int32)
    tl.debug_barrier()
    return tl.sum(each, 0)


@triton.jit
def _place_of(items, place, ITEMS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Return the address of a choice of an item."""
    return items[1] + place % SEQUENCES * ITEMS + place // SEQUENCES


@triton.jit
def _item(items, item, ITEMS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Return the expert of an item, and its choices."""
    choices = tl.load(items[1] + tl.arange(0, SEQUENCES) * ITEMS + item).to(tl.int32)
    return tl.load(items[0] + item).to(tl.int32), choices


@triton.jit
def shared_terms(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute a term of each sum: some rows of the shared expert's result, times its gate."""
    x = start_of(buffers, tl.load(words + abi.SHARED_TERMS_X), DTYPE)
    gates = start_of(buffers, tl.load(words + abi.SHARED_TERMS_GATE), DTYPE)
    number = tl.load(words + abi.SHARED_TERMS_OUT)
    stride = stride_of(buffers, number, 0)
    out = start_of(buffers, number, tl.float32)
    out += tl.load(words + abi.SHARED_TERMS_SLOT) * BATCH * stride
    first = tl.load(words + abi.SHARED_TERMS_ROWS)
    rows = tl.load(words + abi.SHARED_TERMS_ROWS + 1) - first
    number = tl.load(words + abi.SHARED_TERMS_WEIGHT)
    weight = rows_of(buffers, number, first, 0, WIDTH, DTYPE, FORMAT)
    store_terms(
        x, weight, gates, out + first, stride, rows, WIDTH, BATCH, SEQUENCES, TILES, ROWS,
        COLUMNS, STAGES, WIDTH, True, DTYPE, FORMAT,
    )  # fmt: skip
