"""Who may ask: the API key, the Host header, and what a browser page of another origin may do [B44].

Pure decisions over a request head.  Must not know sockets or handlers.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass, field

from pantheon.serve.http_errors import HttpError
from pantheon.serve.http_request import Headers

#: Paths that answer without an API key: what a probe asks.
OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/ready"})
EXPOSED_HEADERS = "X-Request-Id, Retry-After"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^\[\]/:@]+)(?::[0-9]+)?", re.IGNORECASE)
_DEFAULT_METHODS = "GET, HEAD, POST, OPTIONS"
_DEFAULT_HEADERS = "Authorization, Content-Type, X-Session-Id"
_METHOD_NAME = re.compile(r"[A-Za-z]{1,32}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-_,. \t]{1,4096}")


def is_loopback(host: str) -> bool:
    """Whether a host name or literal (with or without brackets) means this machine only."""
    name = host.lower().strip("[]").rstrip(".")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """The rules in force.

    `bind_host` decides whether the Host check is on (only a loopback server is asked by its loopback names);
    `allowed_hosts` and `allowed_origins` are added to the loopback ones; an origin of `*` allows every page.
    """

    bind_host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()

    def check(self, method: str, path: str, host: str | None, headers: Headers) -> None:
        """Raises HttpError: 403 for a foreign host or page, 401 for a missing or wrong key."""
        self._check_host(host)
        origin = headers.get("origin")
        if path.startswith("/admin") and method not in _SAFE_METHODS and origin and not self.allows_origin(origin):
            # a page can post text/plain across sites without asking first
            raise HttpError(403, "this origin may not use the admin routes", code="origin_not_allowed")
        if method != "OPTIONS" and path not in OPEN_PATHS:
            self._check_key(headers)

    def _check_host(self, host: str | None) -> None:
        # a page that rebinds its own name to 127.0.0.1 still sends that name; only HTTP/1.0 comes without a host
        if host is None or not is_loopback(self.bind_host) or is_loopback(host):
            return
        if host not in (name.lower() for name in self.allowed_hosts):
            raise HttpError(403, "this host name is not served here; see --allowed-host", code="host_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        if not self.api_keys:
            return
        given = headers.get("x-api-key") or ""
        scheme, _, token = (headers.get("authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            given = token.strip()
        matches = [hmac.compare_digest(given.encode("latin-1", "replace"), key.encode()) for key in self.api_keys]
        if not any(matches):
            message = "incorrect API key" if given else "an API key is needed: Authorization: Bearer KEY"
            raise HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

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
            "Access-Control-Allow-Methods": method if _METHOD_NAME.fullmatch(method) else _DEFAULT_METHODS,
            "Access-Control-Allow-Headers": names if _HEADER_NAMES.fullmatch(names) else _DEFAULT_HEADERS,
            "Access-Control-Max-Age": "86400",
            "Vary": "Origin",
        }
        if headers.get("access-control-request-private-network") == "true":
            granted["Access-Control-Allow-Private-Network"] = "true"
        return granted
