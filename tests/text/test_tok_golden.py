"""Tokenizers against what llama.cpp does with the same vocabularies: ids, printed bytes, special ids."""

from __future__ import annotations

from typing import Any

import pytest

from pantheon.text.pretokenize import known, pretokenizer
from tests.golden_data import smollm2_path
from tests.text.tok_vocab import REAL, TINY, read, tokenizer

NAMES = (*TINY, *REAL, *(("smollm2",) if smollm2_path() else ()))


def golden(name: str) -> dict[str, Any]:
    data: dict[str, Any] = read("smollm2.golden" if name == "smollm2" else name)["golden"]
    return data


def cases(name: str) -> list[tuple[str | bytes, dict[str, Any]]]:
    data = golden(name)
    return [(c["text"], c) for c in data["cases"]] + [(bytes.fromhex(c["hex"]), c) for c in data["bytes_cases"]]


@pytest.mark.parametrize("name", NAMES)
def test_special_ids(name: str) -> None:
    """Begin, end, end-of-generation ids and the add_bos/add_eos defaults of each family."""
    tok, info = tokenizer(name), golden(name)["info"]
    assert (tok.n_vocab, tok.bos_id, tok.eos_id) == (info["n_vocab"], info["bos"], info["eos"])
    assert (tok.add_bos, tok.add_eos) == (info["add_bos"], info["add_eos"])
    assert sorted(tok.eog_ids) == golden(name)["eog_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_ids(name: str) -> None:
    """Strings and broken UTF-8, with special tokens parsed or not and added or not."""
    tok = tokenizer(name)
    for text, case in cases(name):
        assert tok.encode(text, add_special=False) == case["ids_plain"], text
        assert tok.encode(text, add_special=False, parse_special=True) == case["ids_parse_special"], text
        assert tok.encode(text, parse_special=True) == case["ids_add_special"], text


@pytest.mark.parametrize("name", NAMES)
def test_printed_text(name: str) -> None:
    """Bytes of each token with special tokens shown, and the readable text without them."""
    tok = tokenizer(name)
    for text, case in cases(name):
        ids = case["ids_parse_special"]
        assert b"".join(tok.token_bytes(i, special=True) for i in ids).hex() == case["detok_hex"], text
        assert tok.decode(ids, special=True) == bytes.fromhex(case["detok_hex"]).decode("utf-8", "replace"), text
        assert tok.decode(ids) == bytes.fromhex(case["detok_no_special_hex"]).decode("utf-8", "replace"), text


@pytest.mark.parametrize("name", sorted(read("pretokens")))
def test_pretokenizer_pieces(name: str) -> None:
    """Pieces as the reference cuts them (llama.cpp; Hugging Face for gpt-4o, tekken, youtu)."""
    pre = pretokenizer(name)
    for pieces in read("pretokens")[name]:
        assert pre.split("".join(pieces)) == pieces


def test_every_pattern_is_checked() -> None:
    """Names without pieces of their own share their stages with one that has them."""
    from pantheon.text.pretokenize import _STAGES

    checked = {_STAGES[n] for n in read("pretokens")}
    assert [n for n in known() if _STAGES[n] not in checked] == []
