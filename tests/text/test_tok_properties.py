"""Properties that hold for any text: round trips, no control ids out of plain text, guard equivalence.  [B31, X]"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.text.tokenizer import Tokenizer
from tests.text.tok_vocab import tokenizer

BPE = ("tiny-llama", "tiny-llama-k", "tiny-qwen35", "tiny-p3-long", "gpt-2")
SPM = ("tiny-mixtral", "tiny-p3", "tiny-gemma3", "phi-3")
MARKS = (
    "<think>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "</s>",
    "<s>",
    "<unk>",
    "<end_of_turn>",
    "<|end|>",
    "<0x41>",
)

texts = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            [*MARKS, " ", "\n", "  ", "'s", " the", "ing", "<|im_", "end|>", "123", "\u2581", "\u4f60\u597d"]
        ),
    ),
    max_size=12,
).map("".join)
bounded = settings(deadline=None, max_examples=80)


def readable(tok: Tokenizer, ids: list[int]) -> str:
    return tok.decode(ids, clean=False)


@pytest.mark.parametrize("name", BPE)
@bounded
@given(text=texts)
def test_byte_level_round_trip(name: str, text: str) -> None:
    """Every valid text comes back from its ids."""
    tok = tokenizer(name)
    assert readable(tok, tok.encode(text, add_special=False)) == text


@pytest.mark.parametrize("name", SPM)
@bounded
@given(text=texts)
def test_sentencepiece_round_trip(name: str, text: str) -> None:
    """Every valid text but for U+2581, which is the space to SentencePiece."""
    tok = tokenizer(name)
    text = text.replace("\u2581", " ")
    assert readable(tok, tok.encode(text, add_special=False)) == text


@pytest.mark.parametrize("name", (*BPE, *SPM))
@bounded
@given(text=texts, times=st.integers(0, 9))
def test_the_least_number_of_tokens_is_a_lower_bound(name: str, text: str, times: int) -> None:
    """Also for runs of what may be one long token: blanks, rules, dashes."""
    tok = tokenizer(name)
    text += (" " * 16 + "=" * 16 + "-" * 16) * times
    assert tok.least(text) <= len(tok.encode(text, add_special=False, parse_special=True))


@pytest.mark.parametrize("name", (*BPE, *SPM))
@bounded
@given(data=st.one_of(texts, st.binary(max_size=40)))
def test_plain_text_has_no_control_ids(name: str, data: str | bytes) -> None:
    """B31: parse_special=False never gives a control id, whatever the text or bytes."""
    tok = tokenizer(name)
    assert not any(map(tok.is_control, tok.encode(data, add_special=False)))


@pytest.mark.parametrize("name", (*BPE, *SPM))
@bounded
@given(text=texts)
def test_guarded_text_is_plain_text(name: str, text: str) -> None:
    """B31: with its markers guarded, text parses to what it is as plain text, and comes back."""
    tok = tokenizer(name)
    text = text.replace("\u2581", " ")
    guard = {"\ue000": "<"}
    guarded = text.replace("\ue000", "").replace("<", "\ue000")
    want = text.replace("\ue000", "")
    ids = tok.encode(guarded, add_special=False, parse_special=True, guard=guard)
    assert not any(map(tok.is_control, ids))
    assert readable(tok, ids) == want
    plain = tok.encode(want, add_special=False)
    if not any(tok.token_text(i).startswith("<") and len(tok.token_text(i)) > 1 for i in plain):
        assert ids == plain  # else a user-defined token such as <think>, which a guarded "<" keeps from matching too
