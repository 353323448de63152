"""What a request that does not say it gets: the sampling values and template variables of this server's flags.

`fill` puts them into a decoded body before it is checked, so that every door treats them like fields that were sent.
Knows field names of requests, and nothing else of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

#: a value is not filled in when one of its other names is given
_CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_OTHER_NAMES = {"n_predict": _CAPS, "repeat_penalty": ("repeat_penalty", "repetition_penalty")}


@dataclass(frozen=True)
class Defaults:
    """None: the flag was not given, and the field keeps its own default.  `n_predict` is the cap of an answer,
    `template_kwargs` are variables of the chat template, each of which a request may set itself."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n_predict: int | None = None
    verbose: bool | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def fill(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with these values in the fields that it leaves open (absent or null); a body that is no object is
        the parser's to refuse."""
        if self == _NONE or not isinstance(body, dict):
            return body
        found = dict(body)
        for item in fields(self)[:-1]:
            value, names = getattr(self, item.name), _OTHER_NAMES.get(item.name, (item.name,))
            if value is not None and all(body.get(name) is None for name in names):
                found["max_tokens" if item.name == "n_predict" else item.name] = value
        own = body.get("chat_template_kwargs") or {}
        if self.template_kwargs and isinstance(own, dict):
            more = dict(self.template_kwargs)
            if any(body.get(name) is not None for name in ("enable_thinking", "reasoning_effort")):
                more.pop("enable_thinking", None)
            found["chat_template_kwargs"] = more | own
        return found


_NONE = Defaults()
