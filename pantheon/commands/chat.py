"""`pantheon chat`: a conversation in the terminal.  [M124]"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pantheon.commands import common
from pantheon.commands.streaming import StopKey, stream_answer
from pantheon.errors import PantheonError

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model
    from pantheon.engine.sampler import SamplingParams

HELP = """\
/reset         forget the conversation (the system message stays)
/system TEXT   set the system message; without a text, remove it
/help          this list
/quit          leave (so do Ctrl-D, and Ctrl-C at the prompt)
Ctrl-C stops an answer."""


def add_parser(subparsers: Any) -> None:
    """`pantheon chat [MODEL] …`."""
    parser = subparsers.add_parser(
        "chat",
        usage="pantheon chat [MODEL] [flags]",
        help="talk to a model in the terminal",
        description="Talk to a model. Lines from a pipe are answered one by one. In the conversation:\n\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common.add_model_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    common.add_sampling_flags(parser, None)


@dataclass
class Conversation:
    """The messages so far, and what a line of input does to them.  Pure: prints and generates nothing."""

    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        """System message and turns, as a chat template wants them."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def command(self, line: str) -> str | None:
        """What a `/command` line answers; None when the line is meant for the model.  `/quit` is the caller's."""
        match = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", line)
        if not match:
            return None
        name, rest = match[1], (match[2] or "").strip()
        if name == "system":
            self.system = rest or None
            return "system message set" if rest else "system message removed"
        if name == "reset":
            self.turns.clear()
            return "conversation forgotten"
        return HELP if name == "help" else f"no command /{name}; /help lists them"


def run(args: argparse.Namespace) -> int:
    """Load, then read and answer lines until /quit or the end of the input."""
    params = common.sampling(args)
    path = common.pick_model(args.words)
    with common.load(args, path) as model:
        if sys.stdin.isatty():
            common.note(f"{model.name}, {model.n_ctx} tokens of context. /help lists the commands.")
            _with_line_editing()
            # a parent may have had Ctrl-C ignored (a shell does for jobs in the background); a person means it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        state = model.new_state()
        conversation = Conversation(args.system)
        while (line := _read_line()) is not None:
            if line in ("/quit", "/exit"):
                break
            reply = conversation.command(line)
            if reply is not None:
                common.note(reply)
            elif line:
                _turn(model, state, conversation, line, params, args.max_tokens)
    return 0


def _with_line_editing() -> None:
    """`input` uses readline once it is imported; some platforms have none."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401


def _read_line() -> str | None:
    """The next line, stripped; None at the end of the input."""
    if sys.stdin.isatty():
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None


def _turn(
    model: Model,
    state: RunnerState,
    conversation: Conversation,
    line: str,
    params: SamplingParams,
    max_tokens: int | None,
) -> None:
    """Answer one line.  A turn that is refused (context full, template) leaves the conversation as it was."""
    conversation.turns.append({"role": "user", "content": line})
    try:
        with StopKey() as key:
            prompt = model.prompt(conversation.messages())
            answer = stream_answer(model, state, prompt.ids, params, max_tokens, common.write, lambda: key.pressed)
    except PantheonError as fault:
        conversation.turns.pop()
        hint = " /reset starts over." if fault.code == "context_length_exceeded" else ""
        common.say_error(fault.message + hint)
        return
    if not answer.text.endswith("\n"):
        common.write("\n")
    conversation.turns.append({"role": "assistant", "content": answer.text})
    common.note(answer.summary())
