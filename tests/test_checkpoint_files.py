"""The same files of a directory are read as in Hugging Face, and none outside of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tpcompile
from tests.models import preset_pair
from tpcompile.checkpoint_files import ADAPTER, INDEX, SINGLE, files_of
from tpcompile.runtime.checkpoint import Checkpoint

NAME = "qwen2.5-0.5b"
UP = "model.layers.1.mlp.up_proj.weight"
OTHER = "other.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the tensors as Hugging Face saves them."""
    directory = tmp_path_factory.mktemp("saved")
    preset_pair(NAME).eager.save_pretrained(directory)
    return load_file(directory / SINGLE)


def write_config(directory: Path, chosen: Any = None) -> None:
    preset_pair(NAME).eager.config.save_pretrained(directory)
    if chosen is not None:
        values = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(
            json.dumps(values | {"transformers_weights": chosen})
        )


def write_single(
    directory: Path, tensors: dict[str, torch.Tensor], scale: float, name: str = SINGLE
) -> None:
    """Write all tensors to one file, multiplied by a number that identifies the file."""
    scaled = {name: tensor * scale for name, tensor in tensors.items()}
    save_file(scaled, directory / name, metadata={"format": "pt"})


def write_shards(
    directory: Path, tensors: dict[str, torch.Tensor], scale: float, index: str = INDEX
) -> None:
    """Write the tensors to two files with an index."""
    half = len(tensors) // 2
    mapping = {name: SHARDS[place >= half] for place, name in enumerate(tensors)}
    for shard in SHARDS:
        part = {name: tensors[name] * scale for name in tensors if mapping[name] == shard}
        save_file(part, directory / shard, metadata={"format": "pt"})
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": mapping}))


def opened(directory: Path, chosen: Any = None) -> Checkpoint:
    captured = preset_pair(NAME).captured
    return Checkpoint(directory, captured.tensors, captured.aliases, chosen)


Tensors = dict[str, torch.Tensor]


def _single_and_index(directory: Path, tensors: Tensors) -> None:
    write_single(directory, tensors, 2)
    write_shards(directory, tensors, 3)


def _single_and_one_that_sorts_last(directory: Path, tensors: Tensors) -> None:
    write_single(directory, tensors, 2)
    write_single(directory, tensors, 3, "zz.safetensors")


def _links_as_in_the_cache_of_the_hub(directory: Path, tensors: Tensors) -> None:
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    write_shards(blobs, tensors, 2)
    for place, name in enumerate((*SHARDS, INDEX)):
        (blobs / name).rename(blobs / str(place))
        (directory / name).symlink_to(f"../blobs/{place}")


def _chosen_file(directory: Path, tensors: Tensors) -> None:
    _single_and_index(directory, tensors)
    write_single(directory, tensors, 5, OTHER)


def _chosen_index(directory: Path, tensors: Tensors) -> None:
    """Write an index whose files are relative to the checkpoint, not to the index."""
    write_single(directory, tensors, 3)
    (directory / "deep").mkdir()
    write_shards(directory, tensors, 5, f"deep/{INDEX}")


BESIDE: dict[str, tuple[Callable[[Path, Tensors], None], str | None]] = {
    "a single file and an index": (_single_and_index, None),
    "a file that sorts last": (_single_and_one_that_sorts_last, None),
    "links": (_links_as_in_the_cache_of_the_hub, None),
    "a chosen file": (_chosen_file, OTHER),
    "a chosen index": (_chosen_index, f"deep/{INDEX}"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_the_file_that_hugging_face_reads(name: str, tensors: Tensors, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    write, chosen = BESIDE[name]
    write(directory, tensors)
    write_config(directory, chosen)
    expected = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    with opened(directory, chosen) as read:
        for tensor in preset_pair(NAME).captured.tensors:
            assert torch.equal(read(tensor, (slice(None),)), expected[tensor]), tensor


def test_the_choice_of_the_configuration_reaches_the_ranks(
    tensors: Tensors, tmp_path: Path
) -> None:
    _chosen_file(tmp_path, tensors)
    write_config(tmp_path, OTHER)
    with tpcompile.compile(tmp_path, tp=2, simulate=True) as model:
        assert torch.equal(model.gather_weight(UP), tensors[UP] * 5)


CHOICES: dict[str, tuple[Any, str]] = {
    "out of the directory": (f"../{OTHER}", r"must be inside its directory"),
    "out of it and back": (f"deep/../{OTHER}", r"must be inside its directory"),
    "an absolute path": ("/etc/a.safetensors", r"must be inside its directory"),
    "pickles": ("pytorch_model.bin", r"must name a safetensors file.*'pytorch_model\.bin'"),
    "an adapter": ("adapter_model.bin", "must name a safetensors file"),
    "no name": ("", "must name a safetensors file"),
    "a number": (5, "must name a safetensors file"),
    "a missing file": ("none.safetensors", r"lacks the file none\.safetensors"),
    "a very long name": ("a" * 5000 + ".safetensors", r"lacks the file a+… \(5,012 characters\)"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_that_are_refused(name: str, tensors: Tensors, tmp_path: Path) -> None:
    """A configured file that cannot be used is refused, although a default one exists."""
    directory = tmp_path / "checkpoint"
    (directory / "deep").mkdir(parents=True)
    for place in (tmp_path / OTHER, directory / OTHER, directory / SINGLE):
        save_file({UP: tensors[UP]}, place)
    chosen, message = CHOICES[name]
    with pytest.raises(tpcompile.CheckpointError, match=message) as caught:
        files_of(directory, chosen)
    assert len(str(caught.value)) < 1000


NOT_READ: dict[str, tuple[tuple[str, ...], str]] = {
    "pickles": (("pytorch_model.bin",), "old PyTorch format.*Found pytorch_model"),
    "one file of another name": (("weights.safetensors",), r"Found weights\.safetensors"),
    "shards without an index": (SHARDS, "Found model-00001.*Download the index"),
    "an adapter": (("adapter_model.safetensors",), r"Found adapter_model\.safetensors"),
    "an adapter beside weights": ((SINGLE, ADAPTER), "merge_and_unload"),
    "a distributed checkpoint": (
        (SINGLE, "shard-00000-model-00001-of-00002.safetensors"),
        r"distributed checkpoint.*shard-00000",
    ),
    "nothing": ((), "no weights to compile"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_other_files_are_refused(name: str, tensors: Tensors, tmp_path: Path) -> None:
    files, message = NOT_READ[name]
    for file in files:
        save_file({UP: tensors[UP]}, tmp_path / file)
    with pytest.raises(tpcompile.CheckpointError, match=message) as caught:
        files_of(tmp_path)
    assert f"Expected {SINGLE}" in str(caught.value) or ADAPTER in files


def _deep(levels: int) -> str:
    return '{"weight_map": {"a": ' + "[" * levels + "]" * levels + "}}"


INDEXES: dict[str, tuple[str, str]] = {
    "out of the directory": (f'{{"weight_map": {{"{UP}": "../{OTHER}"}}}}', "inside its dir"),
    "out of it and back": (f'{{"weight_map": {{"{UP}": "deep/../{OTHER}"}}}}', "inside its dir"),
    "an absolute path": ('{"weight_map": {"a": "/etc/passwd"}}', "inside its dir.*/etc/passwd"),
    "a number": ('{"weight_map": {"a": 5}}', "must map a to a file name.*Found 5"),
    "a null": ('{"weight_map": {"a": null}}', "must map a to a file name.*Found None"),
    "a list": ('{"weight_map": {"a": ["b"]}}', "must map a to a file name"),
    "a null map": ('{"weight_map": null}', "object named weight_map.*Found None"),
    "a list for a map": ('{"weight_map": ["a"]}', "object named weight_map"),
    "no map": ("{}", "object named weight_map"),
    "not an object": ("[]", "cannot be read.*Found a JSON list instead of an object"),
    "invalid JSON": ("{", r"cannot be read.*invalid JSON at line 1, column 2"),
    "an empty file": ("", "cannot be read.*invalid JSON at line 1, column 1"),
    "nested too deep to parse": (_deep(100_000), "cannot be read.*nested more than 100 levels"),
    "nested too deep to use": (_deep(300), "cannot be read.*nested more than 100 levels"),
    "a number of many digits": ('{"weight_map": ' + "9" * 5000 + "}", "cannot be read.*digits"),
    "a very long file": (
        json.dumps({"weight_map": {"a": "b" * 5000}}), r"lacks the file b+… \(5,000 characters\)"
    ),
    "a very long tensor": (
        json.dumps({"weight_map": {"a" * 5000: SINGLE}}), r"lacks: a+… \(5,000 characters\)"
    ),
    "the end of a string": (json.dumps({"weight_map": {"a": "b\0c"}}), r"file 'b\\x00c'"),
    "escapes of a terminal": (json.dumps({"weight_map": {"a": "\x1b[2J"}}), r"file '\\x1b\[2J'"),
    "a directory": ('{"weight_map": {"a": "deep"}}', "lacks the file deep"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_indexes_that_are_refused(name: str, tensors: Tensors, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    (directory / "deep").mkdir(parents=True)
    for place in (tmp_path / OTHER, directory / OTHER, directory / "single"):
        save_file({UP: tensors[UP]}, place)
    (directory / "single").rename(directory / "a.safetensors")
    text, message = INDEXES[name]
    (directory / INDEX).write_text(text.replace(SINGLE, "a.safetensors"))
    with pytest.raises(tpcompile.CheckpointError, match=message) as caught:
        files_of(directory)
    assert len(str(caught.value)) < 1000


def test_a_tensor_in_two_files_is_refused(tensors: Tensors, tmp_path: Path) -> None:
    """A tensor in two files is refused; Hugging Face would take the last one despite the index."""
    write_shards(tmp_path, tensors, 1)
    first = load_file(tmp_path / SHARDS[0])
    second = load_file(tmp_path / SHARDS[1])
    twice = next(iter(first))
    save_file(second | {twice: first[twice] * 2}, tmp_path / SHARDS[1])
    with pytest.raises(tpcompile.CheckpointError, match=f"Two files.*{twice}"):
        files_of(tmp_path)


def test_tensors_that_an_index_leaves_out_are_there(tensors: Tensors, tmp_path: Path) -> None:
    """Tensors missing from the index are found, since Hugging Face reads whole files."""
    write_shards(tmp_path, tensors, 1)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"][UP]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert set(files_of(tmp_path)) == set(tensors)
