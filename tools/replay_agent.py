"""Ten turns of a coding agent against a server, without ids: what is read again, and what that costs.

    python -m tools.replay_agent [MODEL.gguf] [--style opencode] [--scale 0.5] [--parallel 8] [--url URL]

The logs have the shape that real harnesses send (sizes of system prompt, tools and results; content null, "" or absent;
reasoning dropped; a title request and a subagent in between), with made-up words.  Printed per turn: prompt tokens,
those that it shares with an earlier prompt, those that were cached, and the time to the first token; at the end the
least share cached from turn 2 on, and the last turn's time as a ratio of the second's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tools.bench_http import Server

TURNS = 10
Message = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """How one harness speaks.  Sizes in characters; `empty` is what stands for no content ("absent": nothing)."""

    name: str
    system: int
    tools: int
    tool: int
    result: int
    empty: Any
    parts: bool = False
    attribution: bool = False


STYLES = {
    style.name: style
    for style in (
        Style("opencode", 9_700, 10, 2_100, 900, ""),
        Style("claude-code", 12_000, 15, 1_500, 1_200, None, attribution=True),
        Style("codex", 17_700, 9, 1_800, 700, None, parts=True),
        Style("mini", 3_000, 1, 400, 600, "absent"),
    )
}
_WORDS = (
    "the file model build error value return index server state token queue open read write line test path cache "
    "check before after every other change only when result small large first last must should never function class"
).split()


class Ask(NamedTuple):
    """One request of a log.  `kind`: turn, title or subagent."""

    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]]

    def body(self, **more: Any) -> dict[str, Any]:
        """As it is sent."""
        offered = {"tools": self.tools, "tool_choice": "auto"} if self.tools else {}
        return {"messages": self.messages, **offered, **more}


def agent_log(style: Style, turns: int = TURNS, scale: float = 1.0, seed: int = 1) -> Iterator[Ask]:
    """The requests of one conversation.  Each turn is the one before and what came after it."""
    chance = random.Random(seed)

    def text(size: float) -> str:
        words, length = [], 0
        while length < size * scale:
            words.append(chance.choice(_WORDS) + ("\n" if chance.random() < 0.08 else ""))
            length += len(words[-1]) + 1
        return " ".join(words)

    prompt = f"You are a coding agent. Today's date: Mon Nov 30 2026.\nWorking directory: /home/me/{seed}\n"
    prompt += text(style.system)
    tools = [_tool(i, text(style.tool)) for i in range(style.tools)]
    log: list[Message] = [_said(style, "user", text(200))]
    for turn in range(turns):
        yield Ask("turn", [_said(style, "system", _attributed(style, prompt, turn)), *log], tools)
        if turn == 1:
            yield Ask("title", [{"role": "system", "content": "Write a title. " + text(1_500)}, log[0]], [])
        if turn == 4:
            yield Ask("subagent", [_said(style, "system", prompt[: len(prompt) // 2]), log[0]], tools[:3])
        log += _step(style, turn, text)


def _attributed(style: Style, prompt: str, turn: int) -> str:
    if not style.attribution:
        return prompt
    version = f"2.1.177.{turn * 37 % 4096:03x}"
    return f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli; cch={turn * 7919:05x};\n{prompt}"


def _tool(i: int, description: str) -> dict[str, Any]:
    properties = {"path": {"type": "string"}, "limit": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    return {"type": "function", "function": {"name": f"tool_{i}", "description": description, "parameters": schema}}


def _said(style: Style, role: str, text: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}] if style.parts else text}


def _step(style: Style, turn: int, text: Callable[[float], str]) -> list[Message]:
    """What the harness has on record of an answer, and what came of it; its reasoning was dropped."""
    arguments = json.dumps({"path": f"src/{turn}.py", "limit": 10 + turn})
    call = {"id": f"call_{turn}", "type": "function", "function": {"name": "tool_0", "arguments": arguments}}
    answer: Message = {"role": "assistant", "content": style.empty, "tool_calls": [call]}
    if style.empty == "absent":
        del answer["content"]
    return [answer, {"role": "tool", "tool_call_id": call["id"], "content": text(style.result)}]


# ---- playing one ----------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What one request came to: seconds to the first token; tokens of the prompt, and of it those not read again."""

    kind: str
    first_s: float
    prompt: int
    cached: int


def over_http(host: str, port: int, max_tokens: int = 8) -> Callable[[Ask], Answer]:
    """Ask a server, streamed."""

    def ask(asked: Ask) -> Answer:
        more = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
        data = json.dumps(asked.body(max_tokens=max_tokens, **more)).encode()
        connection = http.client.HTTPConnection(host, port, timeout=600)
        try:
            began, first = time.perf_counter(), 0.0
            usage: dict[str, Any] = {}
            connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise SystemExit(f"{reply.status}: {reply.read(500)!r}")
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"{event['error']}")
                delta = (event.get("choices") or [{}])[0].get("delta") or {}
                if any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
                    first = first or time.perf_counter() - began
                usage = event.get("usage") or usage
        finally:
            connection.close()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Answer(asked.kind, first, usage["prompt_tokens"], cached)

    return ask


class Played(NamedTuple):
    """One turn, and the tokens that its prompt shares with an earlier turn's: all of that one's prompt."""

    answer: Answer
    shared: int

    @property
    def share(self) -> float:
        """Cached, of what could be."""
        return self.answer.cached / self.shared if self.shared else 1.0


def play(log: Iterator[Ask], ask: Callable[[Ask], Answer]) -> Iterator[Played]:
    """Each turn's answer; a log whose turns only grow shares all of the last prompt."""
    before = 0
    for asked in log:
        answer = ask(asked)
        if asked.kind == "turn":
            yield Played(answer, before)
            before = answer.prompt
        else:
            yield Played(answer, 0)


def main(words: Sequence[str] | None = None) -> None:
    """Print what the replay of each style came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a GGUF file (default: SmolLM2)")
    parser.add_argument("--style", choices=[*STYLES, "all"], default="opencode")
    parser.add_argument("--scale", type=float, default=0.5, help="of all sizes")
    parser.add_argument("--ctx", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=0, help="0: as the server chooses")
    parser.add_argument("--parallel", type=int, default=0, help="users of the server that is started")
    parser.add_argument("--url", help="a server that runs already")
    args = parser.parse_args(words)
    server = None
    if args.url:
        url = urllib.parse.urlsplit(args.url)
        host, port = url.hostname or "127.0.0.1", url.port or 80
    else:
        server = Server("pantheon serve", lambda port: _command(args, port))
        host, port = "127.0.0.1", server.port
    try:
        over_http(host, port)(Ask("warm-up", [{"role": "user", "content": "hello " * 300}], []))
        for name in STYLES if args.style == "all" else [args.style]:
            _report(name, list(play(agent_log(STYLES[name], scale=args.scale), over_http(host, port))))
    finally:
        if server is not None:
            server.close()


def _command(args: argparse.Namespace, port: int) -> list[str]:
    words = [sys.executable, "-m", "pantheon", "serve", "--port", port, "--ctx", args.ctx, "--log-level", "error"]
    flags = {"--model": args.model, "--threads": args.threads, "--parallel": args.parallel}
    return [str(word) for word in (*words, *(part for flag in flags.items() if flag[1] for part in flag))]


def _report(name: str, played: Sequence[Played]) -> None:
    print(f"{name}\n{'':>10} {'prompt':>8} {'shared':>8} {'cached':>8} {'first, ms':>10}")
    for answer, shared in played:
        print(f"{answer.kind:>10} {answer.prompt:>8} {shared:>8} {answer.cached:>8} {1e3 * answer.first_s:>10.0f}")
    turns = [turn for turn in played if turn.answer.kind == "turn"]
    least = min(turn.share for turn in turns[1:])
    ratio = turns[-1].answer.first_s / turns[1].answer.first_s
    print(f"least share cached from turn 2 on: {least:.1%}; first token, last turn / second: {ratio:.2f}\n")


if __name__ == "__main__":
    main()
