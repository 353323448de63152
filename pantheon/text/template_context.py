"""Variables that chat templates take for granted and no message holds: as llama-server gives them.

Knows the source of a template, not how it is rendered.  A caller's own value of the same name wins.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any

#: a template that asks whether it is defined, or has a default, knows what to do without it
_OPTIONAL_THINKING = re.compile(r"\benable_thinking\s*(?:is\s+(?:not\s+)?defined|\|\s*default)")
_NAMES = ("enable_thinking", "date_string", "datetime", "functions")
_FORMS = {"date_string": "%d %b %Y", "datetime": "%b %d %Y %H:%M:%S GMT"}


def template_context(source: str, tools: Any = None, now: datetime | None = None) -> dict[str, Any]:
    """The variables for one template.

    `enable_thinking`: true, where the template takes it for granted; `date_string` and `datetime`: when it is, where
    the template has no clock of its own; `functions`: the tools as JSON, where it does not read `tools`.
    """
    found: dict[str, Any] = {}
    for name in _wanted(source):
        if name == "enable_thinking":
            found[name] = True
        elif name == "functions":
            found[name] = json.dumps(tools or [], ensure_ascii=False, indent=4)
        else:
            found[name] = (now or datetime.now()).strftime(_FORMS[name])
    return found


@lru_cache(maxsize=64)
def _wanted(source: str) -> tuple[str, ...]:
    code = " ".join(re.findall(r"{[{%](.*?)[%}]}", source, re.S))
    used = {name for name in _NAMES if re.search(rf"(?<![\w.'\"]){name}\b", code)}
    if _OPTIONAL_THINKING.search(code):
        used.discard("enable_thinking")
    if "strftime_now" in code:
        used -= _FORMS.keys()
    if re.search(r"\btools\b", code):
        used.discard("functions")
    return tuple(sorted(used))
