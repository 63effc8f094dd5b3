"""Integers in words, beside the library that defines them, and parts that codecs read."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from tpcompile.ir.codec import Words
from tpcompile.ir.words import packed, unpacked

SHAPES = [(1, 1), (3, 8), (5, 13), (16, 1), (7, 32), (0, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_words_of_rows(bits: int, shape: tuple[int, int]) -> None:
    values = integers(bits, shape)
    words = packed(values, bits)
    if values.numel():
        assert torch.equal(words, pack_to_int32(values, bits))
    assert words.dtype == torch.int32
    assert torch.equal(unpacked(words, bits)[:, : shape[1]], values)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_codec_reads_the_words_of_a_part(bits: int, dim: int) -> None:
    values = integers(bits, (21, 13))
    codec = Words("weight_zero_point", bits, dim)
    stored = pack_to_int32(values, bits, packed_dim=dim)  # type: ignore[arg-type]
    assert torch.equal(codec.encoded(values), stored)
    assert codec.shape((21, 13)) == stored.shape
    for box in ((0, 21, 0, 13), (3, 9, 2, 7), (20, 21, 12, 13), (8, 16, 8, 12), (0, 0, 0, 0)):
        index = slice(*box[:2]), slice(*box[2:])
        read = codec.box(index)
        assert torch.equal(codec.decoded(stored[read], index), values[index])
        words, per_word = read[dim], 32 // bits
        assert (
            words.stop - words.start
            <= (index[dim].stop - index[dim].start + per_word - 1) // per_word + 1
        )


def integers(bits: int, shape: tuple[int, int]) -> torch.Tensor:
    torch.manual_seed(bits)
    most = 1 << bits - 1
    return torch.randint(-most, most, shape).to(torch.int8)
