"""The status page as an answer: open, self-contained, strict.  What it does: tests/e2e/test_ui_browser.py."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from pantheon.serve import ui
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.serve.http_server import HttpConfig, PantheonServer
from tests.serve.http_client import ask, request

PARTS = Path(ui.__file__).with_name("web")
SCRIPT, STYLE, HTML = ((PARTS / name).read_text() for name in ("script.js", "style.css", "page.html"))


def test_the_page_is_served_without_a_key_and_its_policy_allows_its_own_parts_only() -> None:
    server = PantheonServer(build_router(App()), HttpConfig(port=0, api_keys=("k",), admin_key="a"))
    server.start(0.01)
    try:
        answer = ask(server, request("GET", "/ui"))
        foreign = ask(server, request("GET", "/ui", host="evil.example"))
    finally:
        server.stop(1.0)
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert foreign.status == 403, "a page that rebinds its name"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.body.decode(), re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_nothing_is_fetched_from_elsewhere_and_text_never_becomes_html() -> None:
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", HTML + SCRIPT + STYLE) == []
    assert re.findall(r"\bon\w+\s*=|\sstyle=|javascript:|<script [^>]*src|<link [^>]*stylesheet", HTML) == []
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage"
    assert re.findall(unsafe, SCRIPT) == []
    assert "@import" not in STYLE and "url(" not in STYLE
    assert len((HTML + STYLE + SCRIPT).splitlines()) <= 800


def _colours(text: str) -> dict[str, tuple[float, ...]]:
    return {
        name: tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4))
        for name, value in re.findall(r"--([\w-]+): #(\w{6})", text)
    }


def _contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    def light(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((light(one), light(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(scheme: str) -> None:
    """4.5 to 1, WCAG AA."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    colours = _colours(light if scheme == "light" else dark)
    pairs = [(text, ground) for text in ("ink", "quiet") for ground in ("paper", "card", "fill")]
    pairs += [(text, "card") for text in ("accent", "ok", "watch", "tight", "critical")]
    pairs += [("on-accent", "accent"), ("ink", "user")]
    poor = {pair: ratio for pair in pairs if (ratio := _contrast(*(colours[name] for name in pair))) < 4.5}
    assert poor == {}
