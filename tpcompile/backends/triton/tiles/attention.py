"""Attention over a span of a sequence, and the merge of spans."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .numbers import as_rounded, rounded, sigmoid


@triton.jit
def partial_attention(words, buffers, scratch, SHAPE):
    """Attend the query heads of a KV head to some spans of sequences, TOKENS tokens at a time."""
    first_sequence = tl.load(words + abi.PARTIAL_ATTENTION_SEQUENCES)
    last_sequence = tl.load(words + abi.PARTIAL_ATTENTION_SEQUENCES + 1)
    first_head = tl.load(words + abi.PARTIAL_ATTENTION_HEADS)
    count = tl.load(words + abi.PARTIAL_ATTENTION_HEADS + 1) - first_head
    heads = tl.arange(0, SHAPE.HEADS)
    lanes = tl.arange(0, SHAPE.LANES)
    here = (heads < count)[:, None] & (lanes < SHAPE.WIDTH)[None, :]
    for sequence in range(first_sequence, last_sequence):
        lengths = start_of(buffers, tl.load(words + abi.PARTIAL_ATTENTION_LENGTHS), tl.int32)
        length = tl.load(lengths + sequence)
        blocks = (length + SHAPE.BLOCK - 1) // SHAPE.BLOCK
        table = start_of(buffers, tl.load(words + abi.PARTIAL_ATTENTION_TABLES), tl.int32)
        table += sequence * SHAPE.MOST_BLOCKS

        number = tl.load(words + abi.PARTIAL_ATTENTION_Q)
        q = start_of(buffers, number, SHAPE.DTYPE) + sequence * stride_of(buffers, number, 0)
        q += first_head * SHAPE.WIDTH + lanes

        number = tl.load(words + abi.PARTIAL_ATTENTION_CACHE)
        cache = start_of(buffers, number, SHAPE.DTYPE)
        cache += tl.load(words + abi.PARTIAL_ATTENTION_LAYER) * stride_of(buffers, number, 0)
        cache += tl.load(words + abi.PARTIAL_ATTENTION_KV_HEAD) * stride_of(buffers, number, 3)
        side = stride_of(buffers, number, 1)
        slot_stride = stride_of(buffers, number, 2)
        if SHAPE.WIDTH % 8 == 0:  # then so are all strides, which lets a load have 16 bytes
            cache = tl.multiple_of(cache, 16)
            side = side // 8 * 8  # Triton drops the hint `multiple_of` for loaded values
            slot_stride = slot_stride // 8 * 8

        first_span = tl.load(words + abi.PARTIAL_ATTENTION_SPAN)
        last_span = tl.load(words + abi.PARTIAL_ATTENTION_SPAN + 1)
        for span in range(first_span, last_span):
            first = blocks * span // SHAPE.SPANS * SHAPE.BLOCK
            last = tl.minimum(blocks * (span + 1) // SHAPE.SPANS * SHAPE.BLOCK, length)
            if SHAPE.WINDOW != abi.NONE:
                first = tl.maximum(first, length - SHAPE.WINDOW)
            most = tl.full([SHAPE.HEADS], float("-inf"), tl.float32)
            mass = tl.zeros([SHAPE.HEADS], tl.float32)
            mixed = tl.zeros([SHAPE.HEADS, SHAPE.LANES], tl.float32)
            for begin in range(first, last, SHAPE.TOKENS):
                tokens = begin + tl.arange(0, SHAPE.TOKENS)
                inside = tokens < last
                block = tl.load(table + tokens // SHAPE.BLOCK, mask=inside, other=0).to(tl.int64)
                slots = (block * SHAPE.BLOCK + tokens % SHAPE.BLOCK) * slot_stride
                rows = cache + slots[:, None] + lanes[None, :]
                valid = inside[:, None] & (lanes < SHAPE.WIDTH)[None, :]
                keys = tl.load(rows, mask=valid, other=0.0).to(tl.float32)
                values = tl.load(rows + side, mask=valid, other=0.0).to(tl.float32)
                for head in range(count):
                    query = tl.load(q + head * SHAPE.WIDTH, mask=lanes < SHAPE.WIDTH, other=0.0)
                    query = query.to(tl.float32)
                    scores = tl.sum(query[None, :] * keys, 1) * SHAPE.SCALE
                    scores = tl.where(inside, scores, float("-inf"))
                    chosen = heads == head
                    before = tl.max(tl.where(chosen, most, float("-inf")), 0)
                    higher = tl.maximum(before, tl.max(scores, 0))
                    weights = tl.exp(scores - higher)
                    rescale = tl.exp(before - higher)
                    mass = tl.where(chosen, mass * rescale + tl.sum(weights, 0), mass)
                    weighted = tl.sum(weights[:, None] * values, 0)
                    mixed = tl.where(chosen[:, None], mixed * rescale + weighted[None, :], mixed)
                    most = tl.where(chosen, higher, most)
            empty = mass == 0.0
            mass = tl.where(empty, 1.0, mass)
            place = (first_head + heads) * SHAPE.SPANS + span
            number = tl.load(words + abi.PARTIAL_ATTENTION_VALUES)
            out = start_of(buffers, number, tl.float32) + sequence * stride_of(buffers, number, 0)
            places = out + place[:, None] * SHAPE.WIDTH + lanes[None, :]
            tl.store(places, mixed / mass[:, None], mask=here)
            number = tl.load(words + abi.PARTIAL_ATTENTION_LSE)
            out = start_of(buffers, number, tl.float32) + sequence * stride_of(buffers, number, 0)
            levels = tl.where(empty, float("-inf"), most + tl.log(mass))
            tl.store(out + place, levels, mask=heads < count)


@triton.jit
def attention_reduce(words, buffers, scratch, SHAPE):
    """Merge the spans of some heads of a sequence, and multiply them by their gates, if any."""
    sequence = tl.load(words + abi.ATTENTION_REDUCE_SEQUENCE)
    number = tl.load(words + abi.ATTENTION_REDUCE_VALUES)
    values = start_of(buffers, number, tl.float32) + sequence * stride_of(buffers, number, 0)
    number = tl.load(words + abi.ATTENTION_REDUCE_LSE)
    levels = start_of(buffers, number, tl.float32) + sequence * stride_of(buffers, number, 0)
    number = tl.load(words + abi.ATTENTION_REDUCE_OUT)
    out = start_of(buffers, number, SHAPE.DTYPE) + sequence * stride_of(buffers, number, 0)
    gate = out
    if SHAPE.GATE:
        number = tl.load(words + abi.ATTENTION_REDUCE_GATE)
        gate = start_of(buffers, number, SHAPE.DTYPE) + sequence * stride_of(buffers, number, 0)
    spans = tl.arange(0, SHAPE.PLACES)
    lanes = tl.arange(0, SHAPE.LANES)
    inside = lanes < SHAPE.WIDTH
    first = tl.load(words + abi.ATTENTION_REDUCE_HEADS)
    last = tl.load(words + abi.ATTENTION_REDUCE_HEADS + 1)
    for head in range(first, last):
        place = head * SHAPE.SPANS + spans
        level = tl.load(levels + place, mask=spans < SHAPE.SPANS, other=float("-inf"))
        most = tl.max(level, 0)
        weights = tl.exp(level - tl.where(most == float("-inf"), 0.0, most))
        mass = tl.sum(weights, 0)
        weights = weights / tl.where(mass == 0.0, 1.0, mass)
        parts = tl.load(
            values + place[:, None] * SHAPE.WIDTH + lanes[None, :],
            mask=(spans < SHAPE.SPANS)[:, None] & inside[None, :],
            other=0.0,
        )
        mixed = tl.sum(weights[:, None] * parts, 0)
        if SHAPE.GATE:
            opening = tl.load(gate + head * SHAPE.WIDTH + lanes, mask=inside, other=0.0)
            opening = opening.to(tl.float32)
            mixed = as_rounded(mixed, SHAPE.DTYPE) * as_rounded(sigmoid(opening), SHAPE.DTYPE)
        tl.store(out + head * SHAPE.WIDTH + lanes, rounded(mixed, SHAPE.DTYPE), mask=inside)
