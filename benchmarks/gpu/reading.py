"""A Triton kernel that only reads."""

import triton
import triton.language as tl

BLOCK = 4096
"""The elements that a program reads at a time. The kernel expects a multiple of them."""


@triton.jit
def read(source, out, count, BLOCK: tl.constexpr):  # noqa: N803
    """Add up all elements, so that none of the loads can be left out."""
    place = tl.program_id(0)
    sums = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(place * BLOCK, count, tl.num_programs(0) * BLOCK, num_stages=3):
        sums += tl.load(source + first + tl.arange(0, BLOCK))
    tl.store(out + place, tl.sum(sums, 0))
