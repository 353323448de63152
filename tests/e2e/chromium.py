"""A headless Chromium, driven over its DevTools pipe: JSON messages with a NUL behind each, no further dependency."""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

ANSWER_S = 30.0


def find() -> str | None:
    """The browser of this machine, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser.  `errors` gathers what the page throws, logs as an error, or its policy blocks."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 900) -> None:
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()
        path = find()
        assert path is not None
        words = [
            path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        # the browser reads from its descriptor 3 and writes to 4
        inside = f'exec 3<&{to_read} 4>&{from_write}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", inside, "-", *words], pass_fds=(to_read, from_write), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        os.close(to_read)
        os.close(from_write)
        self.errors: list[str] = []
        self._id = 0
        self._session: str | None = None
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(10)
        for fd in (self._to, self._from):
            os.close(fd)

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                data = os.read(self._from, 1 << 16)
            except OSError:
                return
            if not data:
                return
            *whole, rest = (rest + data).split(b"\0")
            for text in whole:
                self._take(json.loads(text))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers.put(message)
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            entry = message["params"]["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._answers.get(timeout=ANSWER_S)
            if answer["id"] == self._id:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        """Go to a page and wait until it is there."""
        found = self.send("Page.navigate", url=url)
        assert "errorText" not in found, found
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        how = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        found = self.send("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 15.0) -> Any:
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"{script} stays {value!r}: {self.text()[:2000]} {self.errors}"
            pause.wait(0.05)
        return value

    def text(self) -> str:
        """What a reader sees."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def key(self, name: str, text: str = "", modifiers: int = 0) -> None:
        """Press one key."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        more = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name], "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", **more, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **more)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)

    def look(self, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """Size of the window and colours that the reader prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """A screenshot."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))
