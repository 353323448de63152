"""What a handler sees of a request: already read in full, framed, decoded and authorised.

Must not know sockets or routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pantheon.serve.http_json import load_object


class Headers:
    """Header fields in order of arrival; names compare case-insensitively."""

    def __init__(self, fields: Iterable[tuple[str, str]] = ()) -> None:
        self._fields = [(name.lower(), value) for name, value in fields]

    def get(self, name: str, default: str | None = None) -> str | None:
        """The value of a field, repeated ones joined with `, ` (RFC 9110 5.3), or the default."""
        values = self.get_all(name)
        return ", ".join(values) if values else default

    def get_all(self, name: str) -> list[str]:
        """Every value of a field, in order."""
        wanted = name.lower()
        return [value for key, value in self._fields if key == wanted]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self.get_all(name))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


@dataclass
class Request:
    """One whole request.

    `path` is percent-decoded and without the query; `tail` is what follows the prefix on a prefix route (the id of
    `/v1/models/{id}`, slashes and all); `query` holds the last value of each name; `body` is unframed and
    decompressed; `http_version` is (1, 0) or (1, 1); `client` is the peer address; `id` is the X-Request-Id.
    """

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""
    http_version: tuple[int, int] = (1, 1)
    client: str = ""
    id: str = ""
    tail: str = ""

    @cached_property
    def _object(self) -> dict[str, Any]:
        return load_object(self.body)

    def json(self) -> dict[str, Any]:
        """The body as a JSON object, whatever the Content-Type says.

        Raises BadRequest (400, invalid_request_error): empty, not JSON, not an object, not UTF-8, nested deeper than
        100, NaN or Infinity, numbers beyond a double or of more than 32 digits.
        """
        return self._object
