"""Pantheon: a memory-aware, multi-model inference engine and OpenAI-compatible server.

A model is a plan; a die runs plans; a server admits, schedules and streams.

Floors (a file imports only from lower ones; tools/check_layers.py holds it)

    7  cli, __main__, commands/
    6  serve/     HTTP in, SSE out; registry, chat API
    5  sched/     many users on one model
    4  engine/    one loaded model made usable: load, forward, sampler, generate
    3  models/    metadata -> plan          accel/  dies and executors
    2  plan/      op vocabulary, buffers, state spec (pure data)
    1  formats/   bytes on disk             text/   tokens and prompts       mem/  pressure, ladder, admission
    0  errors, settings, log, seams, progress

The way of a request: http_server -> routes -> openai_chat (body -> ChatRequest or 400) -> registry.acquire -> a place
(gen_lock.trylock, or the scheduler's gate) -> template, tokenizer -> the wait for a slot -> prefill in chunks ->
sample, decode -> detokenizer -> emitter (reasoning, content, tool) -> sse -> release in reverse order.  Tokens alone
come back.

Lock order, outermost first: gen_lock (try only) or a scheduler's turn, the memory keeper's admitting, registry lock,
prefix cache, scheduler mu, Model turn, HTTP connection lock, seams lock; docs/architecture/sched.md has the table.
No lock is held across a socket write; only gen_lock and the turns are held across a forward.

Python API: `load`, `load_tokenizer`, `render_template`; `Model` is what `load` returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pantheon.engine.model import Model
    from pantheon.text.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = ["__version__", "load", "load_tokenizer", "render_template"]


def load(path: str | Path, ctx: int | None = None, executor: str = "cpu", **options: Any) -> Model:
    """Load a GGUF file; options as for `pantheon.engine.load.load_model` (threads, kv_type, progress)."""
    from pantheon.engine.load import load_model

    return load_model(path, ctx=ctx, executor=executor, **options)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF file with a vocabulary, weights or not: `tokenize` and `detokenize`."""
    from pantheon.engine.load import load_tokenizer_file

    return load_tokenizer_file(path)


def render_template(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    now: Any = None,
    **kwargs: Any,
) -> str:
    """Render a chat template exactly as transformers does; normalising messages is a step of its own before it."""
    from pantheon.text.chat_template import render_template as render

    return render(template, messages, tools, add_generation_prompt, bos_token, eos_token, now, **kwargs)
