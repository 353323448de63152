"""The vocabulary of a model file as checked values: every `tokenizer.*` key is read here and nowhere else.

Each fault is a `VocabError` that names the key.  This module does not know how text is split or merged.
Source of the rules: the tokenizer section of the GGUF format, and what llama.cpp does with the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pantheon.errors import PantheonError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_MODELS = ("gpt2", "gemma4", "llama")
_NO_ID = (-1, 2**32 - 1)  # how some converters write "none"
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # of a 'llama' vocabulary


class VocabError(PantheonError):
    """A vocabulary that can not be used; `param` is the metadata key at fault."""

    status = 422
    type = "invalid_request_error"
    code = "invalid_vocabulary"

    def __init__(self, key: str, fault: str) -> None:
        super().__init__(f"{key}: {fault}", param=key)


def key(name: str) -> str:
    """`tokens` -> `tokenizer.ggml.tokens`."""
    return f"tokenizer.ggml.{name}"


@dataclass(frozen=True)
class Vocab:
    """What a file says about its tokens; ids are indices into `tokens`."""

    model: str  # gpt2, gemma4 or llama
    pre: str  # name of the pre-tokenizer, "" when the file has none
    name: str  # general.name, lower case
    tokens: list[str]
    ids: dict[str, int]
    types: list[int]  # token types 1..6, 0 for any other
    scores: list[float]  # empty unless model is llama
    merges: list[str]  # "left right", best first; empty for llama
    special: dict[str, int]  # bos, eos, eot, eom, unknown, fim_pad, fim_rep, fim_sep -> id, as far as given
    flags: dict[str, bool]  # add_bos_token, add_eos_token, add_space_prefix, as far as given


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """Check and collect the tokenizer keys.  Raises VocabError naming the key at fault."""
    model = _text(metadata, key("model"), required=True)
    if model not in _MODELS:
        raise VocabError(key("model"), f"unknown tokenizer {model!r} (supported: {', '.join(_MODELS)})")
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(_strings(metadata, key("tokens")))]
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if ids[t] != i)
        raise VocabError(key("tokens"), f"token {twice!r} is there twice")
    return Vocab(
        model=model,
        pre=_text(metadata, key("pre")),
        name=_text(metadata, "general.name").lower(),
        tokens=tokens,
        ids=ids,
        types=_types(metadata, len(tokens)),
        scores=_scores(metadata, len(tokens)) if model == "llama" else [],
        merges=_merges(metadata) if model != "llama" else [],
        special=_special_ids(metadata, len(tokens), _DEFAULT_IDS if model == "llama" else {}),
        flags=_flags(metadata),
    )


def _text(metadata: Mapping[str, Any], name: str, *, required: bool = False) -> str:
    value = metadata.get(name)
    if value is None and not required:
        return ""
    if value is None:
        raise VocabError(name, "missing: the file has no vocabulary")
    if not isinstance(value, str):
        raise VocabError(name, f"expects a string, is {type(value).__name__}")
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(name)
    if value is None:
        raise VocabError(name, "missing")
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise VocabError(name, "expects an array of strings")
    if not value:
        raise VocabError(name, "is empty")
    return list(value)


def _numbers(metadata: Mapping[str, Any], name: str, kinds: str, n: int) -> np.ndarray | None:
    """A numeric array of length n, or None when the key is absent; `kinds` are NumPy dtype kinds."""
    value = metadata.get(name)
    if value is None:
        return None
    wanted = "an array of numbers" if "f" in kinds else "an array of whole numbers"
    if not isinstance(value, np.ndarray | list | tuple):
        raise VocabError(name, f"expects {wanted}, is {type(value).__name__}")
    try:
        array = np.asarray(value)
    except ValueError:
        raise VocabError(name, f"expects {wanted}") from None
    if array.ndim != 1 or (array.dtype.kind not in kinds and array.size):
        raise VocabError(name, f"expects {wanted}")
    if array.size != n:
        raise VocabError(name, f"has {array.size} entries for {n} tokens")
    return array


def _types(metadata: Mapping[str, Any], n: int) -> list[int]:
    array = _numbers(metadata, key("token_type"), "iu", n)
    if array is None:
        return [NORMAL] * n
    return [t if NORMAL <= t <= BYTE else 0 for t in array.tolist()]


def _scores(metadata: Mapping[str, Any], n: int) -> list[float]:
    array = _numbers(metadata, key("scores"), "iuf", n)
    if array is None:
        raise VocabError(key("scores"), "missing: a 'llama' vocabulary merges by score")
    if np.isnan(array).any():
        raise VocabError(key("scores"), "holds a value that is not a number")
    return array.astype(np.float32).tolist()


def _merges(metadata: Mapping[str, Any]) -> list[str]:
    merges = _strings(metadata, key("merges"))
    for i, merge in enumerate(merges):
        at = merge.find(" ", 1)
        if at < 0 or at == len(merge) - 1:
            raise VocabError(key("merges"), f"entry {i} ({merge!r}) is not of the form 'left right'")
    return merges


def _special_ids(metadata: Mapping[str, Any], n: int, defaults: Mapping[str, int]) -> dict[str, int]:
    found = {name: token for name, token in defaults.items() if token < n}
    for name in ("bos", "eos", "eot", "eom", "unknown", "fim_pad", "fim_rep", "fim_sep"):
        value = metadata.get(key(f"{name}_token_id"))
        if value is None or (_whole(value) and value in _NO_ID):
            continue
        if not _whole(value):
            raise VocabError(key(f"{name}_token_id"), f"expects a token id, is {value!r}")
        if not 0 <= value < n:
            raise VocabError(key(f"{name}_token_id"), f"{value} is outside the vocabulary of {n} tokens")
        found[name] = int(value)
    return found


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _flags(metadata: Mapping[str, Any]) -> dict[str, bool]:
    found = {}
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        value = metadata.get(key(name))
        if value is None:
            continue
        if not isinstance(value, bool | np.bool_):
            raise VocabError(key(name), f"expects true or false, is {value!r}")
        found[name] = bool(value)
    return found
