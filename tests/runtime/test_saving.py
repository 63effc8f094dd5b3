"""Saving a compiled model writes the files that Hugging Face's model writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

import tpcompile
from tests.runtime.eager_pair import Both, lively, prompt, tiny_both
from tpcompile.compare.agreement import same_bits
from tpcompile.runtime.safetensors_files import SafetensorsWriter
from tpcompile.runtime.saving import save_checkpoint

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def pair() -> Iterator[Both]:
    """Provide a model with a tied head and its own generation settings."""
    tiny = tiny_both()
    settings = [model.generation_config for model in tiny.each()]
    for model in tiny.each():
        model.generation_config = GenerationConfig(do_sample=True, temperature=0.7)
    yield tiny
    for model, config in zip(tiny.each(), settings, strict=True):
        model.generation_config = config


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _same_model(model: Any, other: Any) -> bool:
    first, second = model.state_dict(), other.state_dict()
    return list(first) == list(second) and all(
        same_bits(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("size", ["50GB", "100KB", "10KB", 70_000])
def test_the_files_are_those_of_hugging_face(pair: Both, tmp_path: Path, size: int | str) -> None:
    for model, name in zip(pair.each(), ("eager", "compiled"), strict=True):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    files = _files(tmp_path / "compiled")
    assert files == _files(tmp_path / "eager")
    assert (INDEX in files) == (size != "50GB")


@pytest.mark.parametrize("size", ["50GB", "10KB"])
def test_what_is_saved_is_what_was_compiled(pair: Both, tmp_path: Path, size: str) -> None:
    pair.compiled.save_pretrained(tmp_path, max_shard_size=size)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(pair.eager) and loaded.dtype == pair.eager.dtype
    assert _same_model(loaded, pair.eager)
    assert loaded.generation_config == pair.eager.generation_config


def test_rows_that_a_pipeline_permutes_are_saved_in_order(tmp_path: Path) -> None:
    """Permuted rows are saved in checkpoint order, here with biases, an untied head and fp16."""
    eager = lively("tiny-qwen2", tie_word_embeddings=False).half()
    eager.config.dtype = torch.float16
    pipeline = "standard{interleaved=true}"
    with tpcompile.compile(eager, tp=4, simulate=True, pipeline=pipeline) as model:
        assert model.source(0).count(", cos, sin, True)  # ")
        model.save_pretrained(tmp_path / "compiled", max_shard_size="20KB")
        assert _same_model(model, eager)
    eager.save_pretrained(tmp_path / "eager", max_shard_size="20KB")
    assert _files(tmp_path / "compiled") == _files(tmp_path / "eager")
    for ask in (model.state_dict, lambda: model.save_pretrained(tmp_path / "closed")):
        with pytest.raises(tpcompile.UsageError, match="closed"):
            ask()


def test_what_is_saved_is_compiled_again_in_another_dtype(pair: Both, tmp_path: Path) -> None:
    pair.compiled.save_pretrained(tmp_path / "first", max_shard_size="10KB")
    with tpcompile.compile(tmp_path / "first", dtype="bfloat16") as again:
        again.save_pretrained(tmp_path / "second")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    assert saved.dtype == torch.bfloat16
    assert _same_model(saved, lively("tiny-qwen3").bfloat16())


def test_tensors_tied_by_hand_are_saved_twice(tmp_path: Path) -> None:
    """A manually tied head is saved separately, since the configuration does not tie it."""
    eager = lively("tiny-qwen3", tie_word_embeddings=False)
    eager.lm_head.weight = eager.model.embed_tokens.weight
    with tpcompile.compile(eager) as model:
        model.save_pretrained(tmp_path)
    assert _same_model(AutoModelForCausalLM.from_pretrained(tmp_path), eager)


def test_no_more_than_a_tensor_is_held(
    pair: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is written before the next one is gathered."""
    order: list[str] = []
    gather, write = type(pair.compiled._weights).gather, SafetensorsWriter.write

    def gathered(self: Any, name: str, ranks: Any) -> torch.Tensor:
        order.append(f"gather {name}")
        return gather(self, name, ranks)

    def written(self: Any, name: str, tensor: torch.Tensor) -> None:
        order.append(f"write {name}")
        write(self, name, tensor)

    monkeypatch.setattr(type(pair.compiled._weights), "gather", gathered)
    monkeypatch.setattr(SafetensorsWriter, "write", written)
    pair.compiled.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        names = set(opened.keys())
    assert {name.split()[1] for name in order} == names
    assert all(
        gathering.replace("gather", "write") == writing
        for gathering, writing in zip(order[::2], order[1::2], strict=True)
    )


def test_saving_over_what_is_there(pair: Both, tmp_path: Path) -> None:
    """Other files remain, but older weights are removed, since they could be read instead."""
    (tmp_path / "tokenizer.json").write_text("{}")
    pair.compiled.save_pretrained(tmp_path, max_shard_size="10KB")
    many = set(_files(tmp_path))
    pair.compiled.save_pretrained(tmp_path)
    settings = {"config.json", "generation_config.json", "tokenizer.json"}
    assert set(_files(tmp_path)) == {"model.safetensors", *settings}
    pair.compiled.save_pretrained(tmp_path, max_shard_size="10KB")
    assert set(_files(tmp_path)) == many
    assert _same_model(AutoModelForCausalLM.from_pretrained(tmp_path), pair.eager)


def _fails(patch: pytest.MonkeyPatch) -> None:
    def full(self: Any, name: str, tensor: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(SafetensorsWriter, "write", full)


def test_a_save_that_fails_changes_nothing(
    pair: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.compiled.save_pretrained(tmp_path / "old")
    before = _files(tmp_path / "old")
    with monkeypatch.context() as patch:
        _fails(patch)
        for name in ("old", "new"):
            with pytest.raises(tpcompile.UsageError, match="No space left"):
                pair.compiled.save_pretrained(tmp_path / name, max_shard_size="10KB")
    assert _files(tmp_path / "old") == before
    assert not (tmp_path / "new").exists()
    pair.compiled.save_pretrained(tmp_path / "new")
    assert _files(tmp_path / "new") == before


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a file": ({"save_directory": __file__}, "must be a directory. Found a file"),
    "below a file": ({"save_directory": f"{__file__}/x"}, "cannot be written"),
    "a missing path": ({"save_directory": None}, "must be a path"),
    "an empty path": ({"save_directory": ""}, "must be a path"),
    "an invalid size": ({"max_shard_size": "much"}, "max_shard_size must be .*Found 'much'"),
    "a size of zero": ({"max_shard_size": 0}, "max_shard_size must be .*Found 0"),
    "a flag for a size": ({"max_shard_size": True}, "max_shard_size must be .*Found True"),
    "to the hub": ({"push_to_hub": True}, "push_to_hub=True"),
    "another state": ({"state_dict": {}}, "state_dict=a dict"),
    "a variant": ({"variant": "fp16"}, "variant='fp16'"),
    "a function": ({"save_function": print}, "save_function="),
    "pickles": ({"safe_serialization": False}, "safe_serialization=False"),
    "distributed": ({"distributed_checkpoint": True}, "distributed_checkpoint=True"),
    "a misspelt option": ({"max_shard_sise": "1GB"}, "Did you mean max_shard_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_saving_refuses(pair: Both, tmp_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises((tpcompile.UsageError, tpcompile.UnsupportedError), match=message):
        pair.compiled.save_pretrained(**{"save_directory": tmp_path / "x", **options})
    assert not (tmp_path / "x").exists()


def test_a_generation_config_that_contradicts_itself(pair: Both, tmp_path: Path) -> None:
    config = pair.compiled.generation_config
    pair.compiled.generation_config = GenerationConfig(do_sample=False, temperature=0.5)
    try:
        with pytest.raises(tpcompile.UsageError, match=r"cannot be saved.*temperature"):
            pair.compiled.save_pretrained(tmp_path / "x")
    finally:
        pair.compiled.generation_config = config
    assert not (tmp_path / "x").exists()


def test_not_the_main_process(pair: Both, tmp_path: Path) -> None:
    pair.compiled.save_pretrained(tmp_path / "x", is_main_process=False)
    assert not (tmp_path / "x").exists()


def test_the_state_is_that_of_eager(pair: Both) -> None:
    state = pair.compiled.state_dict()
    assert type(state) is OrderedDict
    assert _same_model(pair.compiled, pair.eager)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    fresh = lively("tiny-qwen3")
    with torch.no_grad():
        fresh.model.norm.weight.zero_()
    fresh.load_state_dict(state)
    assert _same_model(fresh, pair.eager)
    state["model.norm.weight"].zero_()  # modifies a copy
    assert _same_model(pair.compiled, pair.eager)


def test_the_state_of_a_module_around_it(pair: Both) -> None:
    outer = torch.nn.ModuleDict({"inner": pair.compiled})
    assert list(outer.state_dict()) == [f"inner.{name}" for name in pair.eager.state_dict()]
    with pytest.raises(tpcompile.UnsupportedError, match=r"load_state_dict\(\)"):
        outer.load_state_dict({}, strict=False)


def test_a_state_is_not_loaded(pair: Both) -> None:
    for state in ({}, pair.eager.state_dict()):
        with pytest.raises(
            tpcompile.UnsupportedError, match=r"does not support load_state_dict\(\).*Compile"
        ):
            pair.compiled.load_state_dict(state)


class _Joined:
    """The ranks as seen by one of two processes, which must make the same calls."""

    closed = ""
    fronts = 2

    def __init__(self, ranks: Any, front: int, meeting: threading.Barrier, told: list[Any]) -> None:
        self._ranks, self.front, self._meeting, self._told = ranks, front, meeting, told
        self.fetched: list[tuple[int, str]] = []

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        self._meeting.wait(30)
        self.fetched.append((rank, name))
        parameter: torch.Tensor = self._ranks.parameter(rank, name)
        return parameter

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.front == 0:
            self._told.append(x)
        self._meeting.wait(30)
        tensor: torch.Tensor = self._told[-1]
        self._meeting.wait(30)
        return tensor


def _save_on_both(pair: Both, directory: Path, **options: Any) -> list[str]:
    """Save from two threads as two processes; return the error of each."""
    model, errors = pair.compiled, ["", ""]
    meeting, told = threading.Barrier(2), []
    joined = [_Joined(model._ranks, front, meeting, told) for front in range(2)]

    def save(front: int) -> None:
        try:
            size = ("10KB", "5GB")[front]  # gathering must not depend on the shard size
            save_checkpoint(model, model._weights, joined[front], directory, size, **options)
        except Exception as error:
            errors[front] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=save, args=(front,)) for front in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert joined[0].fetched == joined[1].fetched
    return errors


def test_both_processes_save_and_the_first_writes(pair: Both, tmp_path: Path) -> None:
    assert _save_on_both(pair, tmp_path / "joined", main=True) == ["", ""]
    pair.eager.save_pretrained(tmp_path / "eager", max_shard_size="10KB")
    assert _files(tmp_path / "joined") == _files(tmp_path / "eager")
    assert _save_on_both(pair, tmp_path / "none", main=False) == ["", ""]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("fails", ["before", "meanwhile"])
def test_what_fails_on_the_first_fails_on_both(
    pair: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    if fails == "before":
        (tmp_path / "x").write_text("a file")
    else:
        _fails(monkeypatch)
    first, second = _save_on_both(pair, tmp_path / "x", main=True)
    assert ("Found a file" if fails == "before" else "No space left") in first
    assert "error on rank 0" in second


_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
import tpcompile
from tests.runtime.eager_pair import lively
from tpcompile.runtime.safetensors_files import SafetensorsWriter

out = Path({out!r})
eager = lively("tiny-qwen3")
model = tpcompile.compile(eager)
first = dist.get_rank() == 0
model.save_pretrained(out / "all", max_shard_size="50KB" if first else "5GB")
model.save_pretrained(out / "main", is_main_process=first)
state = model.state_dict()
same = state["lm_head.weight"] is state["model.embed_tokens.weight"]
same = same and all(value.equal(state[name]) for name, value in eager.state_dict().items())

def refusal(directory):
    try:
        model.save_pretrained(directory)
    except tpcompile.UsageError as error:
        return str(error)

refusals = [refusal(__file__)]
write = SafetensorsWriter.write
def full(self, name, tensor):
    if "norm" in name:
        raise OSError(28, "No space left on device")
    write(self, name, tensor)
SafetensorsWriter.write = full
refusals.append(refusal(out / "full"))
SafetensorsWriter.write = write
logits = model(torch.tensor([[4, 5, 6]])).logits.sum().item()
sys.stdout.write(repr((dist.get_rank(), same, refusals, logits)) + chr(10))
sys.stdout.flush()
"""


@pytest.mark.slow
def test_under_torchrun_every_process_saves_and_the_first_writes(tmp_path: Path) -> None:
    """All processes take part and the first one writes; its errors are raised on all of them."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(root=str(ROOT), out=str(tmp_path)))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (_, *first), (_, *second) = sorted(eval(line) for line in done.stdout.splitlines())
    assert first[0] is True and second[0] is True
    assert "Found a file" in first[1][0] and "No space left" in first[1][1]
    assert all("error on rank 0" in error for error in second[1])
    assert first[2] == second[2]
    eager = lively("tiny-qwen3")
    for name in ("all", "main"):
        assert _same_model(AutoModelForCausalLM.from_pretrained(tmp_path / name), eager)
    assert len(set(json.loads((tmp_path / "all" / INDEX).read_text())["weight_map"].values())) > 2
    assert not (tmp_path / "full").exists()


@pytest.mark.slow
def test_saving_from_workers(pair: Both, tmp_path: Path) -> None:
    with tpcompile.compile(pair.eager, tp=2) as model:
        model.save_pretrained(tmp_path)
        assert _same_model(model, pair.eager)
        expected = pair.eager.generate(**prompt(4), max_new_tokens=3, do_sample=False)
        tokens = model.generate(**prompt(4), max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, expected)
    assert _same_model(AutoModelForCausalLM.from_pretrained(tmp_path), pair.eager)
