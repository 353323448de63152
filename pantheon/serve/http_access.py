"""Who may ask: the API key, the Host header, and what a browser page of another origin may do [B44].

Pure decisions over a request head.  Must not know sockets or handlers.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from pantheon.serve.http_errors import HttpError
from pantheon.serve.http_request import Headers

#: Paths that answer without an API key: what a probe asks, and what is the same on every server.
OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/ready", "/ui", "/openapi.json"})
EXPOSED_HEADERS = (
    "X-Request-Id, Retry-After, X-Pantheon-Model, X-Pantheon-Replica, X-Pantheon-Queue-Ms, X-Pantheon-Cached-Tokens, "
    "X-Pantheon-Context-Capped"
)
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^\[\]/:@]+)(?::[0-9]+)?", re.IGNORECASE)
_DEFAULT_METHODS = "GET, POST, DELETE, OPTIONS"
_DEFAULT_HEADERS = "Authorization, Content-Type, X-Session-Id"
_METHOD_NAME = re.compile(r"[A-Za-z]{1,32}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-_,. \t]{1,4096}")


def is_loopback(host: str) -> bool:
    """Whether a host name or literal (with or without brackets) means this machine only."""
    name = host.lower().strip("[]").rstrip(".")
    if name == "localhost":
        return True
    try:
        # ::ffff:127.0.0.1 is how a socket that takes both families names an IPv4 peer
        return ipaddress.ip_address(name.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def is_open(path: str) -> bool:
    """Whether a path answers without an API key; `/m/{model}/health` is the probe of one model."""
    return path in OPEN_PATHS or (path.startswith("/m/") and path.endswith("/health"))


def _given_keys(headers: Headers) -> list[str]:
    """What stands where keys stand: some clients send a placeholder in one header and the key in the other."""
    found = headers.get_all("x-api-key")
    for value in headers.get_all("authorization"):
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            found.append(token.strip())
    return [key for key in found if key]


def _unknown(what: str, given: list[str], code: str) -> HttpError:
    message = f"incorrect {what}" if given else f"{what} is needed: Authorization: Bearer KEY, or X-Api-Key: KEY"
    return HttpError(
        401, message, code=code, type="authentication_error", headers={"WWW-Authenticate": "Bearer"}
    )  # fmt: skip


def _any_equal(given: Iterable[str], keys: Iterable[str]) -> bool:
    """Whether one of them is one of these; each pair is compared, and each in constant time."""
    pairs = [(one.encode("latin-1", "replace"), key.encode()) for one in given for key in keys]
    return any([hmac.compare_digest(one, key) for one, key in pairs])


def _methods(asked: str) -> str:
    """Those that are usual, and the one that was asked for; what a path takes is the router's to say."""
    if asked in _DEFAULT_METHODS.split(", ") or not _METHOD_NAME.fullmatch(asked):
        return _DEFAULT_METHODS
    return f"{_DEFAULT_METHODS}, {asked}"


@dataclass(frozen=True)
class Access:
    """The rules in force.

    `bind_host` decides whether the Host check is on (only a loopback server is asked by its loopback names);
    `allowed_hosts` and `allowed_origins` are added to the loopback ones; an origin of `*` allows every page.  Without
    an `admin_key` the admin routes answer this machine only [X33].
    """

    bind_host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    admin_key: str | None = field(default=None, repr=False)

    def check(self, method: str, path: str, host: str | None, headers: Headers, client: str = "127.0.0.1") -> None:
        """Raises HttpError: 403 for a foreign host, page or machine, 401 for a missing or wrong key.  A preflight needs
        no key.

        `client` is the address of the peer.
        """
        self._check_host(host)
        if method == "OPTIONS":
            return
        if path.startswith("/admin"):
            self._check_admin(host, headers, client)
            return
        self._check_page(method, headers)
        if not is_open(path):
            self._check_key(headers)

    def _check_page(self, method: str, headers: Headers) -> None:
        """A page can post what is no JSON across sites without asking first; it could not read the answer, but would
        keep the model busy."""
        origin = headers.get("origin")
        if origin is None or method in ("GET", "HEAD") or self.allows_origin(origin):
            return
        kind = (headers.get("content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(403, "this origin may only post application/json", code="origin_not_allowed")

    def _check_admin(self, host: str | None, headers: Headers, client: str) -> None:
        origin = headers.get("origin")
        if origin and not self.allows_origin(origin):
            # a page can post text/plain across sites without asking first
            raise HttpError(403, "this origin may not use the admin routes", code="origin_not_allowed")
        if self.admin_key is not None:
            return self._check_admin_key(headers)
        if not is_loopback(client) or any(name in headers for name in _PROXY_HEADERS):
            # what a proxy on this machine passes on comes from loopback too
            raise HttpError(
                403, "the admin routes answer this machine only; set --admin-key to use them from others",
                code="admin_loopback_only",
            )  # fmt: skip
        if host is not None and not is_loopback(host):
            # whatever the server is bound to: a page that rebinds its name to 127.0.0.1 comes from loopback
            self._need_allowed(host)
        self._check_key(headers)

    def _check_admin_key(self, headers: Headers) -> None:
        given = _given_keys(headers)
        if _any_equal(given, (self.admin_key or "",)):
            return
        if _any_equal(given, self.api_keys):
            raise HttpError(403, "an API key does not open the admin routes", code="admin_key_needed")
        raise _unknown("admin key", given, "invalid_admin_key")

    def _check_host(self, host: str | None) -> None:
        # a page that rebinds its own name to 127.0.0.1 still sends that name; only HTTP/1.0 comes without a host
        if host is None or not is_loopback(self.bind_host) or is_loopback(host):
            return
        self._need_allowed(host)

    def _need_allowed(self, host: str) -> None:
        if host not in (name.lower() for name in self.allowed_hosts):
            raise HttpError(403, "this host name is not served here; see --allowed-host", code="host_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        if not self.api_keys:
            return
        given = _given_keys(headers)
        if not _any_equal(given, self.api_keys):
            raise _unknown("API key", given, "invalid_api_key")

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of this origin may read our answers."""
        match = _ORIGIN.fullmatch(origin)
        if match is not None and is_loopback(match[1]):
            return True
        return "*" in self.allowed_origins or origin.lower() in (o.lower().rstrip("/") for o in self.allowed_origins)

    def answer_headers(self, path: str, headers: Headers) -> dict[str, str]:
        """CORS headers of a real answer, errors and SSE included; none on the admin routes."""
        origin = headers.get("origin")
        if origin is None or path.startswith("/admin"):
            return {}
        if not self.allows_origin(origin):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",
            "Access-Control-Expose-Headers": EXPOSED_HEADERS,
            "Vary": "Origin",
        }

    def preflight_headers(self, path: str, headers: Headers) -> dict[str, str]:
        """Headers of the answer to OPTIONS: what was asked for is granted to an allowed origin.

        Without an Origin (no browser asks so) the general answer is given.
        """
        origin = headers.get("origin")
        if origin is not None and not self.answer_headers(path, headers).get("Access-Control-Allow-Origin"):
            return {"Vary": "Origin"}
        if path.startswith("/admin"):
            return {}
        method = headers.get("access-control-request-method") or ""
        names = headers.get("access-control-request-headers") or ""
        granted = {
            "Access-Control-Allow-Origin": origin or "*",
            "Access-Control-Allow-Methods": _methods(method),
            "Access-Control-Allow-Headers": names if _HEADER_NAMES.fullmatch(names) else _DEFAULT_HEADERS,
            "Access-Control-Max-Age": "86400",
            "Vary": "Origin",
        }
        if origin is not None:
            # no cookie means anything here, but some clients fetch everything with them
            granted["Access-Control-Allow-Credentials"] = "true"
        if headers.get("access-control-request-private-network") == "true":
            granted["Access-Control-Allow-Private-Network"] = "true"
        return granted
