"""What serving a token costs: `python -m tools.bench_server [MODEL.gguf]`.

Null engine: CPU time of a server per streamed token, over scripted models that answer at once, less what the same loop
costs without a server; with one stream and with eight.  With a model: tokens per second through HTTP against the same
generate loop in this process, in alternating rounds, and the null engine's cost as a share of that loop's step.
The client only reads.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pantheon.engine.generate import generate
from pantheon.engine.load import load_model
from pantheon.engine.model import Model
from pantheon.engine.sampler import SamplingParams
from tools.bench_http import Server

STREAMS = 8
#: an answer that is neither all one token nor long in its parts
SCRIPT = {"pieces": [f" word{i}" for i in range(64)] * 8, "eog": False}
PROMPT = [{"role": "user", "content": "Tell me a long story about a lighthouse and its keeper."}]


def body(model: str, tokens: int) -> bytes:
    """A streamed chat that gives exactly so many tokens, with the server's own sampling."""
    asked = {"model": model, "messages": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 1}
    data = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    return (head + "Content-Type: application/json\r\n\r\n").encode() + data


def read_stream(port: int, model: str, tokens: int) -> float:
    """Seconds from the first text to the end of one streamed answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        sock.sendall(body(model, tokens))
        tail, first = b"", 0.0
        while data := sock.recv(1 << 16):
            # the first event holds the role and an empty text
            if not first and (tail + data).count(b'"content":') > 1:
                first = time.perf_counter()
            tail = tail + data if not first else (tail + data)[-64:]
        if b"data: [DONE]" not in tail or not first:
            raise SystemExit(f"the server broke off: {tail[-300:]!r}")
        return time.perf_counter() - first


def serve_command(models: Sequence[tuple[str, str]], port: int) -> list[str]:
    """A server of these (path, name)."""
    flags = [part for path, name in models for part in ("--model", path, "--name", name)]
    return [sys.executable, "-m", "pantheon", "serve", "--port", str(port), "--log-level", "error", *flags]


def loop(model: Model, tokens: int) -> tuple[float, float]:
    """(wall, CPU of this thread) seconds per token of the bare generate loop, prompt excluded."""
    prompt = model.prompt(PROMPT).ids
    state, params = model.new_state(), SamplingParams(seed=1)
    wall = cpu = 0.0
    for token in generate(model, state, prompt, params, max_tokens=tokens, ignore_eog=True):
        if token.n == 1:
            wall, cpu = time.perf_counter(), time.thread_time()
    return (time.perf_counter() - wall) / (tokens - 1), (time.thread_time() - cpu) / (tokens - 1)


def null_engine(tokens: int, rounds: int) -> dict[int, float]:
    """Streams -> CPU seconds that serving one token takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "null.json"
        path.write_text(json.dumps(SCRIPT))
        source = f"script:{path}"
        names = [f"m{i}" for i in range(STREAMS)]
        bare = min(loop(load_model(source), tokens)[1] for _ in range(rounds))
        server = Server("null engine", lambda port: serve_command([(source, name) for name in names], port))
        try:
            costs = {n: min(_cpu(server, names[:n], tokens) for _ in range(rounds)) - bare for n in (1, STREAMS)}
        finally:
            server.close()
    return costs


def _cpu(server: Server, names: Sequence[str], tokens: int) -> float:
    """CPU seconds of the server per token while it answers one stream for each name."""
    for name in names:
        read_stream(server.port, name, 16)
    before = server.cpu_s()
    readers = [threading.Thread(target=read_stream, args=(server.port, name, tokens)) for name in names]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return (server.cpu_s() - before) / (tokens * len(names))


def with_model(path: str, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds per token of the bare loop and through HTTP, a pair a round."""
    model = load_model(path)
    server = Server("pantheon", lambda port: serve_command([(path, "m")], port))
    try:
        loop(model, 16)
        read_stream(server.port, "m", 16)
        pairs = [(loop(model, tokens)[0], read_stream(server.port, "m", tokens) / (tokens - 1)) for _ in range(rounds)]
    finally:
        server.close()
        model.close()
    return [a for a, _ in pairs], [b for _, b in pairs]


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    costs = null_engine(4 * args.tokens, args.rounds)
    for streams, cost in costs.items():
        print(f"null engine, {streams} streams: {cost * 1e6:.0f} us of CPU a token")
    if args.model is None:
        return
    bare, served = with_model(args.model, args.tokens, args.rounds)
    step = statistics.median(bare)
    ratios = sorted(b / s for b, s in zip(bare, served, strict=True))
    print(f"engine: {1 / step:.1f} tok/s, a step of {step * 1e6:.0f} us")
    print(f"HTTP: {1 / statistics.median(served):.1f} tok/s, {statistics.median(ratios):.3f} of the engine's "
          f"({ratios[0]:.3f} to {ratios[-1]:.3f} over {len(ratios)} rounds)")  # fmt: skip
    for streams, cost in costs.items():
        print(f"a streamed token, {streams} streams: {cost / step:.1%} of a step")


if __name__ == "__main__":
    main()
