"""Tokenizer speed on one core: megabytes of text a second, on prose, code and hostile text.

    python tools/bench_tokenizer.py [MODEL.gguf [TEXT FILE]]

Prose is made of English words with a natural spread of lengths and repeats unless a file is given.  Each row encodes
with a new tokenizer (cold word cache) and then again (warm); rates are per second of CPU time, so that other work on
the machine counts little.  `stall` is the longest time that another thread had to wait for the interpreter.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from pathlib import Path

from pantheon.engine.default_model import need_default_model
from pantheon.formats.gguf import open_gguf
from pantheon.text.tokenizer import Tokenizer, load_tokenizer

_SYLLABLES = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so what up said its about "
    "ing tion ment er ly un re con per com pre dis able ness ful less ist ity al ic ous ive ate ize en ed es s ra lo "
    "mi ta ko ver sal tor bel gran stu dor fen cas wil mer han lin ster ford ton"
)


def prose(size: int, seed: int = 1) -> str:
    """`size` characters of word-like English: about 20 thousand different words, common ones often."""
    rng, syllables = random.Random(seed), _SYLLABLES.split()
    words = ["".join(rng.choices(syllables, k=rng.choice((1, 1, 2, 2, 3)))) for _ in range(20_000)]
    weights = [1 / (n + 1) for n in range(len(words))]
    parts: list[str] = []
    total = 0
    while total < size:
        sentence = " ".join(rng.choices(words, weights, k=rng.randint(4, 25))).capitalize() + rng.choice(".?!,;")
        parts.append(sentence + rng.choice((" ", " ", " ", "\n\n")))
        total += len(parts[-1])
    return "".join(parts)[:size]


def samples(size: int, file: Path | None) -> dict[str, str]:
    """Named texts to encode."""
    rng = random.Random(2)
    return {
        "prose": (file.read_text("utf-8", "replace") if file else prose(size))[:size],
        "digits": "".join(rng.choices("0123456789 ", k=size // 4)),
        "random unicode": "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(size // 8)),
        "one long word": "".join(rng.choices("abcdefghij", k=size // 4)),
        "one long line of a": "a" * (size // 4),
        "white space": " " * (size // 4),
        "markers": "<|im_start|>user\nhi<|im_end|>\n" * (size // 120),
    }


def stall(tokenizer: Tokenizer, text: str) -> float:
    """The longest time (seconds) that another thread did not run while `text` was encoded."""
    worst, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal worst
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            worst, last = max(worst, now - last), now

    thread = threading.Thread(target=watch)
    thread.start()
    tokenizer.encode(text, parse_special=True)
    done.set()
    thread.join()
    return worst


def main() -> None:
    """Print one row a text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a GGUF file with a vocabulary (default: SmolLM2)")
    parser.add_argument("text", type=Path, nargs="?", help="a text file instead of made-up prose")
    parser.add_argument("--size", type=int, default=1_000_000, help="characters of prose (default 1000000)")
    args = parser.parse_args()
    with open_gguf(args.model or need_default_model()) as file:
        metadata = dict(file.metadata)
    began = time.perf_counter()
    load_tokenizer(metadata)
    print(f"load {time.perf_counter() - began:.2f} s")
    print(f"{'text':<20}{'MB':>7}{'tokens':>9}{'cold MB/s':>11}{'warm MB/s':>11}{'stall ms':>10}")
    for name, text in samples(args.size, args.text).items():
        tokenizer = load_tokenizer(metadata)
        megabytes = len(text.encode()) / 1e6
        rates = []
        for _ in range(2):
            began = time.thread_time()
            ids = tokenizer.encode(text, parse_special=True)
            rates.append(megabytes / (time.thread_time() - began))
        worst = stall(tokenizer, text) * 1000
        print(f"{name:<20}{megabytes:>7.2f}{len(ids):>9}{rates[0]:>11.2f}{rates[1]:>11.2f}{worst:>10.1f}")


if __name__ == "__main__":
    main()
