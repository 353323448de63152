"""How an API speaks where the HTTP floor speaks in its name: the body of an error, and the end of an event stream.

`Voice` is OpenAI's way; other APIs make it their own.  Must not know requests, models or sockets.
"""

from __future__ import annotations

from typing import Any

from pantheon.errors import PantheonError
from pantheon.serve.http_json import dump_json


def frame(event: Any) -> bytes:
    """One event, `data: {compact JSON}`, without a name: some clients of the chat API choke on `event:` [B19]."""
    return b"data: " + dump_json(event) + b"\n\n"


def named_frame(name: str, event: Any) -> bytes:
    """One event with its name, as the Responses and Messages APIs send them."""
    return b"event: " + name.encode() + b"\ndata: " + dump_json(event) + b"\n\n"


class Voice:
    """OpenAI's: errors as `{"error": …}`, streams that end with `[DONE]`.

    `closing` are the bytes behind the last event of a stream that went well.
    """

    closing = b"data: [DONE]\n\n"

    def error_body(self, fault: PantheonError) -> Any:
        """The JSON body of a refusal."""
        return fault.body()

    def error_frames(self, fault: PantheonError) -> bytes:
        """The events that end a stream which failed."""
        return frame(self.error_body(fault)) + self.closing


OPENAI = Voice()
