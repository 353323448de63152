"""The incremental detokenizer: any chunking of bytes equals the decode of the whole.  [B14]"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pantheon.text.detokenizer import Detokenizer
from pantheon.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.tok_vocab import bpe, spm, tokenizer

BYTES = load_tokenizer(bpe(control=("<|im_end|>",)))
LETTERS = "\u65e5\u672c\U0001f916e\u0301\u00df"


def stream(tok: Tokenizer, ids: list[int], *, special: bool = False) -> list[str]:
    detokenizer = Detokenizer(tok, special=special)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def test_emoji_in_parts() -> None:
    """B14: half characters wait, ASCII in front of them does not, nothing is replaced."""
    data = bytes.fromhex("6869 20f09fa496 20e697a5 21")
    pieces = stream(BYTES, list(data))
    assert pieces == ["h", "i", " ", "", "", "", "\U0001f916", " ", "", "", "\u65e5", "!", ""]


def test_cut_off_character_is_replaced_at_the_end() -> None:
    assert stream(BYTES, [0x61, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_invalid_bytes_are_replaced_at_once() -> None:
    """A byte that can not go on a character ends the wait; the next good character is whole."""
    assert stream(BYTES, [0xFF, 0xE6, 0x41, 0xC3, 0xA9]) == ["\ufffd", "", "\ufffdA", "", "\u00e9", ""]


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.binary(max_size=40), st.text(alphabet=LETTERS, max_size=10).map(str.encode)))
@example(b"\xed\xa0\x80\xf4\x90\x80\x80\xc0\x80")
def test_any_bytes(data: bytes) -> None:
    """B14: the pieces joined are bytes.decode('utf-8', 'replace') of the whole; at most three bytes wait."""
    detokenizer = Detokenizer(BYTES)
    text = ""
    for n, byte in enumerate(data):
        text += detokenizer.push(byte)
        assert any(data[: max(0, n + 1 - wait)].decode("utf-8", "replace") == text for wait in range(4))
    assert text + detokenizer.flush() == data.decode("utf-8", "replace")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(min_size=1, max_size=6), max_size=10))
def test_any_chunking(chunks: list[bytes]) -> None:
    """Tokens of several bytes, broken anywhere."""

    class Chunks:
        def token_bytes(self, id: int, *, special: bool = False) -> bytes:
            return chunks[id]

        def strips_first(self, special: bool) -> bool:
            return False

    pieces = stream(Chunks(), list(range(len(chunks))))  # type: ignore[arg-type]
    assert "".join(pieces) == b"".join(chunks).decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral", "tiny-gemma3", "tiny-p3", "phi-3", "gpt-2"])
@pytest.mark.parametrize("special", [False, True])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_streamed_is_whole(name: str, special: bool, data: st.DataObject) -> None:
    """Any ids of any vocabulary: the stream joined is the decode of the whole."""
    tok = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tok.n_vocab - 1), max_size=30))
    assert "".join(stream(tok, ids, special=special)) == tok.decode(ids, special=special, clean=False)


def test_leading_space_of_sentencepiece() -> None:
    """The prefix space of the first word goes, later ones and those on request stay."""
    tok = load_tokenizer(spm({"\u2581a": -1.0, "\u2581b": -2.0}))
    ids = [259, 260]
    assert stream(tok, ids) == ["a", " b", ""] and tok.decode(ids) == "a b"
    assert "".join(stream(tok, ids, special=True)) == " a b"


def test_control_tokens_are_silent() -> None:
    """Control tokens print nothing in the middle of a character either."""
    assert stream(BYTES, [0xC3, 256, 0xA9]) == ["", "", "\u00e9", ""]
    assert "".join(stream(BYTES, [0x61, 256], special=True)) == "a<|im_end|>"


def test_clean_up_is_for_whole_texts_only() -> None:
    """decode() drops spaces before punctuation where the vocabulary asks for it; a stream never does."""
    ids = BYTES.encode("it 's fine , ' or ' not ?")
    assert BYTES.decode(ids) == "it's fine,'or'not?"
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids, clean=False) == "it 's fine , ' or ' not ?"


def test_flush_leaves_a_fresh_detokenizer() -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.push(0xE6)
    assert detokenizer.flush() == "\ufffd" and detokenizer.push(0x41) == "A" and detokenizer.flush() == ""
