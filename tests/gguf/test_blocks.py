"""The values of blocks are those of the library gguf."""

from __future__ import annotations

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tpcompile.gguf.blocks import VALUES, q4_0_words, q8_0_integers
from tpcompile.gguf.kinds import GgufKind
from tpcompile.ir.words import unpacked


def blocks(kind: GgufKind, seed: int = 0) -> torch.Tensor:
    """Return blocks with all bits at random; scales that are no numbers are left out."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(256, (40, 6, kind.block.bytes), dtype=torch.uint8, generator=generator)
    halves = found.view(torch.float16)
    return torch.where(halves.isfinite(), halves, 0).view(torch.uint8)


@pytest.mark.parametrize("kind", VALUES)
def test_values(kind: GgufKind) -> None:
    found = blocks(kind)
    wanted = dequantize(found.flatten(1).numpy(), GGMLQuantizationType(kind))
    assert torch.equal(VALUES[kind](found).flatten(1), torch.from_numpy(wanted.copy()))


@pytest.mark.parametrize("kind", GgufKind)
def test_sizes(kind: GgufKind) -> None:
    assert tuple(kind.block) == GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    assert kind.name == GGMLQuantizationType(kind).name


def test_integers() -> None:
    """With a scale of 1, the values are the integers."""
    one = torch.tensor([1.0]).half().view(torch.uint8)
    for kind, integers in (
        (GgufKind.Q8_0, q8_0_integers),
        (GgufKind.Q4_0, lambda found: unpacked(q4_0_words(found), 4)),
    ):
        found = blocks(kind)
        found[..., :2] = one
        assert torch.equal(integers(found).float(), VALUES[kind](found))
