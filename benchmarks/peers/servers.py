"""HTTP servers, each started by its own command, and clients that stream from them."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peers.kinds import STEP_TOKENS, Continued, Loaded, Settings
from benchmarks.peers.words import tokens_of, words_of

_LIMIT_S = 600.0
_HOST = "127.0.0.1"
_GRANULE = 256
"""The tokens of a block of transformers, and to which llama.cpp rounds sequences."""
_NAME = "model"
"""The name of the model in requests."""

Body = Callable[[Sequence[int], int], dict[str, Any]]
Tokens = Callable[[Any], list[int]]


def tpcompile(settings: Settings) -> Loaded:
    """Start `tpcompile serve`."""
    options = [f"--tp={settings.tp}", f"--max-batch={settings.largest_batch}", f"--name={_NAME}"]
    options += [f"--max-seq-len={settings.longest}"]
    return _started(
        lambda port: [
            *(sys.executable, "-m", "tpcompile", "serve", settings.directory),
            *(f"--port={port}", *options),
        ],
        "/v1/completions",
        lambda prompt, new: _greedy(list(prompt), new) | {"ignore_eos": True},
        _text_tokens,
    )


def transformers(settings: Settings) -> Loaded:
    """Start `transformers serve` with continuous batching. It takes prompts as text only."""
    return _started(
        lambda port: [
            *(sys.executable, "-m", "transformers.cli.transformers", "serve", settings.directory),
            *("--continuous-batching", "--device=cpu", f"--port={port}", f"--host={_HOST}"),
            f"--cb-num-blocks={settings.largest_batch * _rounded(settings.longest) // _GRANULE}",
            f"--cb-max-batch-tokens={STEP_TOKENS}",
        ],
        "/v1/completions",
        lambda prompt, new: _greedy(words_of(prompt), new) | {"model": settings.directory},
        _text_tokens,
    )


def llama(settings: Settings) -> Loaded:
    """Start llama.cpp's server with as many slots as requests, on the file of the checkpoint."""
    from benchmarks.peers.gguf_file import shared_gguf

    file = shared_gguf(settings.path)
    program = shutil.which("llama-server") or _beside("llama-server")
    slots = settings.largest_batch
    return _started(
        lambda port: [
            *(program, "--model", str(file), "--port", str(port), "--host", _HOST, "--no-webui"),
            *("--parallel", str(slots), "--ctx-size", str(slots * _rounded(settings.longest))),
            *("--threads", str(settings.threads), "--threads-batch", str(settings.threads)),
            *("--cont-batching", "--batch-size", str(STEP_TOKENS), "--flash-attn", "on"),
        ],
        "/completion",
        lambda prompt, new: {
            "prompt": list(prompt),
            "n_predict": new,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_tokens": True,
            "top_k": 1,
        },
        lambda piece: piece.get("tokens", []),
    )


def vllm(settings: Settings) -> Loaded:
    """Start `vllm serve`."""
    return _started(
        lambda port: [
            *(_beside("vllm"), "serve", settings.directory, f"--port={port}", f"--host={_HOST}"),
            *(f"--max-num-seqs={settings.largest_batch}", f"--max-model-len={settings.longest}"),
            f"--served-model-name={_NAME}",
        ],
        "/v1/completions",
        lambda prompt, new: _greedy(list(prompt), new) | {"ignore_eos": True},
        _text_tokens,
    )


class Streams:
    """A server on a port of this machine. Each request has a thread and a connection."""

    def __init__(self, port: int, path: str, body: Body, tokens: Tokens) -> None:
        self._port, self._path, self._body, self._tokens = port, path, body, tokens

    def serve(self, prompts: Sequence[Sequence[int]], new: int) -> list[Continued]:
        """Send all requests at once, and take their tokens as they come."""
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._stream(prompt, new, begun), prompts))

    def _stream(self, prompt: Sequence[int], new: int, begun: float) -> Continued:
        line = http.client.HTTPConnection(_HOST, self._port, timeout=_LIMIT_S)
        body = json.dumps(self._body(prompt, new))
        line.request("POST", self._path, body, {"Content-Type": "application/json"})
        answer = line.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read()[:500]!r}")
        tokens: list[int] = []
        times: list[float] = []
        for row in answer:
            data = row.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                new_tokens = self._tokens(json.loads(data))
                tokens += new_tokens
                times += [time.perf_counter() - begun] * len(new_tokens)
        line.close()
        return tokens, times


def _rounded(tokens: int) -> int:
    return -(-tokens // _GRANULE) * _GRANULE


def _greedy(prompt: Any, new: int) -> dict[str, Any]:
    return {
        "model": _NAME,
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "stream": True,
    }


def _text_tokens(piece: Any) -> list[int]:
    if "error" in piece:
        raise RuntimeError(str(piece["error"]))
    return [token for choice in piece["choices"] for token in tokens_of(choice["text"])]


def _started(
    command: Callable[[int], Sequence[str]], path: str, body: Body, tokens: Tokens
) -> Loaded:
    """Start a server on a free port, and wait until it answers `/health` or lists its models."""
    with socket.create_server((_HOST, 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(command(port), stdin=subprocess.DEVNULL)
    until = time.monotonic() + _LIMIT_S
    while not _healthy(port):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        if time.monotonic() > until:
            process.kill()
            raise RuntimeError(f"the server did not answer within {_LIMIT_S:.0f} s")
        time.sleep(0.2)

    def close() -> None:
        process.terminate()
        process.wait(20)

    return Loaded(Streams(port, path, body, tokens), [process.pid], close=close)


def _healthy(port: int) -> bool:
    line = http.client.HTTPConnection(_HOST, port, timeout=5)
    try:
        line.request("GET", "/health")
        return line.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        line.close()


def _beside(program: str) -> str:
    """Return a program in the directory of this interpreter."""
    path = Path(sys.executable).with_name(program)
    if not path.exists():
        raise ModuleNotFoundError(f"{program} is neither on the path nor beside {sys.executable}")
    return str(path)
