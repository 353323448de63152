"""One engine in a process of its own, driven over pipes: `bench_compare` keeps one for each side and takes turns.

    python -m tools.bench_peer pantheon|llama.cpp MODEL.gguf THREADS

One JSON object a line.  First the peer says what it is: {"engine", "version", "threads"}.  Then it answers each line:

    {"do": "prepare", "workload": {"kind", "n", "depth", "sequences"}} -> {}         fills to depth, runs once
    {"do": "run"}                                                      -> {"steps": [seconds, …]}

A request that fails is answered {"error": text}.  At the end of input the peer leaves.  Between requests it sleeps in
a read, so that the other side has the machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import IO, Any, Protocol

from pantheon import __version__
from pantheon.commands.bench_runs import Bench, Workload, token_at


def our_version() -> str:
    """`0.1.0 (numba …, NumPy …)`."""
    return f"{__version__} (numba {version('numba')}, NumPy {version('numpy')})"


class Engine(Protocol):
    """One side: loaded once, then asked for one workload after the other."""

    def about(self) -> dict[str, Any]:
        """engine, version, threads."""
        ...

    def prepare(self, workload: Workload) -> None:
        """Drop the last workload's state and fill one for this."""
        ...

    def run(self) -> list[float]:
        """Seconds of the prompt (pp), or of each step (tg)."""
        ...


class Pantheon:
    """Our side: the forwards of `pantheon bench`."""

    def __init__(self, path: str, threads: int) -> None:
        from pantheon.engine.load import load_model

        self._load, self._threads = (lambda ctx: load_model(path, ctx=ctx, threads=threads)), threads
        self._model: Any = None
        self._bench: Bench | None = None

    def about(self) -> dict[str, Any]:
        """See Engine."""
        return {"engine": "pantheon", "version": our_version(), "threads": self._threads}

    def prepare(self, workload: Workload) -> None:
        """See Engine.  Loads again when the context must grow."""
        self._bench = None
        needed = max(1024, workload.depth + workload.n)
        if self._model is None or self._model.n_ctx < needed:
            if self._model is not None:
                self._model.close()
            self._model = self._load(needed)
        self._bench = Bench(self._model, workload)

    def run(self) -> list[float]:
        """See Engine."""
        assert self._bench is not None
        return self._bench.once()


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level API, with the settings and batches of llama-bench and
    llama-batched-bench: micro-batch 512, flash attention and cache types left at their defaults.  Only llama_decode
    (and waiting for it) is timed; batches are filled outside."""

    N_BATCH, N_UBATCH = 2048, 512

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._c, self._threads, self._path = llama_cpp, threads, path
        self._ctx: Any = None
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp can not load {path}")
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(self.N_BATCH, 0, 1)

    def about(self) -> dict[str, Any]:
        """See Engine."""
        info = self._c.llama_print_system_info().decode()
        on = [part.split("=")[0].strip() for part in info.split(":")[-1].split("|") if part.strip().endswith("= 1")]
        made = f"of llama-cpp-python {self._c.__version__} ({' '.join(on)})"
        return {"engine": "llama.cpp", "version": made, "threads": self._threads}

    def prepare(self, workload: Workload) -> None:
        """See Engine."""
        if self._ctx is not None:
            self._c.llama_free(self._ctx)
            self._ctx = None
        params = self._c.llama_context_default_params()
        # each sequence has a cache of its own, as in llama-batched-bench
        params.n_ctx = workload.sequences * -(-(workload.depth + workload.n) // 256) * 256
        params.n_batch, params.n_ubatch, params.n_seq_max = self.N_BATCH, self.N_UBATCH, workload.sequences
        params.n_threads = params.n_threads_batch = self._threads
        self._ctx = self._c.llama_init_from_model(self._model, params)
        if not self._ctx:
            raise RuntimeError(f"llama.cpp has no context for {workload.name}")
        self._memory, self._workload = self._c.llama_get_memory(self._ctx), workload
        self._c.llama_memory_clear(self._memory, False)
        for sequence in range(workload.sequences if workload.depth else 0):
            self._prefill(sequence, 0, workload.depth)

    def run(self) -> list[float]:
        """See Engine."""
        workload = self._workload
        for sequence in range(workload.sequences):
            self._c.llama_memory_seq_rm(self._memory, sequence, workload.depth, -1)
        if workload.kind == "pp":
            return [self._prefill(0, workload.depth, workload.n)]
        every = range(workload.sequences)
        places = range(workload.depth, workload.depth + workload.n)
        return [self._decode([(sequence, position) for sequence in every], wanted=every) for position in places]

    def _prefill(self, sequence: int, first: int, n: int) -> float:
        """Seconds of n tokens of one sequence; the last one gives logits."""
        seconds = 0.0
        for at in range(first, first + n, self.N_BATCH):
            places = [(sequence, position) for position in range(at, min(at + self.N_BATCH, first + n))]
            last = at + self.N_BATCH >= first + n
            seconds += self._decode(places, wanted=[len(places) - 1] if last else [])
        return seconds

    def _decode(self, places: Sequence[tuple[int, int]], wanted: Sequence[int]) -> float:
        """Seconds of one llama_decode over (sequence, position)."""
        batch, wants = self._batch, frozenset(wanted)
        batch.n_tokens = len(places)
        for i, (sequence, position) in enumerate(places):
            batch.token[i] = token_at(sequence, position, self._n_vocab)
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = position, 1, sequence
            batch.logits[i] = i in wants
        started = time.perf_counter()
        code = self._c.llama_decode(self._ctx, batch)
        self._c.llama_synchronize(self._ctx)
        seconds = time.perf_counter() - started
        if code:
            raise RuntimeError(f"llama_decode gave {code} on {self._workload.name}")
        return seconds


ENGINES: dict[str, Callable[[str, int], Engine]] = {"pantheon": Pantheon, "llama.cpp": LlamaCpp}


def serve(engine: Engine, requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until the input ends."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    say(engine.about())
    for line in requests:
        try:
            say(_answer(engine, json.loads(line)))
        except Exception as fault:  # the driver says it: a peer never dies of a workload
            say({"error": f"{type(fault).__name__}: {fault}"})


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "prepare":
        engine.prepare(Workload(**request["workload"]))
        engine.run()
        return {}
    if request["do"] == "run":
        return {"steps": engine.run()}
    raise ValueError(f"unknown request {request['do']!r}")


def main() -> None:
    """Answers go to the real stdout; what libraries print there goes to stderr."""
    name, path, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        engine = ENGINES[name](path, int(threads))
    except Exception as fault:
        print(json.dumps({"error": f"{type(fault).__name__}: {fault}"}), file=answers, flush=True)
        return
    serve(engine, sys.stdin, answers)


if __name__ == "__main__":
    main()
