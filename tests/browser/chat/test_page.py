"""The page on a real server: a chat with the demo model, its files, and their headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

import tpcompile
from tests.browser.chat.conftest import Chat, chatting
from tests.browser.chat.replies import Replies, serving
from tests.browser.reader import watch
from tpcompile.demo.model import make_demo
from tpcompile.runtime.text import encode_chat
from tpcompile.serving import Engine
from tpcompile.serving.server.app import application
from tpcompile.serving.server.options import Options

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("demo") / "demo"
    make_demo(directory, 3, 10)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    with (
        tpcompile.compile(str(directory), max_seq_len=128) as model,
        Engine(model, tokenizer=tokenizer, max_batch=4, chunk=32).start() as engine,
    ):
        yield engine


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    with serving(application(engine, Options("demo", "a key"))) as url:
        yield url


def expected(engine: Engine, prompt: str | list[int]) -> str:
    """Return the greedy continuation of a prompt in 12 tokens."""
    params = tpcompile.SamplingParams(max_tokens=12, temperature=0.0)
    [completion] = engine.add(prompt, params).result()
    return completion.text.strip()


def greedy(chat: Chat) -> None:
    chat.page.fill("#key", "a key")
    chat.page.press("#key", "Tab")
    chat.page.get_by_text("demo, 128 tokens").wait_for()
    chat.set("temperature", "0")
    chat.set("max_tokens", "12")


def test_a_chat(browser: Any, engine: Engine, url: str) -> None:
    with chatting(browser, url, Replies()) as chat:
        greedy(chat)
        shown = chat.told("Anna is a baker . Felix")
        assert engine.tokenizer is not None
        tokens = encode_chat(
            engine.tokenizer, [{"role": "user", "content": "Anna is a baker . Felix"}]
        )
        assert shown == expected(engine, tokens)
        assert re.search(
            r"[\d.]+ tokens/s · 12 new tokens · \d+ of the prompt", chat.text(".rates")
        )
        chat.set("mode", "text")
        chat.ask("The grey cat")
        chat.page.locator("article:nth-of-type(3)[aria-busy=false]").wait_for()
        continued = chat.text(".continued")
        assert continued.split() == f"The grey cat {expected(engine, 'The grey cat')}".split()


def test_a_refusal(browser: Any, engine: Engine, url: str) -> None:
    with chatting(browser, url, Replies()) as chat:
        greedy(chat)
        chat.told("a " * 200)
        assert "at most 127 tokens" in chat.text("article .error")
        assert chat.text("article .error").endswith("(status 400)")


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_the_model_says_whether_it_can_chat(
    engine: Engine, url: str, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    headers = {"Authorization": "Bearer a key"}
    [model] = httpx.get(f"{url}v1/models", headers=headers).json()["data"]
    assert model["chat"] is (template is not None)


def names() -> list[str]:
    static = files("tpcompile.serving.server").joinpath("static")
    return sorted(file.name for file in static.iterdir())


def test_files_are_whole_and_under_a_policy(url: str) -> None:
    static = files("tpcompile.serving.server").joinpath("static")
    for path in ["", *(f"page/{name}" for name in names())]:
        answer = httpx.get(url + path)
        name = path.removeprefix("page/") or "page.html"
        assert answer.status_code == 200
        assert answer.content == static.joinpath(name).read_bytes()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
    kinds = [httpx.get(f"{url}page/{name}").headers["content-type"] for name in names()]
    assert {kind.partition(";")[0] for kind in kinds} == {
        "text/html",
        "text/css",
        "text/javascript",
    }


@pytest.mark.parametrize("name", ["missing.js", "..%2fpage.py", "%2e%2e/page.py", ""])
def test_no_other_files(url: str, name: str) -> None:
    assert httpx.get(f"{url}page/{name}").status_code == 404


def test_every_file_is_used() -> None:
    static = files("tpcompile.serving.server").joinpath("static")
    whole = "\n".join(static.joinpath(name).read_text(encoding="utf-8") for name in names())
    used = set(re.findall(r'(?:page/|"\./)([\w.]+)"', whole))
    assert used | {"page.html"} == set(names())


def test_the_policy_stops_markup(browser: Any, url: str) -> None:
    page = browser.new_page()
    reader = watch(page)
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    page.evaluate(
        """() => {
          const one = document.createElement("div");
          one.innerHTML = "<img src=x onerror='window.hacked = 1'>";
          document.body.append(one);
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("() => window.hacked") is None
    assert any("Content Security Policy" in problem for problem in reader.problems)
    page.close()


def test_no_script_makes_markup_of_text() -> None:
    static = files("tpcompile.serving.server").joinpath("static")
    for name in names():
        text = static.joinpath(name).read_text(encoding="utf-8")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, (name, way)


def test_the_files_are_in_the_package() -> None:
    project = Path(tpcompile.__file__).parents[1] / "pyproject.toml"
    assert '"serving/server/static/*"' in project.read_text(encoding="utf-8")
