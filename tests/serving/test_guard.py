"""Tests of the headers that a server accepts: their size, hosts and origins."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from tests.serving.conftest import Served
from tests.serving.test_server import PROMPT, post
from tpcompile.errors import UsageError
from tpcompile.serving.server.app import application
from tpcompile.serving.server.guard import Hosts, host_of, hosts_of
from tpcompile.serving.server.options import Options


def raw(served: Served, *pieces: bytes) -> bytes:
    """Send bytes over a connection of its own, as far as the server takes them; return its answer.

    The answer must end with the connection.
    """
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as line:
        try:
            for piece in pieces:
                line.sendall(piece)
        except OSError:
            pass  # the server has closed the connection
        answer = bytearray()
        try:
            while part := line.recv(1 << 16):
                answer += part
        except ConnectionResetError:
            pass
    return bytes(answer)


START = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LARGE: dict[str, tuple[bytes, ...]] = {
    "one header": (START + b"X: ", *[b"x" * (1 << 20)] * 152, b"\r\n\r\n"),
    "the name of a header": (START, *[b"x" * (1 << 20)] * 8),
    "many headers": (START, *[b"a: b\r\n" * 10_000] * 20),
    "the path": (b"GET /", *[b"x" * (1 << 20)] * 8),
    "a complete head": (START + b"X: " + b"x" * (40 << 10) + b"\r\nConnection: close\r\n\r\n",),
    "a hundred and one headers": (START + b"a: b\r\n" * 100 + b"\r\n",),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_headers(served: Served, name: str) -> None:
    """The client sees why it is refused, without a key, and the connection ends."""
    head, _, body = raw(served, *LARGE[name]).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head.lower()
    message = json.loads(body)["error"]["message"]
    assert message == "The headers must be at most 100, and have at most 32,768 bytes"
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_headers_within_the_limit(served: Served) -> None:
    headers = {f"x-{n}": "x" * 300 for n in range(90)}
    assert httpx.get(f"{served.url}/health", headers=headers).status_code == 200


def test_trailers_that_are_large(served: Served) -> None:
    """Headers after a body are capped too: the connection ends before they do."""
    head = b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw(served, head + b"1\r\na\r\n0\r\nX: ", *[b"x" * (1 << 20)] * 8)
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_an_upgrade_to_a_websocket(served: Served) -> None:
    """It is not supported, and the headers are checked as always."""
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Origin": "http://evil.example"}
    assert httpx.get(served.url, headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/completions"])
def test_a_foreign_host(served: Served, path: str) -> None:
    """As after DNS rebinding: the name of a site resolves to this machine."""
    for header, value in (
        ("Host", "evil.example"),
        ("Host", "evil.example:8000"),
        ("Host", "192.0.2.7"),
        ("Host", "localhost.evil.example"),
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Origin", "http://192.0.2.7"),
    ):
        answer = httpx.get(f"{served.url}{path}", headers={header: value})
        assert answer.status_code == 403
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{header} '{value}' is not allowed")
        assert "start the server with --allowed-host" in message


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.3.2.1", "[::1]:9"])
def test_the_names_of_loopback(served: Served, host: str) -> None:
    for origin in ({}, {"Origin": "http://localhost:3000"}, {"Origin": "https://[::1]"}):
        headers = {"Host": host, **origin}
        assert httpx.get(f"{served.url}/health", headers=headers).status_code == 200


def test_a_page_of_another_site_starts_nothing(served: Served) -> None:
    """Browsers send such a request without asking the server first."""
    before = served.engine.steps
    url = f"{served.url}/v1/completions"
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1})
    headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    assert httpx.post(url, content=body, headers=headers).status_code == 403
    assert served.engine.steps == before
    assert post(served, "completions", body).status_code == 200


def refusal(hosts: Hosts, host: str, origin: str | None = None) -> str | None:
    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    return hosts.refusal(headers)


def test_a_server_on_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any address and the machine's name are its own; a site may still have an address."""
    monkeypatch.setattr(socket, "gethostname", lambda: "Server7")
    for bound in ("0.0.0.0", "::"):
        hosts = hosts_of(bound, bound, ["api.example"])
        for name in ("10.1.2.3:8000", "[2001:db8::1]:8000", "server7:8000", "api.example"):
            assert refusal(hosts, name) is None
            assert refusal(hosts, name, f"http://{name}") is None
        assert refusal(hosts, "10.1.2.3", "http://api.example") is None
        assert refusal(hosts, "10.1.2.3", "http://192.0.2.7") is not None
        assert refusal(hosts, "evil.example") is not None


def test_a_server_on_one_address() -> None:
    hosts = hosts_of("inner.example", "10.1.2.3", [])
    for name in ("inner.example:80", "Inner.Example.", "10.1.2.3", "localhost"):
        assert refusal(hosts, name) is None
    for name in ("10.1.2.4", "example", "evil.inner.example", ""):
        assert refusal(hosts, name) is not None


def test_all_hosts() -> None:
    assert refusal(hosts_of("127.0.0.1", "127.0.0.1", ["*"]), "evil.example", "null") is None


def test_several_hosts_in_one_request() -> None:
    headers = [(b"host", b"localhost"), (b"host", b"evil.example")]
    assert Hosts().refusal(headers) is not None
    assert Hosts().refusal([]) is None, "browsers always send it"


@pytest.mark.parametrize("name", ["http://a.example", "a.example/x", "", "user@a.example", "a b"])
def test_an_allowed_host_that_is_none(name: str) -> None:
    with pytest.raises(UsageError, match="must be a name or an IP address"):
        hosts_of("127.0.0.1", "127.0.0.1", [name])


HOSTS: dict[str, Any] = {
    "A.Example:80": "a.example",
    "[::1]": "::1",
    "[0:0::1]:9": "::1",
    "a.example.": "a.example",
    "localhost@evil.example": "",
    "evil.example#localhost": "",
    "[localhost]": "",
}


@pytest.mark.parametrize("value", HOSTS)
def test_the_host_of_a_header(value: str) -> None:
    assert host_of(value) == HOSTS[value]


SITE = "https://app.example"


def asked(served: Served, hosts: Hosts, method: str, **headers: str) -> httpx.Response:
    """Ask another application on the same engine, in this process, for what is not there."""
    options = Options("demo", hosts=hosts)
    transport = httpx.ASGITransport(application(served.engine, options))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, "/v1/nothing", headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("origin", [SITE, "*"])
def test_pages_of_an_allowed_site_may_read_answers(served: Served, origin: str) -> None:
    hosts = hosts_of("127.0.0.1", "127.0.0.1", [], [origin])
    answer = asked(served, hosts, "GET", Origin=SITE)
    assert answer.status_code == 404
    assert answer.headers["access-control-allow-origin"] == origin
    preflight = asked(
        served, hosts, "OPTIONS", Origin=SITE, **{
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        },
    )  # fmt: skip
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]


def test_other_sites_are_still_refused(served: Served) -> None:
    hosts = hosts_of("127.0.0.1", "127.0.0.1", [], [SITE])
    for origin in ("https://evil.example", "http://app.example", f"{SITE}:8443", "null"):
        answer = asked(served, hosts, "GET", Origin=origin)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    assert asked(served, hosts, "GET", Origin=SITE, Host="evil.example").status_code == 403
    everyone = hosts_of("127.0.0.1", "127.0.0.1", [], ["*"])
    assert asked(served, everyone, "GET", Origin=SITE, Host="evil.example").status_code == 403
    plain = asked(
        served, hosts_of("127.0.0.1", "127.0.0.1", []), "GET", Origin="http://localhost:3000"
    )
    assert plain.status_code == 404 and "access-control-allow-origin" not in plain.headers


@pytest.mark.parametrize("origin", ["app.example", "https://", "https://app.example/", ""])
def test_origins_that_browsers_do_not_send(origin: str) -> None:
    with pytest.raises(UsageError, match="An origin of CORS must be a scheme, a host"):
        hosts_of("127.0.0.1", "127.0.0.1", [], [origin])
