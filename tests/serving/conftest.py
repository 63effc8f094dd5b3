"""A server on loopback, with a small demo model and its tokenizer."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

import tpcompile
from tests.serving.scripted import Scripts
from tpcompile.demo.model import make_demo
from tpcompile.serving import Engine
from tpcompile.serving.server.app import application
from tpcompile.serving.server.listening import bound, config_of
from tpcompile.serving.server.options import Options

KEY = "a key"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""The marks of Qwen3 in the text of an assistant."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
ASSISTANT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    '{% if tools %}Call: <tool_call>{"arguments": }{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}("
    "{% for k, v in call.function.arguments | items %}{{ k }}={{ v | tojson }},{% endfor %})"
    "{% endfor %} {% endfor %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif begun %}<think>\n{% endif %}"
)
"""A template with tools, histories of calls, and thinking."""


@dataclass(frozen=True)
class Served:
    """A running server, and the same model as Hugging Face runs it."""

    url: str
    engine: Engine
    eager: Any
    tokenizer: Any


def serve(engine: Engine, options: Options) -> tuple[uvicorn.Server, threading.Thread, str]:
    """Serve on a free port of this machine, in a thread."""
    listening = bound("127.0.0.1", 0)
    listening.listen()
    app = application(engine, options)
    server = uvicorn.Server(config_of(app, 2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    host, port = listening.getsockname()
    return server, thread, f"http://{host}:{port}"


def small_demo(
    directory: Path, template: str, marks: Iterable[str] = (), arch: str = "qwen3"
) -> tuple[Any, Any]:
    """Make a model that is hardly trained, and its tokenizer, with a template and more tokens."""
    make_demo(directory, 3, 10, arch=arch)
    eager = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = [AddedToken(mark, special=True) for mark in marks]
    if tokens:
        tokenizer.add_tokens(tokens, special_tokens=True)
        eager.resize_token_embeddings(len(tokenizer))
    tokenizer.chat_template = template
    return eager, tokenizer


def post(served: Served, path: str, body: Any, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return httpx.post(
        f"{served.url}/v1/{path}", content=content, headers=headers, timeout=60, **options
    )


def post_to(engine: Engine, options: Options, path: str, body: Any) -> httpx.Response:
    """Post to another application on the same engine, in this process."""
    transport = httpx.ASGITransport(application(engine, options))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(path, json=body)

    return asyncio.run(send())


class Log(logging.Handler):
    """The lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def line(self) -> dict[str, str]:
        """Return the fields of the line of a request, which may come after the answer."""
        end = time.monotonic() + 20
        while not self.texts:
            assert time.monotonic() < end
            time.sleep(0.01)
        (text,) = self.texts
        assert "secret" not in text
        return dict(re.findall(r"(\w+)=(\S+)", text))


@pytest.fixture
def log() -> Iterator[Log]:
    """Provide the log of engines and servers."""
    logger, handler = logging.getLogger("tpcompile.serving"), Log()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def _captured_once(captured_once: None) -> None:
    """Share captures between tests; capture is not the subject here."""


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("demo") / "demo"
    eager, tokenizer = small_demo(directory, TEMPLATE)
    with (
        tpcompile.compile(eager, max_seq_len=128) as model,
        Engine(
            model, tokenizer=tokenizer, max_batch=4, chunk=32, max_tokens_per_step=64
        ).start() as engine,
    ):
        server, thread, url = serve(engine, Options("demo", KEY))
        yield Served(url, engine, eager, tokenizer)
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Provide a server whose tokenizer has the marks as special tokens."""
    directory = tmp_path_factory.mktemp("demo") / "demo"
    eager, tokenizer = small_demo(directory, ASSISTANT_TEMPLATE, MARKS)
    with (
        tpcompile.compile(eager, max_seq_len=512) as model,
        Engine(model, tokenizer=tokenizer, max_batch=4).start() as engine,
    ):
        running, thread, url = serve(engine, Options("demo", KEY))
        yield Served(url, engine, eager, tokenizer)
        running.should_exit = True
        thread.join()


@pytest.fixture
def scripts(server: Served, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    scripts = Scripts(server.tokenizer)
    scripts.install(monkeypatch)
    return scripts


@pytest.fixture
def chat(server: Served) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    return client.chat.completions
