"""Agents' turns at token level: what templates make of answers that come back in other words [X12, M125, M129].

The templates write what Qwen's and Hermes' families write: thoughts only behind the last question, or none at all;
calls as JSON in <tool_call>; an answer that is opened with <think>.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from pantheon.engine.generate import checkpoints
from pantheon.engine.slot_table import Seat, SlotTable
from pantheon.serve.placement import marks_of_chat
from pantheon.text.chat_template import ChatTemplate
from pantheon.text.messages import normalise
from pantheon.text.prompt import build_prompt
from pantheon.text.tokenizer import load_tokenizer
from tests.text.tok_vocab import bpe

TOKENS = load_tokenizer(bpe(control=("<|endoftext|>", "<|im_start|>", "<|im_end|>")))

_CALLS = (
    "{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}"
    "{{- c.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"
)
_REST = (
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content }}"
    "{{- '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{{- OPENING }}{%- endif %}"
)
#: thoughts stay behind the last question only, as in Qwen3
THINKING = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    "{%- endif %}{{- m.content }}" + _CALLS + "{{- '<|im_end|>\n' }}"
) + _REST
TEMPLATES = {
    "qwen3": THINKING.replace("{{- OPENING }}", ""),
    # QwQ, Qwen3.5, R1: the answer begins inside a thought
    "opened": THINKING.replace("{{- OPENING }}", "{{- '<think>\n' }}"),
    "hermes": (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' + m.content }}"
        + _CALLS + "{{- '<|im_end|>\n' }}" + _REST
    ).replace("{{- OPENING }}", ""),
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "You are an agent. " * 20}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(n: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{n}", "content": f"line {n}\n" * 10}


def called(n: int, thought: str | None = None) -> dict[str, Any]:
    """A call as the client gives it back: parsed and written anew, its thought dropped or kept."""
    call = {"id": f"c{n}", "type": "function", "function": {"name": "read", "arguments": f'{{"path":"{n}.py"}}'}}
    kept = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": None, **kept, "tool_calls": [call]}


class Turn(NamedTuple):
    seat: Seat
    prompt: int
    shared: int


class Talk:
    """Requests through a template and a slot table; answers are the model's own words."""

    def __init__(self, family: str, n_slots: int = 4, **options: Any) -> None:
        self.template = ChatTemplate(TEMPLATES[family])
        self.saved: dict[int, tuple[int, ...]] = {}
        if options.pop("recurrent", False):
            options["points"] = lambda slot: self.saved.get(slot, ())
        self.recurrent = "points" in options
        self.table = SlotTable(n_slots, **options)
        self.held: list[int] = []

    def ask(self, messages: list[dict[str, Any]], answer: str, tools: Any = (TOOL,)) -> Turn:
        ready = normalise(messages, self.template, list(tools))
        ids = build_prompt(TOKENS, self.template, ready, list(tools)).ids
        seat = self.table.choose(ids, None, marks_of_chat(messages, tools))
        if self.recurrent:
            kept = [n for n in self.saved.get(seat.slot, ()) if n <= seat.reused]
            self.saved[seat.slot] = tuple(sorted({*kept, *checkpoints(ids, TOKENS.eog_ids)}))
        both = min(len(ids), len(self.held))
        shared = next((i for i in range(both) if ids[i] != self.held[i]), both)
        self.held = [*ids, *TOKENS.encode(answer, parse_special=True)]
        self.table.commit(seat.slot, self.held)
        self.table.check_integrity()
        return Turn(seat, len(ids), shared)


def agent(talk: Talk, turns: int = 4, keep_thoughts: bool = False) -> list[Turn]:
    """One question, then calls; the model thinks before each, and writes its JSON as it likes."""
    messages, found = [SYSTEM, user("Fix it.")], []
    for n in range(turns):
        call = f'{{ "name":"read","arguments":{{"path": "{n}.py"}} }}'
        found.append(talk.ask(messages, f"<think>\nstep {n}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"))
        messages = [*messages, called(n, f"step {n}" if keep_thoughts else None), result(n)]
    return found


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", TEMPLATES)
def test_an_agents_turns_reuse_up_to_where_they_differ_X12(family: str, keep: bool) -> None:
    found = agent(Talk(family), keep_thoughts=keep)
    for before, now in pairwise(found):
        assert now.seat.slot == before.seat.slot and now.seat.source is None
        assert now.seat.reused == now.shared
        # all of the last prompt, but for a thought that its end opened
        assert now.seat.reused >= before.prompt - (len(TOKENS.encode("<think>\n")) if family == "opened" else 0)
    # a thought that comes back is reused too, up to the call that was written anew
    if keep and family == "qwen3":
        assert all(now.shared > before.prompt + 5 for before, now in pairwise(found))


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_new_question_drops_old_thoughts_and_keeps_what_stands_before_them_X12(family: str) -> None:
    """The template takes the thoughts of the last question out of the middle of the prompt: the same conversation."""
    talk = Talk(family)
    messages = [SYSTEM, user("Fix it.")]
    first = talk.ask(messages, "<think>\nhm\n</think>\n\n")
    for n in range(3):
        messages = [*messages, called(n, f"step {n}"), result(n)]
        talk.ask(messages, "Done.")
    messages = [*messages, {"role": "assistant", "content": "Done."}, user("And now?")]
    turn = talk.ask(messages, "No.")
    assert turn.seat == (first.seat.slot, turn.shared, None, ())
    assert turn.seat.reused >= first.prompt - len(TOKENS.encode("<think>\n"))


def test_a_title_request_in_between_does_not_push_the_conversation_out() -> None:
    """Harnesses ask for titles and summaries under the same id, with other system turns."""
    talk = Talk("hermes", 8, max_idle=0, spare=16_000)
    messages = [SYSTEM, user("Fix it.")]
    first = talk.ask(messages, "Yes.")
    for n in range(12):
        side = talk.ask([{"role": "system", "content": f"Write title {n}."}, user("Fix it.")], "Title", tools=())
        assert side.seat.slot != first.seat.slot
    messages = [*messages, {"role": "assistant", "content": "Yes."}, user("Go on.")]
    assert talk.ask(messages, "No.").seat.reused >= first.prompt


def test_branches_stay_beside_each_other() -> None:
    """An early message is edited, and the first version gone on with again."""
    talk = Talk("qwen3")
    old = [SYSTEM, user("Fix it. " * 5), {"role": "assistant", "content": "Yes. " * 30}, user("Go on.")]
    new = [SYSTEM, user("Leave it. " * 5)]
    first = talk.ask(old, "Old. " * 30)
    branch = talk.ask(new, "New. " * 30)
    assert branch.seat.source == first.seat.slot and branch.seat.reused == branch.shared
    more = [{"role": "assistant", "content": "Old. " * 30}, user("More.")]
    assert talk.ask([*old, *more], "x").seat.reused > first.prompt
    more = [{"role": "assistant", "content": "New. " * 30}, user("More.")]
    assert talk.ask([*new, *more], "x").seat.reused > branch.prompt


# ---- states that can be taken back to checkpoints only --------------------------------------------------------------


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_recurrent_state_goes_on_from_the_last_whole_message_X12(family: str) -> None:
    found = agent(Talk(family, recurrent=True))
    opening = len(TOKENS.encode("\n<|im_start|>assistant\n<think>\n", parse_special=True))
    for before, now in pairwise(found):
        assert now.seat.reused <= now.shared and now.seat.slot == before.seat.slot
        assert now.seat.reused >= before.prompt - opening


def test_only_a_checkpoint_that_is_whole_in_the_prompt_is_used() -> None:
    points = {0: (4, 9)}
    table = SlotTable(3, points=lambda slot: points.get(slot, ()))
    table.commit(table.choose(list(range(10))).slot, list(range(13)))
    for ids, reused in (
        ([*range(8), 77], 4),
        ([*range(3), 77], 0),
        ([*range(9), 77], 9),
    ):
        seat = table.choose(ids)
        assert seat.reused == reused and seat.source == (0 if reused else None)
        table.commit(seat.slot, [])
    # where it stands it goes on without being taken back, and the same question again takes the one before its end
    assert table.choose([*range(13), 77]) == Seat(0, 13, None, ())
    table.commit(0, list(range(13)))
    assert table.choose(list(range(13))).reused == 9
    table.commit(0, list(range(13)))
    assert table.choose([*range(11), 77]).reused == 9


def test_checkpoints_are_the_last_whole_message_and_all_but_the_last_token() -> None:
    assert checkpoints([1, 9, 2, 3, 9, 5, 6], {9}) == (5, 6)
    assert checkpoints([1, 2, 3], {9}) == (2,)
    assert checkpoints([1, 2, 9], {9}) == (2,)
    assert checkpoints([9, 2], {9}) == (1,) and checkpoints([1], {9}) == ()
