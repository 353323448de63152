"""A router that only listens: prints what Pantheon servers tell it, one JSON line for each message [area L].

    python tools/mock_registry.py 9000 &
    PANTHEON_REGISTRY_URL=http://127.0.0.1:9000 pantheon serve …

`MockRegistry` speaks Pantheon's own messages, `MockSmg` the part of an smg gateway that registers workers; tests use
both.  Neither routes anything.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]
Seen = tuple[str, str, Any]


class _Handler(BaseHTTPRequestHandler):
    server: MockRegistry

    def _serve(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.server.take(self.command, self.path, json.loads(data) if data else None, self.headers)
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_DELETE = _serve

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: what matters is printed by the registry."""


class MockRegistry(ThreadingHTTPServer):
    """Keeps every message in `seen` and the registered instances in `instances`.

    `refuse`: a status that every message is answered with while it is set.
    """

    daemon_threads = True

    def __init__(self, port: int = 0, tell: Callable[[str], None] = lambda line: None) -> None:
        #: guards what follows; notified at every message
        self.changed = threading.Condition()
        self.seen: list[Seen] = []
        self.keys: list[str | None] = []
        self.instances: dict[str, Any] = {}
        self.refuse: int | None = None
        self._tell = tell
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> MockRegistry:
        """Serve in a thread."""
        threading.Thread(target=self.serve_forever, args=(0.02,), name="mock-registry", daemon=True).start()
        return self

    def stop(self) -> None:
        """End it and close the port."""
        self.shutdown()
        self.server_close()

    def take(self, method: str, path: str, body: Any, headers: Any) -> Answer:
        """Note one message and answer it."""
        with self.changed:
            self.seen.append((method, path, body))
            self.keys.append(headers.get("Authorization"))
            refusal = (self.refuse or 0, {"error": {"message": "not now"}})
            answer = refusal if self.refuse else self.answer(method, path, body)
            self.changed.notify_all()
        self._tell(json.dumps({"method": method, "path": path, "body": body, "status": answer[0]}))
        return answer

    def answer(self, method: str, path: str, body: Any) -> Answer:
        """What becomes of a message; called with `changed` held."""
        known = method == "POST" and isinstance(body, dict) and body.get("instance_id")
        if not known or path not in ("/register", "/heartbeat", "/deregister"):
            return 404, {"error": {"message": f"no such message: {method} {path}"}}
        if path == "/register":
            self.instances[known] = body
        elif known not in self.instances:
            return 404, {"error": {"message": "unknown instance"}}
        elif path == "/deregister":
            del self.instances[known]
        return 200, {"ok": True}

    def wait_for(self, what: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        """Until what() is true, asked again at every message; its value."""
        with self.changed:
            found = self.changed.wait_for(what, timeout_s)
            if not found:
                raise AssertionError(f"not seen after {timeout_s:g} s; seen: {self.seen}")
            return found


class MockSmg(MockRegistry):
    """The worker routes of an smg gateway, as 1.13 answers them."""

    _next = 0

    def answer(self, method: str, path: str, body: Any) -> Answer:
        name = path.removeprefix("/workers/")
        if (method, path) == ("GET", "/workers"):
            return 200, {"workers": list(self.instances.values()), "total": len(self.instances)}
        if (method, path) == ("POST", "/workers"):
            if any(worker["url"] == body["url"] for worker in self.instances.values()):
                return 409, {"error": f"Worker already exists at URL {body['url']!r}", "code": "WORKER_ALREADY_EXISTS"}
            self._next += 1
            worker = {"id": f"w{self._next}", "url": body["url"], "status": "ready"}
            self.instances[worker["id"]] = worker
            return 202, {"status": "accepted", "worker_id": worker["id"], "url": body["url"]}
        if name not in self.instances:
            return 404, {"error": f"Worker {name} not found", "code": "WORKER_NOT_FOUND"}
        if method == "DELETE":
            del self.instances[name]
            return 202, {"status": "accepted", "worker_id": name}
        return 200, self.instances[name]


if __name__ == "__main__":
    registry = MockRegistry(int(sys.argv[1]) if len(sys.argv) > 1 else 9000, lambda line: print(line, flush=True))
    print(f"listening on {registry.url}", file=sys.stderr)
    registry.serve_forever()
