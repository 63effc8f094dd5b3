"""The header of GGUF files: what is read, and what is refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch

import tpcompile
from tests.gguf_files import model_of, write_gguf
from tpcompile.errors import CheckpointError, CompileError
from tpcompile.frontend import capture
from tpcompile.gguf import GgufKind, open_gguf
from tpcompile.ir.simulate import whole_value
from tpcompile.runtime.weights import opened, weights_of

COPIES, FEW = 500, 30
MODELS: dict[str, dict[str, Any]] = {
    "tiny-qwen3": {},
    "tiny-llama": {},
    "tiny-qwen3.5": {
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "linear_value_head_dim": 32,
    },
}
"""The presets, and what differs from them."""
VALUES: dict[str, Any] = {
    "test.text": "a ü",
    "test.list": ["a", "", "c"],
    "test.numbers": [1, 2, 3],
    "test.floats": [0.5, 1.5],
    "test.flag": True,
    "test.float": 0.25,
}


class Written(NamedTuple):
    """A file, its bytes, and the values of its weights."""

    path: Path
    data: bytes
    values: dict[str, torch.Tensor]


def values(path: Path) -> dict[str, torch.Tensor]:
    """Return the values of all weights of a file."""
    captured = capture(str(path))
    with opened(weights_of(captured, str(path), None)) as read:
        return {
            name: whole_value(tensor, read, torch.float32)
            for name, tensor in captured.tensors.items()
        }


@pytest.fixture(scope="module", params=MODELS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    changes = {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 33}
    model = model_of(request.param, **{**changes, **MODELS[request.param]})
    write_gguf(path, model, more=VALUES)
    return Written(path, path.read_bytes(), values(path))


def test_what_the_library_reads(written: Written) -> None:
    """Metadata and places of tensors are those that the library gguf finds."""
    file, wanted = open_gguf(written.path), gguf.GGUFReader(written.path)
    fields = {name: field.contents() for name, field in wanted.fields.items()}
    metadata = {name: value for name, value in fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == metadata and VALUES.items() <= metadata.items()
    assert [*file.tensors] == [expected.name for expected in wanted.tensors]
    for expected in wanted.tensors:
        tensor = file.tensors[expected.name]
        assert tensor.kind == GgufKind(expected.tensor_type)
        assert tensor.shape == tuple(int(extent) for extent in reversed(expected.shape))
        assert (tensor.start, tensor.size) == (expected.data_offset, expected.n_bytes)


def damaged(written: Written, seed: int) -> bytes:
    """Return the bytes with one fault outside of the weights themselves."""
    dice, data = random.Random(seed), written.data
    end = min(tensor.start for tensor in open_gguf(written.path).tensors.values())
    copy = bytearray(data)
    match dice.randrange(4):
        case 0:  # bits of the header
            for _ in range(dice.choice([1, 1, 3])):
                copy[dice.randrange(end)] ^= 1 << dice.randrange(8)
        case 1:  # a number of the header
            offset, size = dice.randrange(end - 8), dice.choice([4, 8])
            number = dice.choice([0, 1, 2**31 - 1, 2**32 - 1, dice.randrange(2**16)])
            copy[offset : offset + size] = number.to_bytes(size, "little")
        case 2:  # the end
            size = dice.choice([0, 3, dice.randrange(end), dice.randrange(len(data))])
            copy = copy[:size]
        case _:  # a part of the header
            offset, count = dice.randrange(end - 40), dice.randrange(1, 40)
            copy[offset : offset + count] = b"" if dice.random() < 0.5 else bytes(2 * count)
    return bytes(copy)


@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, COPIES), marks=pytest.mark.slow)]
)
def test_one_fault(written: Written, tmp_path: Path, seeds: range) -> None:
    """A fault outside of the weights does not change them, or is an error of ours."""
    refused = 0
    for seed in seeds:
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(damaged(written, seed))
        try:
            read = values(path)
        except CompileError:
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        assert read.keys() == written.values.keys(), seed
        assert all(torch.equal(read[name], written.values[name]) for name in read), seed
    assert refused > 0.5 * len(seeds)


@pytest.mark.parametrize(
    ("offset", "number", "message"),
    [
        (0, 0, "other first bytes.*GGUF"),
        (4, 1, "version 1"),
        (4, 3 << 24, "version 50331648.*lowest byte"),
        (8, 2**60, "a count of 1,152,921,504,606,846,976"),
        (16, 2**60, "a count of 1,152,921,504,606,846,976"),
        (24, 2**60, "ends at byte 1,152,921,504,606,84"),
    ],
)
def test_numbers_that_are_refused(
    written: Written, tmp_path: Path, offset: int, number: int, message: str
) -> None:
    """Counts are compared with the size of the file before anything of that size is made."""
    data = bytearray(written.data)
    struct.pack_into("<Q" if offset >= 8 else "<I", data, offset, number)
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


def test_a_file_that_changes(written: Written, tmp_path: Path) -> None:
    """A file that is shorter than its header says is refused before its end is read."""
    path = tmp_path / "model.gguf"
    path.write_bytes(written.data)
    captured = capture(str(path))
    with opened(weights_of(captured, str(path), None)) as read:
        path.write_bytes(written.data[:-32])  # more than the padding of the last tensor
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            read("model.norm.weight", (slice(0, 1),))
    with pytest.raises(tpcompile.CheckpointError, match="within the file"):
        open_gguf(path)
