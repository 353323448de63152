"""The emitter: splits generated text into three channels, reasoning, content and tool, and ends at stop strings.

Pure: text in, events out; no tokens, no sockets, no JSON.  However the text is cut into pieces, each channel's joined
text is the same.  What could still turn out to begin a marker or a stop string is carried over; everything else goes
out at once.

Rules
- `<think>` opens reasoning at the very start of an answer (white space aside) and nowhere else: later it is text that
  somebody quotes.  `</think>` closes it; one that closes nothing is dropped.  White space around the reasoning belongs
  to neither channel.
- A tool block goes out whole, with its markers, when it closes or when the answer ends: tool_calls parses it, and what
  does not parse can be shown as content without loss.  White space behind a block is dropped.
- Stop strings are looked for in content only.  The stop that is complete first wins; of two that end together, the
  longer.  Nothing of it goes out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Channel = Literal["reasoning", "content", "tool"]

THINK, END_THINK = "<think>", "</think>"

_JSON_BLOCK = re.compile(r"<[^<>]*>\s*[\[{]")
_ESCAPE = re.compile(r"\\.", re.DOTALL)


class Event(NamedTuple):
    """A piece of text of one channel; never empty."""

    channel: Channel
    text: str


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls: `blocks` are (opening, closing) markers, closing None = to the end of the answer;
    `json_at_start`: an answer that begins with `{` is a call."""

    blocks: tuple[tuple[str, str | None], ...]
    json_at_start: bool = False


#: Hermes and Qwen (`<tool_call>`), Qwen3-Coder without its wrapper, Mistral.
COMMON_TOOLS = ToolFormat((("<tool_call>", "</tool_call>"), ("<function=", "</function>"), ("[TOOL_CALLS]", None)))
#: Llama 3: bare JSON, or behind the python tag.
LLAMA3_TOOLS = ToolFormat((("<|python_tag|>", None), *COMMON_TOOLS.blocks), json_at_start=True)


class _Match(NamedTuple):
    start: int
    end: int
    pattern: str


class Emitter:
    """One answer.  `feed` text as it comes, `finish` once; `stopped` is the stop string that ended it."""

    def __init__(
        self,
        stop: Sequence[str] = (),
        *,
        starts_in_reasoning: bool = False,
        parse_reasoning: bool = True,
        tools: ToolFormat | None = None,
    ) -> None:
        self._stops = tuple(dict.fromkeys(stop))
        self._blocks = dict(tools.blocks) if tools else {}
        self._json_at_start = tools is not None and tools.json_at_start
        self._markers = (*self._blocks, *((END_THINK,) if parse_reasoning else ()))
        self._ends = (*self._stops, *self._markers)
        # the characters that one of them begins with: text without these goes through unread
        self._suspect = re.compile("[" + "".join(re.escape(end[0]) for end in self._ends) + "]") if self._ends else None
        self._parse_reasoning = parse_reasoning
        self._carry = ""
        self._closing: str | None = None
        self._step = self._start
        if parse_reasoning and starts_in_reasoning:
            self._step = self._open_reasoning
        self._events: list[Event] = []
        self.stopped: str | None = None

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the answer; returns what is certain by now."""
        if self.stopped is not None:
            return []
        self._carry += text
        while self._step(False):
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """The answer is over: everything that was held back comes out."""
        if self.stopped is None:
            while self._step(True):
                pass
        self._carry = ""
        return self._take()

    # A step handles one stretch of the carry and returns True when another step may follow at once.

    def _start(self, last: bool) -> bool:
        """Nothing but white space so far: reasoning or a bare JSON call may still open."""
        lead = self._carry.lstrip()
        begins_json = self._json_at_start and lead.startswith("{")
        opening = "{" if begins_json else THINK if self._parse_reasoning else ""
        open_end = len(self._carry) - len(lead) + len(opening)
        if _first(self._carry[:open_end], self._stops) is None:
            if lead == "" and not last:
                return False
            if begins_json:
                self._carry, self._closing = lead, None
                return self._go(self._tool)
            if opening and lead.startswith(opening):
                self._carry = lead[len(opening) :]
                return self._go(self._open_reasoning)
            if opening.startswith(lead) and not last:
                return False
        return self._go(self._content)

    def _open_reasoning(self, last: bool) -> bool:
        """White space before the first thought is dropped; a template and a model may both write the tag."""
        self._carry = self._carry.lstrip()
        if self._carry.startswith(THINK):
            self._carry = self._carry[len(THINK) :]
            return True
        if self._carry == "" or (THINK.startswith(self._carry) and not last):
            return False
        return self._go(self._reasoning)

    def _reasoning(self, last: bool) -> bool:
        found = _first(self._carry, (END_THINK,))
        if found is not None:
            self._emit("reasoning", self._carry[: found.start].rstrip())
            self._carry = self._carry[found.end :]
            return self._go(self._between)
        ready = len(self._carry) if last else len(self._carry) - _held(self._carry, (END_THINK,))
        ready = len(self._carry[:ready].rstrip())
        self._emit("reasoning", self._carry[:ready])
        self._carry = self._carry[ready:]
        return False

    def _between(self, last: bool) -> bool:
        """Behind reasoning or a tool block: white space is not content."""
        self._carry = self._carry.lstrip()
        return self._carry != "" and self._go(self._content)

    def _content(self, last: bool) -> bool:
        if self._suspect is None or self._suspect.search(self._carry) is None:
            self._emit("content", self._carry)
            self._carry = ""
            return False
        found = _first(self._carry, self._ends)
        if found is None:
            ready = len(self._carry) if last else len(self._carry) - _held(self._carry, self._ends)
            self._emit("content", self._carry[:ready])
            self._carry = self._carry[ready:]
            return False
        self._emit("content", self._carry[: found.start])
        if found.pattern in self._stops:
            self.stopped, self._carry = found.pattern, ""
            return False
        if found.pattern == END_THINK:
            self._carry = self._carry[found.end :]
            return True
        self._carry, self._closing = self._carry[found.start :], self._blocks[found.pattern]
        return self._go(self._tool)

    def _tool(self, last: bool) -> bool:
        end = self._block_end(last)
        if end >= 0:
            self._emit("tool", self._carry[:end])
            self._carry = self._carry[end:]
            return self._go(self._between)
        if last:
            self._emit("tool", self._carry)
            self._carry = ""
        return False

    def _block_end(self, last: bool) -> int:
        """Just behind the closing marker, or -1.  One inside a JSON string is text of an argument, unless the answer
        ends and no other one follows."""
        if self._closing is None:
            return -1
        first = at = self._carry.find(self._closing)
        while at >= 0 and _inside_json_string(self._carry[:at]):
            at = self._carry.find(self._closing, at + 1)
        if at < 0 and last:
            at = first
        return -1 if at < 0 else at + len(self._closing)

    def _go(self, step: object) -> bool:
        self._step = step  # type: ignore[assignment]
        return True

    def _emit(self, channel: Channel, text: str) -> None:
        if not text:
            return
        if channel != "tool" and self._events and self._events[-1].channel == channel:
            text = self._events.pop().text + text
        self._events.append(Event(channel, text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _inside_json_string(block: str) -> bool:
    """Whether a block that holds JSON stands inside one of its strings."""
    return _JSON_BLOCK.match(block) is not None and _ESCAPE.sub("", block).count('"') % 2 == 1


def _first(text: str, patterns: Sequence[str]) -> _Match | None:
    """The pattern that is complete first; of those that end together the longest."""
    found = [_Match(at, at + len(p), p) for p in patterns if (at := text.find(p)) >= 0]
    return min(found, key=lambda m: (m.end, m.start), default=None)


def _held(text: str, patterns: Sequence[str]) -> int:
    """The length of the longest suffix of text that a pattern begins with."""
    longest = min(len(text), max((len(p) - 1 for p in patterns), default=0))
    for size in range(longest, 0, -1):
        if any(p.startswith(text[-size:]) for p in patterns if len(p) > size):
            return size
    return 0
