"""Tests of hub ids: without network, with servers that refuse, and from the cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.models import preset_pair
from tpcompile import hub
from tpcompile.demo.model import demo_tokenizer
from tpcompile.errors import CaptureError, CheckpointError
from tpcompile.frontend import config_of
from tpcompile.runtime.text import tokenizer_of
from tpcompile.runtime.weights import directory_of

COMMIT = "a" * 40
Hub = Callable[[int | None], AbstractContextManager[list[str]]]


@pytest.fixture(autouse=True)
def _no_cache_and_no_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache, and fail if a library waits before it tries again."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} s")

    hub._ask.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", sleep)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Provide a hub that answers every request with a status, or that nobody listens for."""

    @contextmanager
    def serve(status: int | None) -> Iterator[list[str]]:
        paths: list[str] = []

        class Answer(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                paths.append(self.path)
                self.send_response(status or 0)
                self.send_header("X-Error-Code", "RepoNotFound" if status == 404 else "")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                self.do_HEAD()

            def log_message(self, *args: Any) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Answer) as server:
            endpoint = f"http://127.0.0.1:{server.server_port}"
            template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            monkeypatch.setattr(constants, "ENDPOINT", endpoint)
            if status is not None:
                threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
                yield paths
                server.shutdown()
        if status is None:  # the port is closed
            yield paths

    return serve


def _cached(*, tokenizer: bool = False, weights: bool = False) -> Path:
    """Store a model in the cache, as a download does, and return its directory."""
    root = Path(constants.HF_HUB_CACHE) / "models--me--mine"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    eager = preset_pair("tiny-qwen3").eager
    (eager if weights else eager.config).save_pretrained(snapshot)
    if tokenizer:
        demo_tokenizer().save_pretrained(snapshot)
    return snapshot


@pytest.mark.parametrize("status", [None, 503])
def test_without_the_hub_one_sentence_says_so_at_once(status: int | None, served: Hub) -> None:
    with served(status) as paths:
        with pytest.raises(CaptureError) as caught:
            config_of("me/mine")
        assert len(paths) <= 1
    message = str(caught.value)
    assert message.startswith(
        "There is no model 'me/mine'. Found no such directory, no copy in the "
    )
    assert ("and the hub cannot be reached (" in message) == (status is None)
    assert ("and the hub answers with status 503." in message) == (status == 503)


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CaptureError, match="and HF_HUB_OFFLINE is set"):
        config_of("me/offline")


def test_a_cached_model_works_without_the_hub(served: Hub) -> None:
    snapshot = _cached(tokenizer=True, weights=True)
    with served(None):
        assert config_of("me/mine").num_attention_heads == 6
        assert tokenizer_of("me/mine")("Anna is")["input_ids"]
        assert directory_of("me/mine") == snapshot


def test_what_the_cache_lacks_is_named(served: Hub) -> None:
    _cached()
    with served(None):
        assert config_of("me/mine").num_attention_heads == 6
        with pytest.raises(CheckpointError, match="holds no tokenizer of me/mine, and the hub"):
            tokenizer_of("me/mine")
        with pytest.raises(CheckpointError, match="holds no weights of me/mine, and the hub"):
            directory_of("me/mine")


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "is not a valid model identifier"), (403, "the hub answers with status 403")],
)
def test_an_answer_of_the_hub_is_told_as_it_is(status: int, message: str, served: Hub) -> None:
    with served(status) as paths:
        with pytest.raises(CaptureError, match=message):
            config_of("me/mine")
        assert paths


def test_one_answer_serves_several_questions(served: Hub) -> None:
    with served(503) as paths:
        messages = {hub.unreachable("me/mine"), hub.unreachable("me/mine")}
        assert messages == {"the hub answers with status 503"}
        assert len(paths) == 1


def test_a_name_that_is_no_hub_id() -> None:
    assert hub.unreachable("no hub id") == ""
