"""Fixtures that run the command line in this process, and model directories without weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from torch import fx
from transformers import BertConfig, CLIPConfig, PreTrainedConfig, T5Config, ViTConfig

from tests.runtime.talker import talker
from tpcompile.cli import main
from tpcompile.ir.ops import ALL_REDUCE
from tpcompile.passes import PASSES, Report
from tpcompile.rewriting.rewrite import calls

UNSUPPORTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert": BertConfig,
    "t5": T5Config,
    "vit": ViTConfig,
    "clip": CLIPConfig,
}


@dataclass(frozen=True)
class Ran:
    """The exit status and output of a command line."""

    status: int
    out: str
    err: str


Cli = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _captured_once(captured_once: None) -> None:
    """Share captures between tests; capture is not the subject here."""


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Provide `cli("dump preset:tiny-qwen3 --tp 2", "-p", "…")`; the first text is split."""

    def run(line: str, *more: str) -> Ran:
        status = main([*line.split(), *more])
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a checkpoint that can chat."""
    directory = tmp_path_factory.mktemp("talker")
    for part in talker():
        part.save_pretrained(directory)
    return directory


@pytest.fixture
def unsupported(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Create a directory with the configuration of an unsupported kind of model."""
    UNSUPPORTED[request.param]().save_pretrained(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class DropCollective:
    """Broken pass that removes the last sum across ranks."""

    name: ClassVar[str] = "drop-collective"

    def apply(self, gm: fx.GraphModule) -> Report:
        lost = calls(gm, ALL_REDUCE)[-1]
        lost.replace_all_uses_with(lost.args[0])
        gm.graph.erase_node(lost)
        return Report(matches=1)


@pytest.fixture
def broken_pipeline(monkeypatch: pytest.MonkeyPatch) -> str:
    """Provide a pipeline whose second to last pass leaves an invalid graph."""
    monkeypatch.setitem(PASSES._entries, "drop-collective", DropCollective)
    return (
        "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention,plan-sharding,"
        "shard-linears,kv-heads,vocab-parallel,insert-collectives,drop-collective,fuse-qkv"
    )


def without_lines(text: str) -> str:
    """Drop what differs between releases of transformers: line numbers, and default settings."""
    text = re.sub(r"\.py:\d+", ".py", text)
    return re.sub(r"^rotary (\S+) .*", r"rotary \1", text, flags=re.MULTILINE)
