"""Host check, API keys, CORS as pure decisions [B44, M018, M022]."""

from __future__ import annotations

import pytest

from pantheon.serve.http_access import Access, is_loopback
from pantheon.serve.http_errors import HttpError
from pantheon.serve.http_request import Headers


def refusal(  # type: ignore[no-untyped-def]
    access: Access,
    method: str = "GET",
    path: str = "/v1/models",
    host: str | None = "localhost",
    client: str = "127.0.0.1",
    **h: str,
):
    headers = Headers((name.replace("_", "-"), value) for name, value in h.items())
    try:
        access.check(method, path, host, headers, client)
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


KEYS = (
    ({}, 401), ({"authorization": "Bearer k"}, None), ({"x_api_key": "k"}, None), ({"x_api_key": "x"}, 401),
    ({"authorization": "Bearer placeholder", "x_api_key": "k"}, None),
    ({"authorization": "Bearer k", "x_api_key": "placeholder"}, None),
    ({"authorization": "Basic azpr", "x_api_key": ""}, 401), ({"authorization": "k"}, 401),
    ({"authorization": "Bearer kk"}, 401), ({"authorization": "Bearer k2"}, None),
)  # fmt: skip


@pytest.mark.parametrize(("sent", "status"), KEYS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/metrics", "/slots", "/v1/messages", "/props"])
def test_a_key_in_either_header_opens_every_path_but_the_probes(path: str, sent: dict[str, str], status: int) -> None:
    """Issue 6 point 3: Claude Code sends both headers, with a placeholder in one of them."""
    access = Access(api_keys=("k", "k2"))
    assert refusal(access, "POST", path, **sent) == (status and (status, "invalid_api_key"))
    assert refusal(access, "OPTIONS", path) is None
    assert refusal(Access(), "POST", path, **sent) is None


def test_an_unknown_key_is_an_authentication_error_that_names_no_key() -> None:
    with pytest.raises(HttpError, match="^incorrect API key$") as caught:
        Access(api_keys=("sesame",)).check("GET", "/v1/models", "localhost", Headers([("x-api-key", "guess")]))
    assert caught.value.type == "authentication_error" and caught.value.headers == {"WWW-Authenticate": "Bearer"}


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shortcut at the first that fits, none by ==."""
    seen: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return one == other

    monkeypatch.setattr("pantheon.serve.http_access.hmac.compare_digest", compare)
    access = Access(api_keys=("a", "b", "c"))
    assert refusal(access, authorization="Bearer a", x_api_key="b") is None
    assert sorted(seen) == sorted((given, key) for given in (b"a", b"b") for key in (b"a", b"b", b"c"))


def test_a_foreign_page_can_not_keep_the_model_busy_with_a_simple_post() -> None:
    """B44d's kin on the open routes: text/plain and forms cross sites without a preflight, JSON does not."""
    access = Access(allowed_origins=("https://ui.example",))
    chat = "/v1/chat/completions"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        sent = {"content_type": kind} if kind else {}
        assert refusal(access, "POST", chat, origin="https://evil.example", **sent) == (403, "origin_not_allowed")
        assert refusal(access, "POST", chat, origin="null", **sent) == (403, "origin_not_allowed")
        assert refusal(access, "POST", chat, origin="https://ui.example", **sent) is None
        assert refusal(access, "POST", chat, origin="http://localhost:3000", **sent) is None
        assert refusal(access, "POST", chat, **sent) is None
    # an application that is no page may send an origin of its own
    json = "application/json; charset=utf-8"
    assert refusal(access, "POST", chat, origin="vscode-webview://x", content_type=json) is None
    assert refusal(access, "GET", "/v1/models", origin="https://evil.example") is None


ADMIN = "/admin/models/load"


@pytest.mark.parametrize(
    ("keys", "admin", "client", "given", "chat", "managed"),
    [
        # nothing set: chats from everywhere, admin from this machine
        ((), None, "127.0.0.1", "", None, None),
        ((), None, "::1", "", None, None),
        ((), None, "::ffff:127.0.0.1", "", None, None),
        ((), None, "10.0.0.7", "", None, (403, "admin_loopback_only")),
        ((), None, "::ffff:10.0.0.7", "", None, (403, "admin_loopback_only")),
        # API keys only: needed for both, and still this machine only
        (("k",), None, "127.0.0.1", "", (401, "invalid_api_key"), (401, "invalid_api_key")),
        (("k",), None, "127.0.0.1", "k", None, None),
        (("k",), None, "10.0.0.7", "k", None, (403, "admin_loopback_only")),
        # an admin key: from everywhere, and nothing else opens
        ((), "a", "10.0.0.7", "a", None, None),
        ((), "a", "127.0.0.1", "", None, (401, "invalid_admin_key")),
        ((), "a", "127.0.0.1", "x", None, (401, "invalid_admin_key")),
        (("k",), "a", "10.0.0.7", "a", (401, "invalid_api_key"), None),
        (("k",), "a", "10.0.0.7", "k", None, (403, "admin_key_needed")),
        (("k",), "a", "10.0.0.7", "", (401, "invalid_api_key"), (401, "invalid_admin_key")),
        (("k",), "a", "10.0.0.7", "ka", (401, "invalid_api_key"), (401, "invalid_admin_key")),
    ],
)
def test_who_may_chat_and_who_may_manage_X33(keys, admin, client, given, chat, managed) -> None:  # type: ignore[no-untyped-def]
    """The matrix of API keys, admin key and where the request comes from."""
    access = Access("0.0.0.0", api_keys=keys, admin_key=admin)
    header = {"authorization": f"Bearer {given}"} if given else {}
    assert refusal(access, client=client, **header) == chat
    for method, path in (("POST", ADMIN), ("GET", "/admin/dies"), ("GET", "/admin")):
        assert refusal(access, method, path, client=client, **header) == managed, path
    assert refusal(access, "OPTIONS", ADMIN, client=client) is None
    assert admin is None or f"'{admin}'" not in repr(access)


def test_what_a_proxy_passes_on_is_not_from_this_machine_X33() -> None:
    for name in ("x_forwarded_for", "forwarded", "x_real_ip", "via"):
        assert refusal(Access(), "POST", ADMIN, **{name: "10.0.0.7"}) == (403, "admin_loopback_only")
        assert refusal(Access(admin_key="a"), "POST", ADMIN, authorization="Bearer a", **{name: "10.0.0.7"}) is None


def test_a_rebound_name_does_not_reach_the_admin_routes_whatever_the_server_is_bound_to_X33_B44c() -> None:
    access = Access("0.0.0.0", allowed_hosts=("box.lan",))
    assert refusal(access, host="evil.example") is None
    assert refusal(access, "POST", ADMIN, host="evil.example") == (403, "host_not_allowed")
    for host in ("localhost", "127.0.0.1", "[::1]", "box.lan", None):
        assert refusal(access, "POST", ADMIN, host=host) is None
    assert refusal(Access("0.0.0.0", admin_key="a"), "POST", ADMIN, host="box", authorization="Bearer a") is None


def test_the_probe_of_one_model_needs_no_key() -> None:
    access = Access(api_keys=("k",))
    assert refusal(access, path="/m/tiny/health") is None
    for path in ("/m/tiny/v1/models", "/m/tiny/v1/chat/completions", "/m", "/mm/health"):
        assert refusal(access, path=path) == (401, "invalid_api_key")


def test_no_key_is_needed_where_none_is_set() -> None:
    assert refusal(Access(), authorization="Bearer whatever") is None


def test_foreign_pages_can_not_post_to_admin() -> None:
    """B44d: a simple cross-site POST asks nobody first."""
    access = Access(allowed_origins=("https://ui.example",))
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", "file://"):
        assert refusal(access, "POST", "/admin/models/unload", origin=origin) == (403, "origin_not_allowed")
        assert refusal(access, "GET", "/admin/dies", origin=origin) == (403, "origin_not_allowed")
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
    assert headers["Access-Control-Allow-Credentials"] == "true"
    exposed = headers["Access-Control-Expose-Headers"].split(", ")
    assert {"X-Request-Id", "Retry-After", "X-Pantheon-Model", "X-Pantheon-Queue-Ms"} <= set(exposed)
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
    assert granted["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"
    assert granted["Access-Control-Allow-Origin"] == "http://localhost:5173"
    assert granted["Access-Control-Allow-Credentials"] == "true"
    assert granted["Access-Control-Allow-Private-Network"] == "true" and int(granted["Access-Control-Max-Age"]) > 0
    assert "Access-Control-Allow-Origin" not in Access().preflight_headers("/admin/models/load", headers)


def test_preflight_without_an_origin_states_the_general_case() -> None:
    """M022."""
    granted = Access().preflight_headers("/anything", Headers())
    assert "POST" in granted["Access-Control-Allow-Methods"]
    for asked, more in (("PATCH", ", PATCH"), ("HEAD", ", HEAD"), ("bad method", ""), ("", "")):
        headers = Headers([("Access-Control-Request-Method", asked)])
        found = Access().preflight_headers("/x", headers)["Access-Control-Allow-Methods"]
        assert found == "GET, POST, DELETE, OPTIONS" + more
    assert "Authorization" in granted["Access-Control-Allow-Headers"]
    assert granted["Access-Control-Allow-Origin"] == "*" and "Access-Control-Allow-Credentials" not in granted
