"""GET /ui: the status page, one answer that holds its own style and script and asks nobody but this server.

It shows what the JSON views say and has a chat.  It carries no secrets, so it needs no key; what it then asks does.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from pathlib import Path

from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.routes import Responder

_PARTS = Path(__file__).with_name("web")


def get_ui(app: App, request: Request, responder: Responder) -> None:
    """The page.  Its policy allows the very script and style that are in it, and requests to this server."""
    body, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    responder.send_bytes(200, "text/html; charset=utf-8", body, headers)


@lru_cache(1)
def page() -> tuple[bytes, str]:
    """(page, Content-Security-Policy).  Raises OSError when a part of it was not installed."""
    html, style, script = ((_PARTS / name).read_text("utf-8") for name in ("page.html", "style.css", "script.js"))
    body = html.replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return body.encode("utf-8"), policy


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"
