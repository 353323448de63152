"""Host check, API keys, CORS as pure decisions [B44, M018, M022]."""

from __future__ import annotations

import pytest

from pantheon.serve.http_access import Access, is_loopback
from pantheon.serve.http_errors import HttpError
from pantheon.serve.http_request import Headers


def refusal(access: Access, method: str = "GET", path: str = "/v1/models", host: str | None = "localhost", **h: str):  # type: ignore[no-untyped-def]
    headers = Headers((name.replace("_", "-"), value) for name, value in h.items())
    try:
        access.check(method, path, host, headers)
    except HttpError as fault:
        return fault.status, fault.code
    return None


def test_loopback_names() -> None:
    for name in ("localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.255.0.9", "::1", "[::1]"):
        assert is_loopback(name), name
    for name in (
        "",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        "10.0.0.1",
        "[::2]",
    ):
        assert not is_loopback(name), name


def test_foreign_hosts_are_403_on_loopback_only() -> None:
    """B44c: a page that rebinds its own name to 127.0.0.1."""
    access = Access(allowed_hosts=("Box.lan",))
    assert refusal(access, host="evil.example") == (403, "host_not_allowed")
    assert refusal(access, host="evil.example", path="/health") == (403, "host_not_allowed")
    assert refusal(access, host="evil.example", method="OPTIONS") == (403, "host_not_allowed")
    assert refusal(access, host="") == (403, "host_not_allowed")
    for host in ("localhost", "127.0.0.1", "[::1]", "box.lan", None):
        assert refusal(access, host=host) is None
    assert refusal(Access("0.0.0.0"), host="evil.example") is None


def test_api_key() -> None:
    """B44e."""
    access = Access(api_keys=("sesame", "öffne"))
    assert refusal(access) == (401, "invalid_api_key")
    assert refusal(access, authorization="Bearer wrong") == (401, "invalid_api_key")
    assert refusal(access, authorization="Basic sesame") == (401, "invalid_api_key")
    assert refusal(access, authorization="Bearer ") == (401, "invalid_api_key")
    assert refusal(access, authorization="bearer  sesame ") is None
    assert refusal(access, x_api_key="sesame") is None
    assert refusal(access, authorization="Bearer " + "öffne".encode().decode("latin-1")) is None
    assert refusal(access, path="/admin/dies") == (401, "invalid_api_key")
    for path in ("/", "/health", "/v1/health", "/ready"):
        assert refusal(access, path=path) is None
    assert refusal(access, method="OPTIONS") is None
    assert "sesame" not in repr(access)


def test_no_key_is_needed_where_none_is_set() -> None:
    assert refusal(Access(), authorization="Bearer whatever") is None


def test_foreign_pages_can_not_post_to_admin() -> None:
    """B44d: a simple cross-site POST asks nobody first."""
    access = Access(allowed_origins=("https://ui.example",))
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", "file://"):
        assert refusal(access, "POST", "/admin/models/unload", origin=origin) == (403, "origin_not_allowed")
        assert refusal(access, "GET", "/admin/dies", origin=origin) is None  # it can not read the answer
    for origin in ("http://localhost:5173", "https://ui.example"):
        assert refusal(access, "POST", "/admin/models/unload", origin=origin) is None
    assert refusal(access, "POST", "/admin/models/unload") is None


@pytest.mark.parametrize(
    "origin", ["http://localhost:5173", "http://127.0.0.1", "https://[::1]:3000", "https://ui.example"]
)
def test_allowed_origins_are_echoed(origin: str) -> None:
    """B44b."""
    access = Access(allowed_origins=("https://UI.example/",))
    headers = access.answer_headers("/v1/models", Headers([("Origin", origin)]))
    assert headers["Access-Control-Allow-Origin"] == origin and headers["Vary"] == "Origin"
    assert access.answer_headers("/admin/dies", Headers([("Origin", origin)])) == {}


def test_foreign_origins_get_no_allow_header() -> None:
    for origin in ("https://evil.example", "null", "http://localhost@evil.example", "http://localhost.evil.example:1"):
        headers = Headers([("Origin", origin), ("Access-Control-Request-Method", "POST")])
        assert Access().answer_headers("/v1/models", headers) == {"Vary": "Origin"}
        assert Access().preflight_headers("/v1/models", headers) == {"Vary": "Origin"}
    assert Access(allowed_origins=("*",)).allows_origin("https://evil.example")


def test_preflight_grants_what_is_asked_for() -> None:
    """B44a."""
    wanted = "authorization,content-type,x-stainless-os,x-stainless-helper-method"
    headers = Headers(
        [
            ("Origin", "http://localhost:5173"),
            ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", wanted),
            ("Access-Control-Request-Private-Network", "true"),
        ]
    )
    granted = Access().preflight_headers("/v1/chat/completions", headers)
    assert granted["Access-Control-Allow-Headers"] == wanted
    assert granted["Access-Control-Allow-Methods"] == "POST"
    assert granted["Access-Control-Allow-Origin"] == "http://localhost:5173"
    assert granted["Access-Control-Allow-Private-Network"] == "true" and int(granted["Access-Control-Max-Age"]) > 0
    assert "Access-Control-Allow-Origin" not in Access().preflight_headers("/admin/models/load", headers)


def test_preflight_without_an_origin_states_the_general_case() -> None:
    """M022."""
    granted = Access().preflight_headers("/anything", Headers())
    assert "POST" in granted["Access-Control-Allow-Methods"]
    assert "Authorization" in granted["Access-Control-Allow-Headers"]
