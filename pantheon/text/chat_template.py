"""Chat templates: messages to the text that a model was trained to continue [M118, M120, B34, B37].

Renders exactly as transformers' `apply_chat_template` does, in a bounded sandbox (template_env, template_guard).
Normalising messages comes before (messages.py), tokens after (prompt.py); this module must know neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.exceptions import TemplateSyntaxError

from pantheon.errors import BadRequest
from pantheon.text.template_env import ENVIRONMENT, RaisedByTemplate
from pantheon.text.template_family import family
from pantheon.text.template_guard import MAX_CHARS, Guard, LimitExceeded, guarded, limit_chars

#: characters of a template's source; the largest known is below 40 000
MAX_SOURCE_CHARS = 128 * 1024
_COMPILE_SECONDS = 10.0
_MAX_MESSAGE_CHARS = 500


class TemplateError(BadRequest):
    """A template that can not be compiled or that refused these messages; the message carries its own words.

    `refused`: the template itself said no (raise_exception) or stumbled over the shape of the messages; False when
    it was stopped for what it spends.
    """

    code = "template_error"

    def __init__(self, message: str, *, refused: bool = True, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.refused = refused


class ChatTemplate:
    """One template, compiled once; read-only, any thread may render.

    Raises TemplateError at construction, naming the line, when the source does not compile.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.name = family(source)
        self._compiled = _compile(source)

    def __repr__(self) -> str:
        return f"ChatTemplate({self.name}, {len(self.source)} characters)"

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        *,
        now: datetime | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text.

        `now` is what `strftime_now` prints (default: the local time); `kwargs` reach the template as they are
        (enable_thinking, documents, …).  Raises TemplateError; the messages are never changed.
        """
        names = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **kwargs,
        }
        return _render(self._compiled, names, now)


def render_template(
    template: str,
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    now: datetime | None = None,
    **kwargs: Any,
) -> str:
    """Compile (or find again) and render in one call; see ChatTemplate.render."""
    compiled = _known(template, bos_token, eos_token)
    return compiled.render(messages, tools, add_generation_prompt, now=now, **kwargs)


@lru_cache(maxsize=16)
def _known(source: str, bos_token: str, eos_token: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)


def _compile(source: str) -> Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"chat template: longer than {MAX_SOURCE_CHARS} characters")
    fault: TemplateError
    try:
        with guarded(Guard(seconds=_COMPILE_SECONDS)):
            return ENVIRONMENT.from_string(source)
    except TemplateSyntaxError as error:
        fault = TemplateError(f"chat template, line {error.lineno}: {_words(error)}")
    except Exception as error:  # Python's own compiler refuses what nests too deep; nothing of it may escape as a 500
        fault = TemplateError(f"chat template: can't be compiled ({_words(error)})")
    raise fault


def _render(compiled: Template, names: dict[str, Any], now: datetime | None) -> str:
    fault: TemplateError
    try:
        guard = Guard(_input_chars(names), now=now)
        with guarded(guard):
            return _output(compiled, names, guard)
    except LimitExceeded as error:
        fault = TemplateError(f"chat template: {error}", refused=False)
    except RecursionError:
        fault = TemplateError("chat template: recursion too deep", refused=False)
    except MemoryError:
        fault = TemplateError("chat template: out of memory", refused=False)
    except RaisedByTemplate as error:
        fault = TemplateError(f"chat template: {_words(error)}")
    except Exception as error:  # whatever a stranger's program stumbles over is the request's fault, never a 500
        fault = TemplateError(f"chat template: {type(error).__name__}: {_words(error)}")
    raise fault  # outside of the handler, so that the frames of the template are not kept alive


def _output(compiled: Template, names: dict[str, Any], guard: Guard) -> str:
    pieces: list[str] = []
    total = 0
    for piece in compiled.root_render_func(compiled.new_context(names)):
        total += len(piece)
        limit_chars(total)
        guard.tick()
        pieces.append(piece)
    guard.check_time()
    return "".join(pieces)


def _input_chars(names: dict[str, Any]) -> int:
    """Characters of what the template was given, at most MAX_CHARS: its allowance grows with them."""
    total = 0
    stack: list[Any] = [names]
    while stack and total < MAX_CHARS:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        total += 8
    return min(total, MAX_CHARS)


def _words(error: BaseException) -> str:
    """The error's own text, short, without a traceback."""
    text = error.message if isinstance(error, JinjaError) and error.message else str(error)
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "…"


#: How tools are listed where the template has no words for them: Hermes' form, which many models know.
TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

#: For files without a template [M118]: calls and results as in Hermes, results in <tool_response> [M045].
_CHATML = """\
{%- macro text(m) -%}{{ m.content if m.content is string else '' }}{%- endmacro -%}
{%- set ns = namespace(system='') -%}
{%- if messages and messages[0].role == 'system' -%}{%- set ns.system = text(messages[0]) -%}{%- endif -%}
{%- if tools -%}
{%- set listed = head + (tools | map('tojson') | join('\\n')) + tail -%}
{%- set ns.system = (ns.system + '\\n\\n' if ns.system else '') + listed -%}
{%- endif -%}
{%- if ns.system or (messages and messages[0].role == 'system') -%}
{{- '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + text(m) + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif not (loop.first and m.role == 'system') -%}
{{- '<|im_start|>' + m.role + '\\n' + text(m) -}}
{%- for call in m.tool_calls or [] -%}
{%- set f = call.function or call -%}
{{- '\\n' if text(m) or not loop.first -}}
{{- '<tool_call>\\n{"name": ' + (f.name | tojson) + ', "arguments": ' -}}
{{- (f.arguments if f.arguments is string else (f.arguments or {}) | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""

CHATML = "{%- set head = " + repr(TOOLS_HEAD) + " -%}{%- set tail = " + repr(TOOLS_TAIL) + " -%}\n" + _CHATML
