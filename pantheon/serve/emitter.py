"""The emitter: splits generated text into three channels, reasoning, content and calls, and ends at stop strings.

Pure: text in, events out; no tokens, no sockets.  However the text is cut into pieces, each channel's joined text is
the same.  What could still turn out to begin a marker or a stop string is carried over; everything else goes out at
once.

Rules
- The opening tag of reasoning counts at the very start of an answer (white space aside) and nowhere else: later it is
  text that somebody quotes.  The closing tag closes it; one that closes nothing is dropped.  White space around the
  reasoning belongs to neither channel.
- A tool block is read by the grammar of its format (call_formats): its calls go out piece by piece, and what is no call
  is content, markers and all.  White space behind a block is dropped.
- Stop strings are looked for in content only.  The stop that is complete first wins; of two that end together, the
  longer.  Nothing of it goes out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pantheon.serve.call_block import Block
from pantheon.serve.call_formats import ToolFormat, bare_json
from pantheon.serve.scan import Match, first, held

Channel = Literal["reasoning", "content", "call"]

THINK, END_THINK = "<think>", "</think>"
#: how most models mark their reasoning, and how others do: a text of the chat template -> opening and closing tag
THOUGHT = (THINK, END_THINK)
_OTHER_THOUGHTS = {
    "<|channel>": ("<|channel>thought\n", "<channel|>"),
    "[THINK]": ("[THINK]", "[/THINK]"),
}


def thought_tags(template_source: str) -> tuple[str, str]:
    """The tags of a model's reasoning, by its chat template."""
    return next((tags for mark, tags in _OTHER_THOUGHTS.items() if mark in template_source), THOUGHT)


class Event(NamedTuple):
    """A piece of text of one channel.  A call begins with an event that has its `name`; only that one may be empty."""

    channel: Channel
    text: str
    name: str = ""


class Emitter:
    """One answer.  `feed` text as it comes, `finish` once; `stopped` is the stop string that ended it."""

    def __init__(
        self,
        stop: Sequence[str] = (),
        *,
        starts_in_reasoning: bool = False,
        parse_reasoning: bool = True,
        thought: tuple[str, str] = THOUGHT,
        tools: ToolFormat | None = None,
        offered: Mapping[str, Any] | None = None,
    ) -> None:
        """`tools`: how calls are written, None when they are text; `offered`: name -> schema of the arguments."""
        self._stops = tuple(dict.fromkeys(stop))
        self._blocks = dict(tools.blocks) if tools else {}
        self._offered = offered or {}
        self._json_at_start = tools is not None and tools.at_start
        self._think, self._end_think = thought
        self._markers = (*self._blocks, *((self._end_think,) if parse_reasoning else ()))
        self._ends = (*self._stops, *self._markers)
        # the characters that one of them begins with: text without these goes through unread
        self._suspect = re.compile("[" + "".join(re.escape(end[0]) for end in self._ends) + "]") if self._ends else None
        self._parse_reasoning = parse_reasoning
        self._carry = ""
        self._block: Block | None = None
        self._cut = False
        # the carry begins with the marker of a block that was none
        self._spilled = False
        self._step = self._start
        if parse_reasoning and starts_in_reasoning:
            self._step = self._open_reasoning
        self._events: list[Event] = []
        self._calls = 0
        self.stopped: str | None = None

    @property
    def calls(self) -> int:
        """How many calls are complete."""
        return self._calls + (self._block.calls if self._block is not None else 0)

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the answer; returns what is certain by now."""
        if self.stopped is not None:
            return []
        self._carry += text
        while self._step(False):
            pass
        return self._take()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The answer is over: everything that was held back comes out.  `cut`: a cap ended it, not the model."""
        self._cut = cut
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
        opening = "{" if begins_json else self._think if self._parse_reasoning else ""
        open_end = len(self._carry) - len(lead) + len(opening)
        if first(self._carry[:open_end], self._stops) is None:
            if lead == "" and not last:
                return False
            if begins_json:
                return self._open_block(Block(bare_json, self._offered, self._emit))
            if opening and lead.startswith(opening):
                self._carry = lead[len(opening) :]
                return self._go(self._open_reasoning)
            if opening.startswith(lead) and not last:
                return False
        return self._go(self._content)

    def _open_reasoning(self, last: bool) -> bool:
        """White space before the first thought is dropped; a template and a model may both write the tag."""
        self._carry = self._carry.lstrip()
        if self._carry.startswith(self._think):
            self._carry = self._carry[len(self._think) :]
            return True
        if self._carry == "" or (self._think.startswith(self._carry) and not last):
            return False
        return self._go(self._reasoning)

    def _reasoning(self, last: bool) -> bool:
        found = first(self._carry, (self._end_think,))
        if found is not None:
            self._emit("reasoning", self._carry[: found.start].rstrip())
            self._carry = self._carry[found.end :]
            return self._go(self._between)
        ready = len(self._carry) if last else len(self._carry) - held(self._carry, (self._end_think,))
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
            self._carry, self._spilled = "", False
            return False
        found = self._first_end()
        if found is None:
            ready = len(self._carry) if last else len(self._carry) - held(self._carry, self._ends)
            self._emit("content", self._carry[:ready])
            self._carry = self._carry[ready:]
            self._spilled = self._spilled and ready == 0
            return False
        self._emit("content", self._carry[: found.start])
        self._spilled = False
        if found.pattern in self._stops:
            self.stopped, self._carry = found.pattern, ""
            return False
        if found.pattern == self._end_think:
            self._carry = self._carry[found.end :]
            return True
        self._carry = self._carry[found.start :]
        return self._open_block(Block(self._blocks[found.pattern], self._offered, self._emit))

    def _first_end(self) -> Match | None:
        if not self._spilled:
            return first(self._carry, self._ends)
        found = [first(self._carry, self._stops)]
        if (later := first(self._carry[1:], self._markers)) is not None:
            found.append(Match(later.start + 1, later.end + 1, later.pattern))
        return min((match for match in found if match is not None), key=lambda m: (m.end, m.start), default=None)

    def _open_block(self, block: Block) -> bool:
        self._block = block
        return self._go(self._tool)

    def _tool(self, last: bool) -> bool:
        block, text = self._block, self._carry
        assert block is not None
        self._carry = ""
        if not block.feed(text, last, self._cut):
            return False
        self._carry, self._block = block.rest, None
        self._calls += block.calls
        self._spilled = block.spilled
        return self._go(self._content if block.spilled else self._between)

    def _go(self, step: object) -> bool:
        self._step = step  # type: ignore[assignment]
        return True

    def _emit(self, channel: Channel, text: str, name: str = "") -> None:
        if not text and not name:
            return
        if not name and self._events and (before := self._events[-1]).channel == channel:
            self._events[-1] = Event(channel, before.text + text, before.name)
        else:
            self._events.append(Event(channel, text, name))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events
