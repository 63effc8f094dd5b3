"""Servers for clients: a model that calls tools only by grammar, and one that decides to call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import tpcompile
from tests.serving.conftest import KEY, MARKS, serve, small_demo
from tpcompile.serving import Engine
from tpcompile.serving.requests import Handle
from tpcompile.serving.server.options import Options

LONGEST = 2048
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}"
    '{% if tools %}<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call> {% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{{ '\n' }}{% endfor %}assistant: "
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


class Recorder(Engine):
    """An engine that remembers the prompts of chats."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.prompts: list[str] = []

    def add(self, prompt: Any, *args: Any, **options: Any) -> Handle:
        if not isinstance(prompt, str):
            self.prompts.append(self.tokenizer.decode(prompt))
        return super().add(prompt, *args, **options)


@dataclass(frozen=True)
class Address:
    """The place of a server, and the prompts that its engine receives."""

    url: str
    key: str
    prompts: list[str]


def assistant(directory: Path, arch: str = "qwen3") -> tuple[Any, Any]:
    """Make a model that is hardly trained, and its tokenizer, with the marks of Qwen3."""
    eager, tokenizer = small_demo(directory, TEMPLATE, MARKS, arch)
    eager.config.max_position_embeddings = LONGEST  # schemas of clients are long
    return eager, tokenizer


@contextmanager
def _serving(checkpoint: Any, tokenizer: Any, options: Options) -> Iterator[Address]:
    with (
        tpcompile.compile(checkpoint, max_seq_len=LONGEST) as model,
        Recorder(model, tokenizer=tokenizer, max_batch=4, speculate="prompt:6") as engine,
    ):
        server, thread, url = serve(engine.start(), options)
        yield Address(f"{url}/v1", KEY, engine.prompts)
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="package")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    eager, tokenizer = assistant(tmp_path_factory.mktemp("demo") / "demo")
    options = Options("demo", KEY, template_options={"enable_thinking": False})
    with _serving(eager, tokenizer, options) as address:
        yield address


@pytest.fixture
def server(_server: Address) -> Address:
    """Provide the server, and forget the prompts of other tests."""
    _server.prompts.clear()
    return _server


@pytest.fixture(scope="package")
def trained(tools_demo: Path) -> Iterator[Address]:
    """Provide a server of the demo model that calls tools where it should."""
    tokenizer = AutoTokenizer.from_pretrained(tools_demo)
    with _serving(str(tools_demo), tokenizer, Options("demo", KEY)) as address:
        yield address
