"""Faults during loading and generation are reported promptly and specifically.

End to end, through `compile` and `generate`, on ranks in processes. Each fault must raise the
error of its class long before the timeout of idle ranks, leave no process, open file or shared
memory behind, and must not affect the next compiled model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tpcompile
from tests.runtime.eager_pair import lively
from tests.runtime.ranks.left_behind import FAULT_S, descendants, only_files, own_files
from tests.runtime.shrinking_files import ALONE, ShrinkingFiles
from tpcompile import CheckpointError, RankError, UsageError
from tpcompile.checkpoint_files import SINGLE
from tpcompile.runtime import weights
from tpcompile.runtime.ranks.workers import Workers

pytestmark = pytest.mark.usefixtures("forked_launchers")

LIMIT = 96
"""The maximum number of tokens in a sequence."""
NEW = 24
PROMPT = torch.arange(40, 60)[None]
UP = "model.layers.1.mlp.up_proj.weight"

Tensors = dict[str, torch.Tensor]


@contextlib.contextmanager
def _told(
    kind: type[BaseException], message: str | None, before: tuple[set[str], set[int]]
) -> Iterator[list[float]]:
    """Assert that the body fails like this, in time, and leaves only the resources in `before`.

    The body may append the time at which the fault could first be detected; it is now by default.
    """
    start: list[float] = []
    entered = time.monotonic()
    with pytest.raises(kind, match=message):
        yield start
    assert time.monotonic() - (start or [entered])[-1] < FAULT_S
    assert descendants() <= before[1]
    assert only_files(before[0]), own_files() - before[0]


def _compile(
    directory: Path, loading: list[float], monkeypatch: pytest.MonkeyPatch
) -> tpcompile.CompiledModel:
    """Compile on two ranks, and record when they start to load, however long starting took."""
    introduce = Workers.introduce

    def noted(workers: Workers) -> None:
        loading.append(time.monotonic())
        introduce(workers)

    monkeypatch.setattr(Workers, "introduce", noted)
    return tpcompile.compile(directory, tp=2)


@dataclass
class Models:
    """A checkpoint, and a model of it on two ranks, which is compiled again after it ended."""

    directory: Path
    text: list[int]
    """The expected text."""
    bare: tuple[set[str], set[int]]
    """The open files and processes without any ranks."""
    model: tpcompile.CompiledModel | None = None

    def healthy(self) -> tpcompile.CompiledModel:
        if self.model is None or self.model._ranks.closed:
            self.model = tpcompile.compile(self.directory, tp=2, max_seq_len=LIMIT)
        assert _generate(self.model) == self.text
        return self.model

    def close(self) -> None:
        if self.model is not None:
            self.model.close()


def _generate(model: Any, new: int = NEW, **options: Any) -> list[int]:
    tokens: list[int] = model.generate(
        PROMPT, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
    )[0].tolist()
    return tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    directory = tmp_path_factory.mktemp("checkpoint")
    eager = lively("tiny-qwen3")
    eager.save_pretrained(directory)
    created = Models(directory, _generate(eager), (own_files(), descendants()))
    yield created
    created.close()


def _cut_short(directory: Path) -> None:
    os.truncate(directory / SINGLE, (directory / SINGLE).stat().st_size // 2)


def _last_byte(directory: Path) -> None:
    """Remove the last byte, as on a full disk; the header remains complete."""
    os.truncate(directory / SINGLE, (directory / SINGLE).stat().st_size - 1)


def _edited(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / SINGLE)
        change(tensors)
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})

    return edit


def _without_a_shard(directory: Path) -> None:
    lively("tiny-qwen3").save_pretrained(directory, max_shard_size="200KB")
    (directory / SINGLE).unlink()
    sorted(directory.glob("model-*.safetensors"))[1].unlink()


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (_cut_short, r"file of the checkpoint cannot be read.*download it again"),
    "a short write": (_last_byte, r"file of the checkpoint cannot be read.*not fully covered"),
    "a shard removed": (_without_a_shard, r"lacks the file model-00002-of-0000\d\.safetensors"),
    "another shape": (
        _edited(lambda tensors: tensors.update({UP: tensors[UP][:-1].clone()})),
        rf"shape of the tensor {UP} does not match.*Found \(175, 64\)\. Expected \(176, 64\)",
    ),
    "a missing tensor": (_edited(lambda tensors: tensors.pop(UP)), f"lacks the tensor {UP}"),
    "an unexpected tensor": (
        _edited(lambda tensors: tensors.update({"model.layers.9.thing": torch.zeros(1)})),
        r"the model does not have: model\.layers\.9\.thing",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint(
    name: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged checkpoint is reported with its file and the rank that read it."""
    spoil, message = CHECKPOINTS[name]
    shutil.copytree(models.directory, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path)
    models.close()
    with _told(CheckpointError, message, models.bare) as loading:
        _compile(tmp_path, loading, monkeypatch)


def test_a_file_that_shrinks_after_it_was_opened(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncation of a mapped file is reported; without a check, reading it would kill the rank."""
    shutil.copytree(models.directory, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(weights, "CheckpointFiles", ShrinkingFiles)
    models.close()
    message = r"changed while it was being read.*rank \d.*Found 4,096 bytes"
    with _told(CheckpointError, message, models.bare) as loading:
        _compile(tmp_path, loading, monkeypatch)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_file_that_shrinks_in_this_process(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """Truncation is also reported for simulated ranks, where it would kill the user's script."""
    shutil.copytree(models.directory, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(weights, "CheckpointFiles", ShrinkingFiles)
    (tmp_path / ALONE).touch()
    with pytest.raises(
        CheckpointError, match=r"changed while it was being read.*Found 4,096 bytes"
    ):
        tpcompile.compile(tmp_path, tp=tp, simulate=True)


class During:
    """Action on a model during step `number`; step 0 is the prompt.

    A rank is stopped first, so that the step cannot end before the action.
    """

    def __init__(self, model: tpcompile.CompiledModel, number: int, act: Callable[[], None]):
        self._run, self._left, self._act = model._ranks.run, number, act
        self._stopped = model.processes[1]
        model._ranks.run = self  # type: ignore[method-assign]

    def __call__(self, step: Any) -> torch.Tensor:
        if self._left == 0:
            os.kill(self._stopped, signal.SIGSTOP)
            threading.Timer(0.2, self._act).start()
        self._left -= 1
        return self._run(step)


@pytest.mark.parametrize(
    ("step", "rank"), [(0, 0), (0, 1), (1, 1), (17, 0)],
    ids=["rank 0 in the prompt", "rank 1 in the prompt", "rank 1 in token 2", "rank 0 in token 18"],
)  # fmt: skip
def test_a_rank_that_is_killed(step: int, rank: int, models: Models) -> None:
    model = models.healthy()
    pid = model.processes[rank]
    During(model, step, lambda: os.kill(pid, signal.SIGKILL))
    with _told(RankError, rf"^Rank {rank} was killed by signal SIGKILL", models.bare):
        _generate(model)
    with pytest.raises(UsageError, match=rf"closed: rank {rank} was killed.*Compile it again"):
        _generate(model)
    models.healthy()


def test_a_rank_that_is_killed_at_any_moment(models: Models) -> None:
    """A rank that is killed between or during steps is reported."""
    model = models.healthy()
    threading.Timer(0.05, os.kill, (model.processes[1], signal.SIGKILL)).start()
    with _told(RankError, "^Rank 1 was killed by signal SIGKILL", models.bare):
        for _ in range(200):
            _generate(model)


def test_ctrl_c(models: Models) -> None:
    model = models.healthy()
    main = threading.main_thread().ident
    assert main is not None
    During(model, 3, lambda: signal.pthread_kill(main, signal.SIGINT))
    with _told(KeyboardInterrupt, None, models.bare):
        _generate(model)
    with pytest.raises(UsageError, match=r"closed: a call raised KeyboardInterrupt"):
        _generate(model)


def test_a_text_longer_than_the_limit(models: Models) -> None:
    """A prompt or text above the limit is refused, and the ranks continue to work."""
    model = models.healthy()
    held = (own_files(), descendants())
    message = rf"at most max_seq_len={LIMIT} tokens\. Found {LIMIT + 1} tokens"
    with _told(UsageError, message, held):
        model(torch.ones(1, LIMIT + 1, dtype=torch.long))
    with _told(UsageError, message, held):
        _generate(model, LIMIT)
    assert models.healthy() is model


def test_a_port_in_use(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port in use is reported under a launcher; ranks of a script use a free port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        message = rf"could not connect to each other at 127\.0\.0\.1:{port}.*--master-port"
        with monkeypatch.context() as launched:
            for name, value in variables.items():
                launched.setenv(name, str(value))
            with pytest.raises(RankError, match=message):
                tpcompile.compile(models.directory)  # torch opens a pipe on first use and keeps it
            with _told(RankError, message, (own_files(), descendants())):
                tpcompile.compile(models.directory)
    models.healthy()
