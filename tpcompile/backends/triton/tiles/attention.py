"""Attention over a span of a sequence, and the merge of spans."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .numbers import as_rounded, rounded, sigmoid


@triton.jit
def partial_attention(
    words,
    buffers,
    own,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    SPANS: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Attend the query heads of a KV head to some spans of sequences, TOKENS tokens at a time."""
    first_sequence = tl.load(words + abi.PARTIAL_ATTENTION_SEQUENCES)
    last_sequence = tl.load(words + abi.PARTIAL_ATTENTION_SEQUENCES + 1)
    first_head = tl.load(words + abi.PARTIAL_ATTENTION_HEADS)
    count = tl.load(words + abi.PARTIAL_ATTENTION_HEADS + 1) - first_head
    heads = tl.arange(0, HEADS)
    lanes = tl.arange(0, LANES)
    here = (heads < count)[:, None] & (lanes < WIDTH)[None, :]
    for sequence in range(first_sequence, last_sequence):
        lengths = start_of(buffers, tl.load(words + abi.PARTIAL_ATTENTION_LENGTHS), tl.int32)
        length = tl.load(lengths + sequence)
        blocks = (length + BLOCK - 1) // BLOCK
        table = start_of(buffers, tl.load(words + abi.PARTIAL_ATTENTION_TABLES), tl.int32)
        table += sequence * MOST_BLOCKS

        number = tl.load(words + abi.PARTIAL_ATTENTION_Q)
        q = start_of(buffers, number, DTYPE) + sequence * stride_of(buffers, number, 0)
        q += first_head * WIDTH + lanes

        number = tl.load(words + abi.PARTIAL_ATTENTION_CACHE)
        cache = start_of(buffers, number, DTYPE)
        cache += tl.load(words + abi.PARTIAL_ATTENTION_LAYER) * stride_of(buffers, number, 0)
        cache += tl.load(words + abi.PARTIAL_ATTENTION_KV_HEAD) * stride_of(buffers, number, 3)
        side = stride_of(buffers, number, 1)
        slot_stride = stride_of(buffers, number, 2)
        if WIDTH % 8 == 0:  # then so are all strides, which lets a load have 16 bytes
            cache = tl.multiple_of(cache, 16)
            side = side // 8 * 8  # Triton drops the hint `multiple_of` for what is loaded
            slot_stride = slot_stride // 8 * 8

        first_span = tl.load(words + abi.PARTIAL_ATTENTION_SPAN)
        last_span = tl.load(words + abi.PARTIAL_ATTENTION_SPAN + 1)
        for span in range(first_span, last_span):
            first = blocks * span // SPANS * BLOCK
            last = tl.minimum(blocks * (span + 1) // SPANS * BLOCK, length)
            if WINDOW != abi.NONE:
                first = tl.maximum(first, length - WINDOW)
            most = tl.full([HEADS], float("-inf"), tl.float32)
            mass = tl.zeros([HEADS], tl.float32)
            mixed = tl.zeros([HEADS, LANES], tl.float32)
            for begin in range(first, last, TOKENS):
                tokens = begin + tl.arange(0, TOKENS)
                inside = tokens < last
                block = tl.load(table + tokens // BLOCK, mask=inside, other=0).to(tl.int64)
                slots = (block * BLOCK + tokens % BLOCK) * slot_stride
                rows = cache + slots[:, None] + lanes[None, :]
                seen = inside[:, None] & (lanes < WIDTH)[None, :]
                keys = tl.load(rows, mask=seen, other=0.0).to(tl.float32)
                values = tl.load(rows + side, mask=seen, other=0.0).to(tl.float32)
                for head in range(count):
                    query = tl.load(q + head * WIDTH, mask=lanes < WIDTH, other=0.0).to(tl.float32)
                    scores = tl.sum(query[None, :] * keys, 1) * SCALE
                    scores = tl.where(inside, scores, float("-inf"))
                    chosen = heads == head
                    before = tl.max(tl.where(chosen, most, float("-inf")), 0)
                    higher = tl.maximum(before, tl.max(scores, 0))
                    weights = tl.exp(scores - higher)
                    kept = tl.exp(before - higher)
                    mass = tl.where(chosen, mass * kept + tl.sum(weights, 0), mass)
                    found = tl.sum(weights[:, None] * values, 0)
                    mixed = tl.where(chosen[:, None], mixed * kept + found[None, :], mixed)
                    most = tl.where(chosen, higher, most)
            empty = mass == 0.0
            mass = tl.where(empty, 1.0, mass)
            place = (first_head + heads) * SPANS + span
            number = tl.load(words + abi.PARTIAL_ATTENTION_VALUES)
            out = start_of(buffers, number, tl.float32) + sequence * stride_of(buffers, number, 0)
            places = out + place[:, None] * WIDTH + lanes[None, :]
            tl.store(places, mixed / mass[:, None], mask=here)
            number = tl.load(words + abi.PARTIAL_ATTENTION_LSE)
            out = start_of(buffers, number, tl.float32) + sequence * stride_of(buffers, number, 0)
            levels = tl.where(empty, float("-inf"), most + tl.log(mass))
            tl.store(out + place, levels, mask=heads < count)


@triton.jit
def attention_reduce(
    words,
    buffers,
    own,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    SPANS: tl.constexpr,
    PLACES: tl.constexpr,
    GATE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Merge the spans of some heads of a sequence, and multiply them by their gates."""
    sequence = tl.load(words + abi.ATTENTION_REDUCE_SEQUENCE)
    number = tl.load(words + abi.ATTENTION_REDUCE_VALUES)
    values = start_of(buffers, number, tl.float32) + sequence * stride_of(buffers, number, 0)
    number = tl.load(words + abi.ATTENTION_REDUCE_LSE)
    levels = start_of(buffers, number, tl.float32) + sequence * stride_of(buffers, number, 0)
    number = tl.load(words + abi.ATTENTION_REDUCE_OUT)
    out = start_of(buffers, number, DTYPE) + sequence * stride_of(buffers, number, 0)
    gate = out
    if GATE:
        number = tl.load(words + abi.ATTENTION_REDUCE_GATE)
        gate = start_of(buffers, number, DTYPE) + sequence * stride_of(buffers, number, 0)
    spans = tl.arange(0, PLACES)
    lanes = tl.arange(0, LANES)
    inside = lanes < WIDTH
    first = tl.load(words + abi.ATTENTION_REDUCE_HEADS)
    last = tl.load(words + abi.ATTENTION_REDUCE_HEADS + 1)
    for head in range(first, last):
        place = head * SPANS + spans
        level = tl.load(levels + place, mask=spans < SPANS, other=float("-inf"))
        most = tl.max(level, 0)
        weights = tl.exp(level - tl.where(most == float("-inf"), 0.0, most))
        mass = tl.sum(weights, 0)
        weights = weights / tl.where(mass == 0.0, 1.0, mass)
        parts = tl.load(
            values + place[:, None] * WIDTH + lanes[None, :],
            mask=(spans < SPANS)[:, None] & inside[None, :],
            other=0.0,
        )
        mixed = tl.sum(weights[:, None] * parts, 0)
        if GATE:
            opening = tl.load(gate + head * WIDTH + lanes, mask=inside, other=0.0).to(tl.float32)
            mixed = as_rounded(mixed, DTYPE) * as_rounded(sigmoid(opening), DTYPE)
        tl.store(out + head * WIDTH + lanes, rounded(mixed, DTYPE), mask=inside)
