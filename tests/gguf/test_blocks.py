"""The values of blocks are those of the library gguf."""

from __future__ import annotations

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tpcompile.gguf.blocks import CONTENTS
from tpcompile.gguf.kinds import GgufKind


def blocks(kind: GgufKind, seed: int = 0) -> torch.Tensor:
    """Return blocks with all bits at random; scales that are no numbers are left out."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (40, 6, kind.block.bytes), dtype=torch.uint8, generator=generator)
    halves = raw.view(torch.float16)
    return torch.where(halves.isfinite(), halves, 0).view(torch.uint8)


@pytest.mark.parametrize("kind", CONTENTS)
def test_values(kind: GgufKind) -> None:
    raw = blocks(kind)
    wanted = dequantize(raw.flatten(1).numpy(), GGMLQuantizationType(kind))
    contents, columns = CONTENTS[kind], 6 * kind.block.columns
    parts = {suffix: reader(raw).flatten(1) for suffix, reader in contents.parts.items()}
    values = contents.format.decoded(parts, (0, columns), torch.float32)
    assert torch.equal(values, torch.from_numpy(wanted.copy()))


@pytest.mark.parametrize("kind", GgufKind)
def test_sizes(kind: GgufKind) -> None:
    assert tuple(kind.block) == GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    assert kind.name == GGMLQuantizationType(kind).name


@pytest.mark.parametrize("kind", CONTENTS)
def test_bytes_in_memory(kind: GgufKind) -> None:
    """Components take at most 3 % more bytes than blocks; scales of 6 bits take a byte each."""
    loaded = CONTENTS[kind].format.row_bytes(0, 256)
    stored = kind.block.bytes * 256 // kind.block.columns
    assert stored <= loaded <= 1.03 * stored
