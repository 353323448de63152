"""Errors that a person will read.

Every refusal in Pantheon is a `PantheonError`: it carries the HTTP status, the OpenAI error `type`, a
machine-readable `code` and the `param` (field, flag or file) at fault, so that the server, the command line and
the Python API all say the same thing.  Anything else that escapes is a bug of ours and is answered 500.
"""

from __future__ import annotations

from typing import Any


class PantheonError(Exception):
    """A refusal with the numbers that decided it.

    `extra` holds further JSON-ready fields of the error object (`n_prompt_tokens`, `n_ctx` …);
    `retry_after` is in seconds and becomes the `Retry-After` header; a 429 or 503 always has it.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = self.status if status is None else status
        self.type = self.type if type is None else type
        self.code = self.code if code is None else code
        self.param = param
        self.retry_after = retry_after
        self.extra = extra

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer: `{"error": {message, type, param, code, …}}`."""
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.retry_after is not None:
            error["retry_after"] = self.retry_after
        if self.status in (429, 503):
            # whoever may come back is told when, why and how many wait in the body as well [X08]
            error.setdefault("retry_after", 1)
            error |= {"reason": self.code, "queue_depth": 0}
        error.update(self.extra)
        return {"error": error}


class BadRequest(PantheonError):
    """The request is at fault; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class NotFound(PantheonError):
    """No such route or model."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class Busy(PantheonError):
    """A model is at its limit: 429, retry soon."""

    status = 429
    type = "server_busy"
    code = "server_busy"


class Unavailable(PantheonError):
    """The server can not answer now (loading, shutting down, no memory): 503, retry later."""

    status = 503
    type = "server_error"
    code = "unavailable"


class ModelFileError(PantheonError):
    """A model file that can not be loaded.  The message names the file, the field and, where known, the offset."""

    status = 422
    type = "invalid_request_error"
    code = "invalid_model_file"

    def __init__(self, path: object, fault: str, *, offset: int | None = None, **kwargs: Any) -> None:
        at = "" if offset is None else f" (at byte {offset})"
        super().__init__(f"{path}: {fault}{at}", **kwargs)
        self.path = str(path)
        self.offset = offset


class Cancelled(PantheonError):
    """The client is gone or the server is shutting down; nobody reads this answer."""

    status = 499
    type = "cancelled"
    code = "cancelled"
