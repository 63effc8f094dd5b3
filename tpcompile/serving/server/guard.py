"""The check of a request's headers: their size, and the host and origin that they name."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from tpcompile.errors import UsageError
from tpcompile.serving.server.answers import error_of

MOST_HEAD = 32 << 10
"""The bytes of the path and the headers of a request."""
MOST_HEADERS = 100
TOO_LARGE = f"The headers must be at most {MOST_HEADERS}, and have at most {MOST_HEAD:,} bytes"
ANY = "*"
"""Allows all hosts."""
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^][:/@?#\s]+?)\.?)(?::\d*)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(.*)")

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Hosts:
    """The hosts that requests may name in `Host` and `Origin`, besides those of loopback.

    A page of any site can send requests to a server on the machine of its reader. It can read the
    answers too if the site's name resolves to that machine; `Host` is the site's name then.
    """

    names: frozenset[str] = frozenset()
    """Names and IP addresses; `ANY` allows all hosts."""
    addresses: bool = False
    """Whether `Host` may be any IP address. A site's name cannot be one."""
    origins: frozenset[str] = frozenset()
    """Sites whose pages may read answers, as `https://HOST`; `ANY` allows all sites."""

    def refusal(self, headers: Headers) -> str | None:
        """Return why a request with these headers is refused; None if it is not."""
        if ANY in self.names:
            return None
        hosts, origins = _values(headers, b"host"), _values(headers, b"origin")
        for value in hosts:
            name = host_of(value)
            if not self._allow(name) and not (self.addresses and _address(name)):
                return _refused("Host", value, f"--allowed-host {name[:100] or repr(ANY)}")
        for value in () if ANY in self.origins else set(origins) - self.origins:
            match = _ORIGIN.fullmatch(value)
            place = "" if match is None else match[1]
            if place not in hosts and not self._allow(name := host_of(place)):
                site = value[:100] if name else repr(ANY)
                return _refused("Origin", value, f"--cors-origin {site}")
        return None

    def _allow(self, name: str) -> bool:
        address = _address(name)
        loopback = name == "localhost" if address is None else address.is_loopback
        return loopback or name in self.names


class Guard:
    """A middleware that refuses requests by their headers."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer that it is refused."""
        app: ASGIApp = self._app
        if scope["type"] == "http":
            size = len(scope["path"]) + len(scope["query_string"])
            size += sum(len(name) + len(value) for name, value in scope["headers"])
            if size > MOST_HEAD or len(scope["headers"]) > MOST_HEADERS:
                app = error_of(431, TOO_LARGE)
                app.headers["connection"] = "close"
            elif reason := self._hosts.refusal(scope["headers"]):
                app = error_of(403, reason)
        await app(scope, receive, send)


def hosts_of(host: str, address: str, allowed: Iterable[str], origins: Iterable[str] = ()) -> Hosts:
    """Return the hosts of a server that listens on a host, which resolved to an address.

    `allowed` are more of them. A server on all addresses of a machine can be named by any address,
    and by the machine's name. Pages of `origins` may read its answers.
    """
    names = {_checked(name) for name in allowed}
    sites = frozenset(map(_site, origins))
    bound = _address(address)
    if bound is not None and bound.is_unspecified:
        return Hosts(frozenset({*names, socket.gethostname().lower()}), True, sites)
    return Hosts(frozenset({*names, _checked(host), address}), origins=sites)


def host_of(value: str) -> str:
    """Return the host of HOST or HOST:PORT in lower case, or an empty string."""
    match = _HOST.fullmatch(value.lower())
    if match is None:
        return ""
    address = _address(match[1] or match[2])
    return str(address or match[2] or "")


def _checked(name: str) -> str:
    if name == ANY:
        return name
    host = host_of(f"[{name}]" if _address(name) is not None and ":" in name else name)
    if not host:
        raise UsageError(
            "An allowed host must be a name or an IP address",
            got=name,
            hint="Leave out the scheme and the path, or give * to allow all hosts",
        )
    return host


def _site(origin: str) -> str:
    """Return an origin as browsers write it."""
    match = _ORIGIN.fullmatch(origin.lower())
    if origin != ANY and (match is None or not host_of(match[1])):
        raise UsageError(
            "An origin of CORS must be a scheme, a host and a port if it is not the scheme's",
            got=origin,
            hint="For example https://app.example or http://localhost:3000, or * for all sites",
        )
    return origin.lower()


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for header, value in headers if header.lower() == name]


def _refused(kind: str, value: str, option: str) -> str:
    return f"{kind} {value[:100]!r} is not allowed. To allow it, start the server with {option}"
