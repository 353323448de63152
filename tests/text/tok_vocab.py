"""Vocabularies for tokenizer tests: the shipped real and tiny ones, and small ones made up here.

`tests/data/tokenizers/<name>.json.gz` holds `metadata` (the tokenizer keys) and `golden` (what llama.cpp does; the
meaning of its fields is in `legend`).  `pretokens.json.gz` holds the pieces that the reference pre-tokenizers cut.
"""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from pantheon.formats.gguf import open_gguf
from pantheon.text.bpe import byte_alphabet
from pantheon.text.tokenizer import Tokenizer, load_tokenizer
from tests.golden_data import smollm2_path

FOLDER = Path(__file__).resolve().parents[1] / "data" / "tokenizers"
TINY = (
    "tiny-llama",
    "tiny-llama-k",
    "tiny-mixtral",
    "tiny-p3",
    "tiny-p3-long",
    "tiny-gemma3",
    "tiny-qwen2",
    "tiny-qwen35",
)
REAL = ("gpt-2", "phi-3")


@lru_cache(maxsize=2)
def read(name: str) -> dict[str, Any]:
    """One data file; do not change what it returns."""
    with gzip.open(FOLDER / f"{name}.json.gz", "rt", encoding="utf-8") as stream:
        data: dict[str, Any] = json.load(stream)
    return data


def metadata(name: str) -> dict[str, Any]:
    """The tokenizer keys of a shipped vocabulary, as the reader of model files gives them."""
    values = dict(read(name)["metadata"])
    if name == "gpt-2":  # its tokens are the byte alphabet, the merge products and the end of text
        products = [m.replace(" ", "", 1) for m in values["tokenizer.ggml.merges"]]
        tokens = values.pop("head") + products + values.pop("tail")
        values["tokenizer.ggml.tokens"] = tokens
        values["tokenizer.ggml.token_type"] = [1] * (len(tokens) - 1) + [3]
    return values


@lru_cache(maxsize=16)
def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a shipped vocabulary, or of the installed SmolLM2."""
    if name == "smollm2":
        path = smollm2_path()
        assert path is not None
        with open_gguf(path) as file:
            return load_tokenizer(file.metadata)
    return load_tokenizer(metadata(name))


def bpe(
    words: tuple[str, ...] = (), merges: tuple[str, ...] = (), control: tuple[str, ...] = (), **keys: Any
) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: 256 bytes, words (in the byte alphabet), then control tokens."""
    tokens = [*byte_alphabet(), *words, *control]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (256 + len(words)) + [3] * len(control),
        "tokenizer.ggml.merges": list(merges) or ["a b"],
    }
    return values | {f"tokenizer.ggml.{k}": v for k, v in keys.items()}


def spm(words: dict[str, float], control: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: <unk> <s> </s>, 256 byte tokens, words with scores, control tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *control]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words) + [3] * len(control),
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()) + [0.0] * len(control),
    }
    return values | {f"tokenizer.ggml.{k}": v for k, v in keys.items()}
