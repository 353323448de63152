"""The status page in a real browser, against a real server over scripted models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.mem.memwatch import MemWatch
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.serve.die_feed import feed_dies
from pantheon.serve.http_server import HttpConfig, PantheonServer
from pantheon.serve.loading import LoadOptions
from pantheon.serve.registry import Registry
from tests.e2e import chromium
from tests.e2e.chromium import Browser
from tests.mem.fake_host import GIB, FakeHost
from tests.serve.api_server import Api
from tests.serve.http_client import eventually

pytestmark = [
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium on this machine"),
    pytest.mark.timeout(180),
]
THOUGHT = [{"user": "<think>"}, "The user greets me.", {"user": "</think>"}, "Hello, ", "<b>you</b>", "!"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def _quiet(browser: Browser) -> Iterator[None]:
    """No test leaves an error in the page's console."""
    browser.errors.clear()
    browser.look()
    yield
    browser.open("about:blank")
    assert browser.errors == []


@contextmanager
def site(host: FakeHost | None = None, **config: object) -> Iterator[Api]:
    """A server with two virtual dies and, with a host, a watched memory."""
    watch = MemWatch(host.root, interval_s=0.02) if host is not None else None
    app = App(Registry(dies=DieManager(virtual_dies([2 << 30] * 2))), load_options=LoadOptions(watch=watch))
    if watch is not None:
        watch.start()
        feed_dies(watch, app.dies)
    server = PantheonServer(build_router(app), HttpConfig(port=0, **config))  # type: ignore[arg-type]
    server.start(0.01)
    try:
        yield Api(server, app)
    finally:
        server.stop(1.0)
        if watch is not None:
            watch.stop()


def send(browser: Browser, text: str) -> None:
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.key("Enter", "\r")


def test_models_dies_pressure_rungs_and_work_are_shown_and_follow(browser: Browser, tmp_path: Path) -> None:
    host = FakeHost(tmp_path, 64 * GIB, 50 * GIB)
    with site(host) as api:
        api.add("first", pieces=["a"])
        browser.open(f"{api.server.url}/ui")
        browser.until("document.getElementById('health').textContent === 'answers'")
        browser.until("document.getElementById('models').innerText.includes('first')")
        browser.until("document.getElementById('dies').innerText.includes('0 B of')")
        browser.until("document.getElementById('memory').innerText.includes('nothing given up')")
        browser.until("document.getElementById('work').innerText.includes('#0 idle')")
        assert browser.run("document.querySelectorAll('#dies [role=meter]').length") == 2
        api.add("second", pieces=["b"])
        host.available(8 * GIB)
        browser.until("document.getElementById('model').options.length === 2")
        browser.until("/TIGHT|CRITICAL/.test(document.getElementById('memory').innerText)")
        browser.until("document.getElementById('memory').innerText.includes('rung 3')")
        shown = browser.run("document.getElementById('memory').innerText")
        assert "above the reserve" in shown and "prefill window clamped" in shown


def test_a_chat_streams_with_its_thoughts_apart_and_markup_stays_text(browser: Browser) -> None:
    with site() as api:
        api.add(pieces=THOUGHT)
        browser.open(f"{api.server.url}/ui")
        browser.until("document.getElementById('model').value === 'm'")
        send(browser, "Hi <i>there</i>")
        browser.until("document.querySelector('.assistant > .quiet')?.textContent.includes('tokens')")
        assert browser.run("document.querySelector('.assistant > .text').textContent") == "Hello, <b>you</b>!"
        assert browser.run("document.querySelector('.thought .text').textContent") == "The user greets me."
        assert browser.run("document.querySelector('.user').textContent") == "Hi <i>there</i>"
        assert browser.run("document.querySelectorAll('#talk b, #talk i').length") == 0
        send(browser, "again")
        browser.until("document.querySelectorAll('.assistant').length === 2 && !running")
        assert browser.run("messages.map((m) => m.role).join()") == "user,assistant,user,assistant"
        browser.run("document.getElementById('clear').click()")
        assert browser.run("messages.length + document.getElementById('talk').children.length") == 0


def test_stop_and_escape_end_an_answer_and_a_refusal_is_told(browser: Browser) -> None:
    with site() as api:
        entry = api.add(pieces=["x"], eog=False, decode_ms=5)
        browser.open(f"{api.server.url}/ui")
        browser.until("document.getElementById('model').value === 'm'")
        for way in ("document.getElementById('stop').click()", "Escape"):
            send(browser, "go on")
            browser.until("[...document.querySelectorAll('.assistant > .text')].at(-1)?.textContent.length > 3")
            assert browser.run("document.getElementById('send').disabled") is True
            browser.key("Escape") if way == "Escape" else browser.run(way)
            browser.until("[...document.querySelectorAll('.assistant > .quiet')].at(-1).textContent === 'stopped'")
            assert eventually(lambda: entry.refs == 0), "the server goes on"
        browser.run("document.getElementById('most').value = '1e30'")
        send(browser, "too many")
        browser.until("document.querySelector('.fault[role=alert]')?.textContent.includes('max_tokens')")
        browser.errors.clear()  # the browser logs each answer that is no success


def test_views_that_are_refused_say_so_once_and_come_with_a_key(browser: Browser) -> None:
    with site(api_keys=("open-sesame",), admin_key="root-key") as api:
        api.add(pieces=THOUGHT)
        browser.open(f"{api.server.url}/ui")
        browser.until("document.querySelectorAll('.note').length >= 4")
        assert re.search(r"Not shown: .*admin key", browser.text())
        browser.until("round >= 4")
        asked = browser.run("performance.getEntriesByType('resource').map((entry) => new URL(entry.name).pathname)")
        assert {path: asked.count(path) for path in asked if path != "/health" and asked.count(path) > 1} == {}
        browser.run("document.getElementById('open-keys').click()")
        for name, key in (("api-key", "open-sesame"), ("admin-key", "root-key")):
            browser.run(f"document.getElementById('{name}').focus()")
            browser.type(key)
        browser.key("Enter", "\r")
        browser.until("document.querySelectorAll('.note').length === 0")
        browser.until("document.getElementById('model').value === 'm'")
        send(browser, "hi")
        browser.until("document.querySelector('.assistant > .quiet')?.textContent.includes('tokens')")
        kept = json.loads(browser.run("JSON.stringify({...sessionStorage})"))
        assert kept == {"pantheon.api-key": "open-sesame", "pantheon.admin-key": "root-key"}
        assert browser.run("Object.keys(localStorage).length + document.cookie.length") == 0
        browser.errors.clear()  # of the views that were refused at first


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 800, 1440])
def test_nothing_sticks_out_at_any_width(browser: Browser, width: int, dark: bool) -> None:
    with site() as api:
        api.add("a-model-with-a-very-long-name-indeed-Q4_K_M-00001-of-00002", pieces=THOUGHT)
        browser.look(dark=dark, width=width)
        browser.open(f"{api.server.url}/ui")
        browser.until("document.getElementById('work').innerText.includes('#0 idle')")
        assert browser.run("document.documentElement.scrollWidth") <= width
        ground = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (int(ground.split("(")[1].split(",")[0]) < 128) is dark


def test_every_control_is_reached_by_the_keyboard(browser: Browser) -> None:
    with site() as api:
        api.add(pieces=THOUGHT)
        browser.open(f"{api.server.url}/ui")
        browser.until("document.getElementById('model').value === 'm'")
        reached = []
        for _ in range(12):
            browser.key("Tab")
            reached.append(browser.run("document.activeElement.id || document.activeElement.className"))
        wanted = {"skip", "open-keys", "model", "clear", "talk", "prompt", "temperature", "most", "send"}
        assert wanted <= set(reached)
        unnamed = browser.run(
            "[...document.querySelectorAll('input, select, textarea, button')].filter((node) => "
            "!(node.labels && node.labels.length) && !node.textContent.trim()).map((node) => node.id)"
        )
        assert unnamed == []
