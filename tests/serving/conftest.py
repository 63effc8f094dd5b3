"""A server on loopback, with a small demo model and its tokenizer."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

import tpcompile
from tpcompile.demo.model import make_demo
from tpcompile.serving import Engine
from tpcompile.serving.server.app import application
from tpcompile.serving.server.listening import bound, config_of
from tpcompile.serving.server.options import Options

KEY = "a key"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


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
    make_demo(directory, 3, 10)
    eager = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
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
