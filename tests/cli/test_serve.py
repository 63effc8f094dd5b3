"""`tpcompile serve` as users start it: in a plain script, under torchrun, and on two hosts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tpcompile
from tests import scripts
from tests.cli.asking import PROMPTS, continued
from tpcompile.serving import Engine, SamplingParams

MODEL = ["preset:tiny-qwen3", "--random-weights", "3"]
SERVE = ["-m", "tpcompile", "serve", *MODEL, "--port", "0", "--max-seq-len", "128"]
LIMIT_S = 240
"""Far more than a start or an end takes, since interpreters start slowly on a busy machine."""


class Started:
    """A server in other processes, with what it has written."""

    def __init__(self, start: Callable[[int], Any]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = start(self._log.fileno())

    @property
    def said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def url(self) -> str:
        """Wait until it serves, and return its address."""
        end = time.monotonic() + LIMIT_S
        while (match := re.search(r"on (http://\S+)", self.said)) is None:
            assert self.process.poll() is None and time.monotonic() < end, self.said
            time.sleep(0.05)
        return match[1]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        self._log.close()


def _torchrun(log: int) -> subprocess.Popen[bytes]:
    local = ("--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
    command = [*("-m", "torch.distributed.run", *local, "--local-addr=127.0.0.1"), *SERVE]
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip


@contextlib.contextmanager
def started(arguments: list[str], start: Callable[[int], Any] | None = None) -> Iterator[Started]:
    server = Started(start or (lambda log: scripts.start(arguments, log, log)))
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=5)
    with (
        tpcompile.compile("preset:tiny-qwen3", random_weights=3, max_seq_len=128) as model,
        Engine(model) as engine,
    ):
        return [engine.add(prompt, params).result()[0].tokens for prompt in PROMPTS]


def test_a_plain_script(expected: list[list[int]]) -> None:
    options = ["--api-key", "k", "--name", "tiny", "--allowed-host", "api.example"]
    with started([*SERVE, "--tp", "2", "--threads", "1", *options]) as server:
        url = server.url()
        assert "serving tiny on" in server.said
        assert "warning" in server.said and "Requests must consist of token ids" in server.said
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": [1]}, timeout=LIMIT_S)
        assert refused.status_code == 401
        headers = {"Authorization": "Bearer k"}
        with httpx.Client(headers=headers, timeout=LIMIT_S) as client:
            assert continued(url, client.post) == expected
            assert client.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
            for host, status in (("api.example", 200), ("evil.example", 403)):
                answer = client.get(f"{url}/v1/models", headers={"Host": host})
                assert answer.status_code == status
            assert client.get(url, headers={"X": "x" * 10**6}).status_code == 431
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(LIMIT_S) == 0, server.said
        assert "Traceback" not in server.said


def test_requests_end_with_the_server_and_late_ones_are_cut_off() -> None:
    """After SIGTERM, running requests have a time to end. Each request has a line in the log."""
    names = ["--name", "tiny", "--name", "alias", "--generation-config", "none"]
    with started([*SERVE, *names, "--drain-seconds", "1", "--threads", "1"]) as server:
        url, body = server.url(), {"prompt": [1], "ignore_eos": True, "stream": True}
        short = httpx.post(f"{url}/v1/completions", json=body | {"model": "alias"}, timeout=LIMIT_S)
        assert "[DONE]" in short.text
        slow = body | {"prompt": [[1]] * 200, "max_tokens": 120}
        line = httpx.stream("POST", f"{url}/v1/completions", timeout=LIMIT_S, json=slow)
        with line as answer:
            chunks = answer.iter_lines()
            next(chunks)
            os.kill(server.process.pid, signal.SIGTERM)
            text = "".join(chunks)
        assert "The server ends, and gives its requests 1 s" in text and "[DONE]" not in text
        assert server.process.wait(LIMIT_S) == 0, server.said
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        statuses = re.findall(
            r"^\d{4}-.* id=\w+ path=/v1/completions status=(\d+)", server.said, re.M
        )
        assert statuses == ["200", "503"]
        assert "ending: 1 connections, at most 1 s" in server.said
        assert "Traceback" not in server.said


def test_a_port_that_is_in_use_is_noticed_before_the_model_is_loaded() -> None:
    with started(SERVE) as server:
        port = server.url().rpartition(":")[2]
        ran = scripts.run([*SERVE, "--port", port])
    assert ran.returncode == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in ran.stderr


def test_an_allowed_host_is_checked_before_the_model_is_loaded() -> None:
    ran = scripts.run([*SERVE, "--allowed-host", "http://api.example"])
    assert ran.returncode == 2
    assert "An allowed host must be a name or an IP address" in ran.stderr


def test_torchrun(expected: list[list[int]]) -> None:
    with started(SERVE, _torchrun) as server:
        url = server.url()
        for _ in range(2):
            assert continued(url) == expected
        ranks = _children(server.process.pid)
        os.kill(ranks[0], signal.SIGTERM)  # the first rank serves; the other one follows
        assert server.process.wait(LIMIT_S) == 0, server.said
        assert not any(map(_lives, ranks))


def test_a_rank_that_dies_under_torchrun() -> None:
    """All processes end with a status that is not zero, and say why; torchrun may restart them."""
    with started(SERVE, lambda log: scripts.start(SERVE, log, log, ranks=2)) as server:
        url = server.url()
        ranks = _children(server.process.pid)
        assert len(ranks) == 2
        line = httpx.stream(
            "POST", f"{url}/v1/completions", timeout=LIMIT_S,
            json={"prompt": [1], "max_tokens": 120, "stream": True, "ignore_eos": True},
        )  # fmt: skip
        with line as answer:
            chunks = answer.iter_lines()
            next(chunks)
            os.kill(ranks[1], signal.SIGKILL)
            text = "".join(chunks)
        assert "error" in text
        assert server.process.wait(LIMIT_S) != 0, server.said
        assert not any(map(_lives, ranks))


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return sorted(int(child) for child in text.split())


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


NAMES = [f"tpc{os.getpid() % 10000}{end}" for end in "ab"]
ADDRESSES = ["10.213.7.1", "10.213.7.2"]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them; their processes do not see each other."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("two hosts need the commands ip and unshare")
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", NAMES[0], "netns", NAMES[0], "type", "veth",
            "peer", "name", NAMES[1], "netns", NAMES[1])  # fmt: skip
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield NAMES
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine does not allow network namespaces: {error.stderr.strip()}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_two_hosts(hosts: list[str], expected: list[list[int]]) -> None:
    """Ranks that share neither memory nor processes, under torchrun on each host."""

    def start(number: int, log: int) -> subprocess.Popen[bytes]:
        torchrun = [
            *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"),
            *("--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", "--master-port=29431"),
        ]
        # torch's own variable: the hosts have no names by which they would find their interface.
        interface = ["env", f"GLOO_SOCKET_IFNAME={hosts[number]}"]
        alone = ["unshare", "--pid", "--ipc", "--mount", "--fork", "--mount-proc"]
        return subprocess.Popen(
            ["ip", "netns", "exec", hosts[number], *alone, *interface, sys.executable, *torchrun,
             *SERVE, "--host", "0.0.0.0"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip

    second = Started(lambda log: start(1, log))
    first = Started(lambda log: start(0, log))
    try:
        port = first.url().rpartition(":")[2]
        command = [
            *("ip", "netns", "exec", hosts[1], sys.executable, "-c", _ASK),
            f"http://{ADDRESSES[0]}:{port}",
        ]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert ran.returncode == 0, ran.stderr + first.said + second.said
        assert eval(ran.stdout) == expected
    finally:
        first.end()
        second.end()


_ASK = """\
import sys
from tests.cli.asking import continued
print(continued(sys.argv[1]))
"""
