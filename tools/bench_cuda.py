"""Tokens per second on this machine's CUDA dies, and the part of the dies' own copying speed that decoding reaches.

    python -m tools.bench_cuda [MODEL.gguf …] [--random 8B:Q4_K …] [--streams 1,8] [--json] [--write PAGE]

Without a model it makes two with random weights, which are as fast as real ones.  Where llama-cpp-python is installed
and was built for CUDA, it runs the same tokens behind us.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pantheon.accel.die import cuda_missing, discover
from pantheon.commands.bench import markdown, whole_list
from pantheon.commands.bench_runs import Workload, plan_tests, rate
from pantheon.commands.common import whole
from pantheon.errors import PantheonError
from pantheon.formats import quant
from tools.bench_compare import put_blocks
from tools.bench_driver import Peer, PeerError
from tools.bench_peer import our_version
from tools.make_tiny_gguf import LlamaShape, Tensor, encode_gguf, llama_keys, make_tensor
from tools.supported_models import told

HEAD = ("model", "what", "pantheon", "MB/token", "of copy", "llama.cpp", "ratio")
#: random models: shapes like those of Llama 3.2 1B and Llama 3.1 8B, with a vocabulary of a few hundred
SHAPES = {
    "1B": LlamaShape(layers=16, width=2048, heads=32, kv_heads=8, ff=8192, ctx=8192),
    "8B": LlamaShape(layers=32, width=4096, heads=32, kv_heads=8, ff=14336, ctx=8192),
}
#: byte offsets of the f16 fields of a block and what to put there, so that weights are as small as trained ones
SCALES = {"Q4_0": {0: 3e-3}, "Q8_0": {0: 3e-4}, "Q4_K": {0: 1e-4, 2: 7.5e-4}, "Q6_K": {208: 1e-5}}


@dataclass(frozen=True)
class Line:
    """One line of the table: tokens per second of each repetition, ours and theirs (empty without them); bytes that a
    token moves and the part of the copying speed that this is (0 for prompts)."""

    model: str
    what: str
    ours: tuple[float, ...]
    bytes_per_token: int = 0
    fraction: float = 0.0
    theirs: tuple[float, ...] = ()

    def cells(self) -> tuple[str, ...]:
        """As the page has them."""
        moved = (f"{self.bytes_per_token / 1e6:.0f}", f"{100 * self.fraction:.0f} %") if self.fraction else ("", "")
        ratio = f"{statistics.median(self.ours) / statistics.median(self.theirs):.2f}" if self.theirs else ""
        return self.model, f"{self.what}, tokens/s", _spread(self.ours), *moved, _spread(self.theirs), ratio


def _spread(runs: Sequence[float]) -> str:
    return f"{statistics.median(runs):.0f} ({min(runs):.0f}–{max(runs):.0f})" if runs else ""


# ---- random models


def random_choice(text: str) -> tuple[str, str]:
    """An argparse type: SHAPE:TYPE."""
    shape, _, type_name = text.partition(":")
    if shape not in SHAPES or type_name not in SCALES:
        raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(SHAPES)}, a colon, one of {', '.join(SCALES)}")
    return shape, type_name


def write_random(path: Path, shape: LlamaShape, type_name: str, seed: int = 1) -> Path:
    """A llama model whose matrices are random blocks of a type.  Returns the path."""
    rng = np.random.default_rng(seed)
    kv = shape.kv_heads * shape.head_dim
    wide, tall = (shape.ff, shape.width), (shape.width, shape.ff)
    matrices = {
        "attn_q": (shape.width, shape.width), "attn_k": (kv, shape.width), "attn_v": (kv, shape.width),
        "attn_output": (shape.width, shape.width), "ffn_gate": wide, "ffn_up": wide, "ffn_down": tall,
    }  # fmt: skip
    ones = np.ones(shape.width, np.float32)
    tensors = [make_tensor("output_norm.weight", ones)]
    # of the tokenizer that `llama_keys` writes
    n_vocab = next(len(key.value.items) for key in llama_keys(shape) if key.key == "tokenizer.ggml.tokens")
    tensors.append(_random_matrix("token_embd", n_vocab, shape.width, type_name, rng))
    for layer in range(shape.layers):
        tensors += [make_tensor(f"blk.{layer}.{norm}.weight", ones) for norm in ("attn_norm", "ffn_norm")]
        tensors += [_random_matrix(f"blk.{layer}.{name}", *size, type_name, rng) for name, size in matrices.items()]
    path.write_bytes(encode_gguf(llama_keys(shape), tensors))
    return path


def _random_matrix(name: str, rows: int, cols: int, type_name: str, rng: np.random.Generator) -> Tensor:
    kind = quant.by_name(type_name)
    blocks = rng.integers(0, 256, (rows * cols // kind.block_values, kind.block_bytes), dtype=np.uint8)
    for at, scale in SCALES[type_name].items():
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return Tensor(f"{name}.weight", (cols, rows), kind.id, blocks.tobytes())


# ---- the sides


def ours(path: Path, args: argparse.Namespace) -> list[Line]:
    """What `pantheon bench` says."""
    streams = ",".join(map(str, args.streams))
    words = ["-p", str(args.n_prompt), "-n", str(args.n_gen), "--batch", streams, "-r", str(args.reps), "--json"]
    found = told("bench", str(path), "--executor", "cuda", *words)
    lines = []
    for result in found["results"]:
        roof = result["roof"] or {"bytes_per_token": 0, "fraction": 0.0}
        moved = roof["bytes_per_token"], roof["fraction"]
        lines.append(Line(found["model"], result["test"], tuple(result["runs"]), *moved))
    return lines


def has_llama_cpp() -> bool:
    """Whether llama-cpp-python is here and was built for a GPU."""
    if importlib.util.find_spec("llama_cpp") is None:
        return False
    code = "import llama_cpp, sys; sys.exit(not llama_cpp.llama_supports_gpu_offload())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def theirs(path: Path, tests: Sequence[Workload], reps: int) -> dict[str, tuple[float, ...]]:
    """Tokens per second of llama.cpp by the name of the test, in a process of its own."""
    words = [sys.executable, "-m", "tools.bench_peer", "llama.cpp", str(path), "1"]
    found = {}
    with closing(Peer("llama.cpp", words)) as peer:
        for test in tests:
            peer.prepare(test)
            found[test.name] = tuple(rate(test, peer.run()) for _ in range(reps))
    return found


def measure(paths: Sequence[Path], args: argparse.Namespace) -> list[Line]:
    """Every line of every model; ours first, since both would not always fit a card together."""
    tests, beside = plan_tests(args.n_prompt, args.n_gen, [0], args.streams), has_llama_cpp()
    lines = []
    for path in paths:
        mine = ours(path, args)
        peers = theirs(path, tests, args.reps) if beside else {}
        lines += [Line(**{**asdict(line), "theirs": peers.get(line.what, ())}) for line in mine]
    return lines


# ---- the report


def table(lines: Sequence[Line], cards: Sequence[str]) -> str:
    """Markdown: the lines and what they depend on."""
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    alone = "" if any(line.theirs for line in lines) else "; no llama.cpp built for CUDA was there"
    notes = [
        f"- {datetime.date.today()}; {', '.join(cards)}; {system}",
        f"- pantheon {our_version()}{alone}",
        "- of copy: bytes of weights and KV that the tokens move, over those that the die copies meanwhile (bytes read "
        "and bytes written)",
    ]
    return "\n".join([*markdown(HEAD, [line.cells() for line in lines], right={2, 3, 4, 5, 6}), "", *notes])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="bench_cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="GGUF files")
    flags.add_argument("--random", nargs="+", type=random_choice, default=[], metavar="SHAPE:TYPE", help=f"models with random weights: {', '.join(SHAPES)} of {', '.join(SCALES)} (default, without MODEL: 1B:Q8_0 1B:Q4_K)")  # fmt: skip # noqa: E501
    flags.add_argument("-p", "--n-prompt", type=whole(0), default=512, metavar="N", help="prompt tokens (default: 512)")
    flags.add_argument("-n", "--n-gen", type=whole(0), default=128, metavar="N", help="generated tokens (default: 128)")
    flags.add_argument("--streams", type=whole_list(1), default=[1, 8], metavar="K,…", help="sequences decoded in one forward (default: 1,8)")  # fmt: skip # noqa: E501
    flags.add_argument("-r", "--reps", type=whole(1), default=5, metavar="N", help="repetitions (default: 5)")
    flags.add_argument("--write", metavar="PAGE", help="also put the table into its place in this Markdown page")
    flags.add_argument("--json", action="store_true", help="print JSON")
    return flags


def main() -> int:
    """Measure and print; 1 when there is no CUDA die, or something fails on it."""
    args = parser().parse_args()
    try:
        cards = [die.name for die in discover() if die.kind == "cuda" and not die.fault]
        if not cards:
            raise PeerError(cuda_missing() or "there is no CUDA device here")
        if args.write:  # a page without the place is found out before minutes are spent
            put_blocks(Path(args.write).read_text("utf-8"), {"cuda": ""})
        with tempfile.TemporaryDirectory() as folder:
            chosen = args.random or ([] if args.models else [("1B", "Q8_0"), ("1B", "Q4_K")])
            made = [write_random(Path(folder) / f"random-{s}.{t}.gguf", SHAPES[s], t) for s, t in chosen]
            lines = measure([*args.models, *made], args)
        if args.write:
            page = Path(args.write)
            page.write_text(put_blocks(page.read_text("utf-8"), {"cuda": table(lines, cards)}), "utf-8")
    except (PeerError, PantheonError, RuntimeError, OSError) as fault:
        print(f"bench-cuda: {fault}", file=sys.stderr)
        return 1
    print(json.dumps({"cards": cards, "lines": [asdict(line) for line in lines]}) if args.json else table(lines, cards))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
