"""Tests of the socket that a server listens on, and of TLS."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn

from tests.serving.conftest import Served
from tpcompile.errors import UsageError
from tpcompile.serving.server.app import application
from tpcompile.serving.server.listening import bound, check_certificate, config_of
from tpcompile.serving.server.options import Options


def test_connections_send_each_piece_at_once() -> None:
    """Otherwise every answer would take 40 ms longer."""
    with bound("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as line:
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_in_use() -> None:
    with bound("127.0.0.1", 0) as listening:
        listening.listen()
        port = listening.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1, port {port}"):
            bound("127.0.0.1", port)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1, port 0"):
        bound("192.0.2.1", 0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate of 127.0.0.1, with its key in the same file and in another one."""
    if shutil.which("openssl") is None:
        pytest.skip("a certificate needs the command openssl")
    directory = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, "-days", "2",
         "-keyout", directory / "key.pem", "-out", directory / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    bundle = (directory / "cert.pem").read_text() + (directory / "key.pem").read_text()
    (directory / "both.pem").write_text(bundle)
    return directory


@pytest.mark.parametrize("files", [("cert.pem", "key.pem"), ("both.pem", None)])
def test_tls(served: Served, certificate: Path, files: tuple[str, str | None]) -> None:
    """Answers and refusals of large headers come over TLS, and nothing without it."""
    paths = [None if name is None else certificate / name for name in files]
    check_certificate(*paths)
    app = application(served.engine, Options("demo"))
    with bound("127.0.0.1", 0) as listening:
        listening.listen()
        server = uvicorn.Server(config_of(app, 2, *paths))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        try:
            context = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
            with httpx.Client(verify=context, timeout=60) as client:
                assert client.get(f"{url}/health").json() == {"status": "ok"}
                assert client.get(url, headers={"X": "x" * 10**6}).status_code == 431
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{url}/health", timeout=60)
            with pytest.raises(httpx.HTTPError):
                httpx.get(url.replace("https", "http"), timeout=60)
        finally:
            server.should_exit = True
            thread.join()


def test_certificates_that_cannot_be_used(certificate: Path, tmp_path: Path) -> None:
    key, locked = certificate / "key.pem", tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", key, "-out", locked],
        check=True, capture_output=True,
    )  # fmt: skip
    for certfile, keyfile, message in (
        (None, key, "A key of TLS needs its certificate. Add --ssl-certfile FILE"),
        (tmp_path / "none.pem", key, "none.pem and its key cannot be used.*No such file"),
        (certificate / "cert.pem", None, "The key is expected in the same file"),
        (key, key, "cannot be used"),
        (certificate / "cert.pem", locked, "the key has a password"),
    ):
        with pytest.raises(UsageError, match=message):
            check_certificate(certfile, keyfile)
