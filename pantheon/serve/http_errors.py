"""Refusals of the HTTP floor: a `PantheonError` that may also carry response headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheon.errors import PantheonError


class HttpError(PantheonError):
    """A refusal with a status of its own and, where the status asks for them, headers (`Allow`, `Accept-Encoding`).

    The error `type` follows the status: below 500 the request is at fault, from 500 on the server is.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        super().__init__(message, status=status, type=kwargs.pop("type", kind), code=code, **kwargs)
        self.headers = dict(headers or {})


def bad_http(message: str) -> HttpError:
    """400: the bytes are not a well-formed HTTP request."""
    return HttpError(400, message, code="bad_http_request")


def shutting_down() -> HttpError:
    """503 for a request that meets a server on its way out."""
    return HttpError(503, "the server is shutting down", code="shutting_down", retry_after=5)
