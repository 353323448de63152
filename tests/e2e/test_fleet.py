"""Several processes behind a router: joining, leaving, and what is lost (nothing) [area L, X28].

The gateway is `smg` (PyPI: smg==1.13.0) where it is installed; a stand-in records the same messages everywhere.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.process import Served, get
from tools.mock_registry import MockRegistry, MockSmg

#: the program; SMG may name one that is not on the path
SMG = os.environ.get("SMG") or shutil.which("smg")
PIECES = ["Hel", "lo", ", ", "world"]


def script(folder: Path, **spec: Any) -> str:
    path = folder / "fake.json"
    path.write_text(json.dumps({"pieces": PIECES, **spec}))
    return f"script:{path}"


def chat(url: str, model: str = "fake", timeout_s: float = 30) -> tuple[int, Any, float]:
    """(status, answer, Retry-After)."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "x"}]}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, json.load(answer), 0.0
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code, fault.read(), float(fault.headers.get("Retry-After") or 0)


@pytest.mark.parametrize("transport", ["local", "smg"])
def test_a_server_that_is_stopped_tells_the_router_and_finishes_first_X28(tmp_path: Path, transport: str) -> None:
    """SIGTERM: out of the router at once, what runs and what still comes is answered, then exit 0."""
    router = (MockSmg() if transport == "smg" else MockRegistry()).start()
    environment = {"PANTHEON_REGISTRY_URL": router.url, "PANTHEON_REGISTRY_TRANSPORT": transport}
    try:
        with Served("--model", script(tmp_path, decode_ms=300), "--name", "fake", **environment) as served:
            url = served.url
            router.wait_for(lambda: router.instances)
            (instance,) = router.instances.values()
            assert instance["url" if transport == "smg" else "endpoint"] == url + ("/m/fake" * (transport == "smg"))
            answers: list[tuple[int, Any, float]] = []
            running = threading.Thread(target=lambda: answers.append(chat(url)))
            running.start()
            while not get(f"{url}/admin/sched")[1]["entries"][0]["busy"]:
                assert running.is_alive()
            served.process.send_signal(signal.SIGTERM)
            router.wait_for(lambda: not router.instances)
            # one that the router had sent before it knew
            assert get(f"{url}/health") == (503, {"status": "stopping"})
            running.join(20)
            late = chat(url)
            assert [answers[0][0], late[0]] == [200, 200]
            assert late[1]["choices"][0]["message"]["content"] == "Hello, world"
            assert served.end(20) == 0
            assert not any("Traceback" in line for line in served.lines)
    finally:
        router.stop()


def cut_off(url: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        chat(url)


def test_a_second_signal_ends_the_drain(tmp_path: Path) -> None:
    router = MockRegistry().start()
    try:
        with Served(
            "--model", script(tmp_path, eog=False, decode_ms=50), "--name", "fake", PANTHEON_REGISTRY_URL=router.url
        ) as served:
            url = served.url
            router.wait_for(lambda: router.instances)
            running = threading.Thread(target=cut_off, args=(url,))
            running.start()
            while not get(f"{url}/admin/sched")[1]["entries"][0]["busy"]:
                assert running.is_alive()
            served.process.send_signal(signal.SIGTERM)
            served.wait_line("draining")
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(10) == -signal.SIGTERM
            running.join(20)
    finally:
        router.stop()


# ---- the real gateway -----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def gateway(log: Path) -> Iterator[str]:
    """A running smg and its URL."""
    assert SMG is not None
    port, metrics = free_port(), free_port()
    words = [SMG, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait(20)


def workers(url: str) -> list[str]:
    """The workers that requests may go to."""
    return sorted(w["url"] for w in get(f"{url}/workers")[1]["workers"] if w["status"] == "ready")


def wait_workers(url: str, count: int) -> list[str]:
    until = time.monotonic() + 40
    while len(found := workers(url)) != count:
        assert time.monotonic() < until, f"{found}, not {count} workers"
        time.sleep(0.1)
    return found


class Clients:
    """Clients that ask one after the other and obey Retry-After, until told to end."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._end = threading.Event()
        #: guards outcomes
        self._lock = threading.Lock()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._end.is_set():
            try:
                status, body, retry_s = chat(self._url)
            except OSError as fault:
                status, body, retry_s = 0, repr(fault).encode(), 0
            if status == 429:
                # told to come again: neither answered nor lost
                self._end.wait(min(retry_s, 0.2))
                continue
            text = body["choices"][0]["message"]["content"] if status == 200 else body.decode()
            with self._lock:
                self.outcomes[f"{status} {text}"] += 1

    def wait_more(self, count: int) -> None:
        """Until so many more answers have come."""
        until = time.monotonic() + 60
        goal = self.outcomes.total() + count
        while self.outcomes.total() < goal:
            assert time.monotonic() < until, self.outcomes
            time.sleep(0.05)

    def end(self) -> dict[str, int]:
        """All answers by status and text."""
        self._end.set()
        for thread in self._threads:
            thread.join(40)
        return dict(self.outcomes)


@pytest.mark.slow
@pytest.mark.skipif(SMG is None, reason="smg is not installed (pip install smg==1.13.0, or SMG=/path/to/smg)")
def test_two_servers_join_smg_and_stopping_one_loses_no_request(tmp_path: Path) -> None:
    """Issue point 6: requests flow through a real gateway, and SIGTERM of one server loses no non-streaming request."""
    model = ("--model", script(tmp_path, decode_ms=40), "--name", "fake")
    with gateway(tmp_path / "smg.log") as url:
        environment = {"PANTHEON_REGISTRY_URL": url, "PANTHEON_REGISTRY_TRANSPORT": "smg"}
        with Served(*model, **environment) as one, Served(*model, **environment) as two:
            urls = [one.url, two.url]
            assert wait_workers(url, 2) == sorted(f"{u}/m/fake" for u in urls)
            clients = Clients(url, 3)
            clients.wait_more(20)
            one.process.send_signal(signal.SIGTERM)
            assert one.end(40) == 0
            assert wait_workers(url, 1) == [f"{urls[1]}/m/fake"]
            clients.wait_more(10)
            outcomes = clients.end()
            assert outcomes == {"200 Hello, world": sum(outcomes.values())}, outcomes
            served = [sum("answered" in line for line in one.lines)]
            two.process.send_signal(signal.SIGTERM)
            assert two.end(40) == 0
            served.append(sum("answered" in line for line in two.lines))
            assert min(served) >= 5, f"both took part: {served}"


@pytest.mark.slow
@pytest.mark.skipif(SMG is None, reason="smg is not installed (pip install smg==1.13.0, or SMG=/path/to/smg)")
def test_every_model_of_a_server_is_reached_through_smg(tmp_path: Path) -> None:
    """Loaded and unloaded at run time, too."""
    fake = script(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({"pieces": ["other"]}))
    with gateway(tmp_path / "smg.log") as url:
        environment = {"PANTHEON_REGISTRY_URL": url, "PANTHEON_REGISTRY_TRANSPORT": "smg"}
        with Served("--model", fake, "--name", "fake", **environment) as served:
            own = served.url
            wait_workers(url, 1)
            admin(own, "load", path="script:other.json", name="org/other")
            wait_workers(url, 2)
            assert chat(url)[1]["choices"][0]["message"]["content"] == "Hello, world"
            assert chat(url, "org/other")[1]["choices"][0]["message"]["content"] == "other"
            admin(own, "unload", name="org/other")
            wait_workers(url, 1)
            # 503 while the gateway is still letting the worker go
            assert chat(url, "org/other")[0] in (404, 503) and chat(url)[0] == 200
            served.process.send_signal(signal.SIGTERM)
            assert served.end(40) == 0


def admin(url: str, action: str, **body: Any) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/admin/models/{action}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200
