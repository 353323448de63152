"""`pantheon generate`: one answer, streamed to stdout or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheon.commands import common
from pantheon.commands.streaming import StopKey, stream_answer

if TYPE_CHECKING:
    from pantheon.engine.model import Model


def add_parser(subparsers: Any) -> None:
    """`pantheon generate [MODEL] [PROMPT] …`."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a text, or answer one message",
        description="Continue PROMPT, or answer it as a chat message with --chat. Without a PROMPT, stdin is read.",
        usage="pantheon generate [MODEL] [PROMPT] [--chat [MESSAGE]] [flags]",
    )
    common.add_model_flags(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue, when it must not be taken for a file")
    parser.add_argument("--chat", nargs="?", const=True, metavar="MESSAGE", help="answer through the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    common.add_sampling_flags(parser, 256)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    """Load, generate, print."""
    params = common.sampling(args)
    model_words, text = split_words(args)
    path = common.pick_model(model_words)
    with common.load(args, path) as model, StopKey() as key:
        if text is None:
            text = _read_stdin()
        ids = _chat_ids(model, args.system, text) if args.chat is not None else model.tokenize(text)
        emit = (lambda piece: None) if args.json else common.write
        answer = stream_answer(model, model.new_state(), ids, params, args.max_tokens, emit, lambda: key.pressed)
        if args.json:
            report = {
                "model": model.name,
                "text": answer.text,
                "tokens": answer.ids,
                "finish_reason": answer.finish,
                "prompt_tokens": answer.n_prompt,
                "completion_tokens": len(answer.ids),
                "prompt_s": round(answer.prompt_s, 4),
                "tokens_per_s": round(answer.tokens_per_s, 2),
            }
            print(json.dumps(report, ensure_ascii=False))
        else:
            common.write("" if answer.text.endswith("\n") else "\n")
            common.note(answer.summary())
    return 130 if key.pressed else 0


def split_words(args: argparse.Namespace) -> tuple[list[str], str | None]:
    """(words that name the model, the prompt or None).  A lone word is the model when it looks like a file."""
    words = list(args.words)
    flags = [value for value in (args.prompt, args.chat) if isinstance(value, str)]
    if len(words) > 2 or len(flags) > 1 or (len(words) == 2 and flags):
        raise common.UsageError("expected one model and one prompt")
    if flags:
        return words, flags[0]
    if len(words) == 2:
        return words[:1], words[1]
    if words and not _looks_like_model(words[0]):
        return [], words[0]
    return words, None


def _read_stdin() -> str:
    if sys.stdin.isatty():
        common.note("reading the prompt from here; end it with Ctrl-D")
    return sys.stdin.read()


def _looks_like_model(word: str) -> bool:
    return word.startswith("script:") or word.endswith(".gguf") or (len(word) < 4096 and Path(word).is_file())


def _chat_ids(model: Model, system: str | None, text: str) -> list[int]:
    head = [{"role": "system", "content": system}] if system else []
    return model.prompt([*head, {"role": "user", "content": text}]).ids
