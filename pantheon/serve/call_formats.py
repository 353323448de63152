"""How models write tool calls: which marker opens a block, and a grammar that reads it as it comes.

Formats: Hermes and Qwen (`<tool_call>` with JSON), Qwen3-Coder and Qwen3.5 (`<function=…><parameter=…>`), Llama 3 (bare
JSON, or behind `<|python_tag|>`), Mistral (a list, or `name[ARGS]{…}`), Phi-4, Gemma 4, DeepSeek, and fenced
`tool_code` (Gemma).
A grammar is a generator over a Scan that tells a Sink what it finds; it must not know deltas, tokens or requests.
Sources: the chat templates of these models, which show each form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pantheon.engine.constraint_tools import tool_syntax
from pantheon.serve.call_values import code_key, python_call
from pantheon.serve.call_xml import Grammar, Offered, Sink, bare_function, function
from pantheon.serve.scan import Ended, Malformed, Scan, Steps, collect, escaped, json_string, json_value

_NAME = re.compile(r"[\w.\-]")
_LINE = re.compile(r"[^\n]")
_ARGUMENTS = ("arguments", "parameters")
_GEMMA_QUOTE = '<|"|>'
_PYTHON_TOOLS = ("python", "ipython", "code_interpreter")
_FENCE = "```"

@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls: opening marker -> grammar of the block.  `marks`: further marks that may be
    control tokens of the model.  `at_start`: an answer that begins with `{` may be a call."""

    blocks: Mapping[str, Grammar]
    marks: tuple[str, ...] = ()
    at_start: bool = False

    @property
    def control_texts(self) -> frozenset[str]:
        """Every mark that the emitter must see, control token or not."""
        return frozenset((*self.blocks, *self.marks))


# ---- JSON objects with a name and arguments -------------------------------------------------------------------------


def _call(scan: Scan, sink: Sink, only: Offered | None = None) -> Steps[None]:
    """`{"name": …, "arguments": {…}}` in any order, also in a "function".  `only`: it is a call by its name alone, and
    anything else is told as early as can be."""
    scan.take()
    name, kept, first = "", "", True
    while True:
        c = yield from scan.need(blanks=True)
        if c == "}" or (c == "," and not first):
            if scan.take() == "}":
                break
            c = yield from scan.need(blanks=True)
            if c == "}":
                continue
        if c != '"':
            raise Malformed
        key = json.loads((yield from collect(partial(json_string, scan))))
        if only is not None and key not in ("name", "type", "function", *_ARGUMENTS):
            raise Malformed
        if (yield from scan.need(blanks=True)) != ":":
            raise Malformed
        scan.take()
        c = yield from scan.need(blanks=True)
        if key in ("name", "function") and c == '"' and not name:
            name = yield from _name(scan, only)
        elif key in _ARGUMENTS and name and c == "{" and not sink.open and not kept:
            sink.begin(name)
            yield from json_value(scan, sink.arguments)
        else:
            text = yield from collect(partial(json_value, scan))
            if key == "function" and c == "{":
                name, kept = _inner(text)
            elif key in _ARGUMENTS:
                kept = text
        first = False
    _finish(sink, name, kept)


def _finish(sink: Sink, name: str, kept: str) -> None:
    if not sink.open:
        if not name:
            raise Malformed
        sink.begin(name)
        sink.arguments(_argument_text(kept))
    sink.end()


def _name(scan: Scan, only: Offered | None) -> Steps[str]:
    pieces: list[str] = []
    longest = max(map(len, only), default=0) if only is not None else 0

    def take(text: str) -> None:
        pieces.append(text)
        if only is not None and sum(map(len, pieces)) > 6 * longest + 2:
            raise Malformed

    yield from json_string(scan, take)
    name = str(json.loads("".join(pieces)))
    if not name or (only is not None and name not in only):
        raise Malformed
    return name


def _inner(text: str) -> tuple[str, str]:
    """Name and arguments of {"function": {…}}."""
    inner = json.loads(text)
    name = inner.get("name")
    found = [inner[key] for key in _ARGUMENTS if key in inner]
    if not isinstance(name, str):
        raise Malformed
    return name, json.dumps(found[0], ensure_ascii=False) if found else ""


def _argument_text(text: str) -> str:
    """Arguments that were read whole: none and null are {}, a string holds JSON text."""
    if text in ("", "null"):
        return "{}"
    return (str(json.loads(text)) or "{}") if text[0] == '"' else text


def _objects(scan: Scan, sink: Sink, only: Offered | None = None) -> Steps[None]:
    """Calls in a list, or one behind the other with `;`, `,` or blanks between; the first is still to come."""
    c = yield from scan.need(blanks=True)
    listed = c == "["
    if listed:
        scan.take()
        c = yield from scan.need(blanks=True)
    while True:
        if c != "{":
            raise Malformed
        yield from _call(scan, sink, only)
        scan.commit()
        while (c := (yield from scan.blanks())) and c in ",;":
            scan.take()
        if c == "{":
            continue
        if listed and c == "]":
            scan.take()
        return


# ---- blocks ---------------------------------------------------------------------------------------------------------


def _tagged(opening: str, closing: str, scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    """JSON between tags; Qwen3-Coder puts its own tags there."""
    scan.take(len(opening))
    scan.closing = (closing,)
    yield from scan.need(blanks=True)
    while (yield from scan.which("<function=")):
        yield from function(scan, sink, offered)
        scan.commit()
        yield from scan.blanks()
        if not (yield from scan.which("<function=")):
            break
    else:
        yield from _objects(scan, sink)
        # one brace too many is a slip of the model
        while (c := (yield from scan.blanks())) and c in "]}":
            scan.take()
    yield from _close(scan, sink, opening, closing)


def _close(scan: Scan, sink: Sink, opening: str, closing: str) -> Steps[None]:
    """Take the closing mark; what stands before it is content."""
    yield from scan.blanks()
    scan.commit()
    found = yield from scan.until((closing, opening), sink.content)
    if found == closing:
        scan.take(len(closing))


def bare_json(scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    """An answer that begins with `{`: only the name of a tool makes it a call."""
    yield from _objects(scan, sink, offered)


def _python_tag(scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    scan.take(len("<|python_tag|>"))
    if (yield from scan.need(blanks=True)) in "{[":
        return (yield from _objects(scan, sink))
    tool = next((name for name in _PYTHON_TOOLS if name in offered), None)
    head = yield from scan.which(*(f"{name}{call}" for name in offered for call in ("(", ".call(")))
    if tool is None and not head:
        raise Malformed
    if tool is not None and not head:
        sink.begin(tool)
        sink.arguments(f'{{"{code_key(offered[tool])}": "')
        while (yield from scan.peek()):
            sink.arguments(escaped(scan.take(len(scan.rest))))
        if not scan.cut:
            sink.arguments('"}')
        return sink.end()
    yield from _python_calls(scan, sink, offered, "")


def _python_calls(scan: Scan, sink: Sink, offered: Offered, closing: str) -> Steps[None]:
    """`name(key=value)` or `name.call(…)`, one a line."""
    pieces: list[str] = []
    found = yield from scan.until((closing,) if closing else (), pieces.append)
    calls = python_call("".join(pieces), offered)
    if not calls:
        raise Malformed
    for name, arguments in calls:
        sink.begin(name)
        sink.arguments(arguments)
        sink.end()
    scan.take(len(found))


def _tool_code(scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    scan.take(len("```tool_code"))
    yield from _python_calls(scan, sink, offered, _FENCE)


def _mistral(scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    scan.take(len("[TOOL_CALLS]"))
    if (yield from scan.need(blanks=True)) in "[{":
        return (yield from _objects(scan, sink))
    name = yield from scan.word(_NAME)
    yield from scan.blanks()
    if (yield from scan.which("[CALL_ID]")):
        scan.take(len("[CALL_ID]"))
        yield from scan.word(_NAME)
    if (yield from scan.which("[ARGS]")):
        scan.take(len("[ARGS]"))
    if not name or (yield from scan.need(blanks=True)) != "{":
        raise Malformed
    sink.begin(name)
    yield from json_value(scan, sink.arguments)
    sink.end()


def _functools(scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    scan.take(len("functools"))
    yield from _objects(scan, sink)


def _gemma(scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    scan.take(len("<|tool_call>"))
    scan.closing = ("<tool_call|>",)
    yield from scan.need(blanks=True)
    if not (yield from scan.which("call:")):
        raise Malformed
    scan.take(len("call:"))
    name = yield from scan.word(_NAME)
    if not name or (yield from scan.need(blanks=True)) != "{":
        raise Malformed
    sink.begin(name)
    yield from json_value(scan, sink.arguments, _GEMMA_QUOTE)
    sink.end()
    yield from _close(scan, sink, "<|tool_call>", "<tool_call|>")


_DS_CALLS, _DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_SEP, _DS_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek(scan: Scan, sink: Sink, offered: Offered) -> Steps[None]:
    if (yield from scan.which(_DS_CALLS)):
        scan.take(len(_DS_CALLS))
    scan.closing = (_DS_CALL_END,)
    made = False
    while True:
        c = yield from scan.blanks()
        found = yield from scan.which(_DS_CALL, _DS_END)
        if found != _DS_CALL:
            if not made:
                raise Malformed if c else Ended
            scan.take(len(found))
            return
        scan.take(len(found))
        if not (yield from scan.until((_DS_SEP,), lambda text: None)):
            raise Ended
        scan.take(len(_DS_SEP))
        name = (yield from scan.word(_LINE)).strip()
        yield from scan.blanks()
        if (yield from scan.which("```json")):
            scan.take(len("```json"))
        if not name or (yield from scan.need(blanks=True)) != "{":
            raise Malformed
        sink.begin(name)
        yield from json_value(scan, sink.arguments)
        sink.end()
        yield from scan.blanks()
        if (yield from scan.which(_FENCE)):
            scan.take(len(_FENCE))
            yield from scan.blanks()
        if (yield from scan.which(_DS_CALL_END)):
            scan.take(len(_DS_CALL_END))
        scan.commit()
        made = True


_COMMON: dict[str, Grammar] = {
    "<tool_call>": partial(_tagged, "<tool_call>", "</tool_call>"),
    "<function=": bare_function,
    "[TOOL_CALLS]": _mistral,
}
#: Hermes and Qwen, Qwen3-Coder with and without its wrapper, Mistral: what models write without being taught.
COMMON_TOOLS = ToolFormat(_COMMON, ("</tool_call>", "</function>", "[ARGS]", "[CALL_ID]"))
LLAMA3_TOOLS = ToolFormat({"<|python_tag|>": _python_tag, **_COMMON}, COMMON_TOOLS.marks, at_start=True)
PHI_TOOLS = ToolFormat(
    {"<|tool_call|>": partial(_tagged, "<|tool_call|>", "<|/tool_call|>"), "functools[": _functools, **_COMMON},
    ("<|/tool_call|>", *COMMON_TOOLS.marks),
)
GEMMA_TOOLS = ToolFormat(
    {"<|tool_call>": _gemma, "```tool_code": _tool_code, **_COMMON},
    ("<tool_call|>", _GEMMA_QUOTE, *COMMON_TOOLS.marks),
)
DEEPSEEK_TOOLS = ToolFormat(
    {_DS_CALLS: _deepseek, _DS_CALL: _deepseek, **_COMMON}, (_DS_END, _DS_SEP, _DS_CALL_END, *COMMON_TOOLS.marks)
)
_FORMATS = {"llama3": LLAMA3_TOOLS, "phi": PHI_TOOLS, "gemma": GEMMA_TOOLS, "deepseek": DEEPSEEK_TOOLS}


def tool_format(template_source: str) -> ToolFormat:
    """How the model of a chat template writes calls; Gemma's older ones are not told, and have a way of their own."""
    if "<start_of_turn>" in template_source:
        return GEMMA_TOOLS
    return _FORMATS.get(tool_syntax(template_source), COMMON_TOOLS)
