"""One tokenizer face for every vocabulary: text to ids and back.

`load_tokenizer(metadata)` reads the `tokenizer.*` keys; this module joins the special-token partition, one of the
mergers and the begin/end rules.  It knows no prompt format and no request.  Exact against llama.cpp, with one
difference on purpose: plain text never becomes a control token, even where merges would spell one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from pantheon.errors import BadRequest
from pantheon.text.bpe import ByteBpe, RawBpe
from pantheon.text.pretokenize import ADD_BOS, KEEPS_SPACES, RAW, pretokenizer
from pantheon.text.special import Partition, classify
from pantheon.text.spm import Spm
from pantheon.text.vocab import BYTE, NORMAL, Vocab, VocabError, key, read_vocab

_SURROGATE = re.compile("[\ud800-\udfff]")
_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEAN_UP = ((rb" (?=[?!.,])", b""), (rb" ' ", b"'"), (rb" (?='(?:s|m|re|ve))", b""))


class _Merger(Protocol):
    #: no character of a text is ever left out
    keeps_all: bool

    def encode(self, text: str) -> list[int]: ...
    def token_bytes(self, text: str) -> bytes: ...


def load_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer from GGUF metadata.  Raises VocabError (a PantheonError) naming the key at fault."""
    return Tokenizer(read_vocab(metadata))


class Tokenizer:
    """Text to ids and back; read-only after load and safe to share between threads."""

    def __init__(self, vocab: Vocab) -> None:
        specials = classify(vocab)
        forbidden = frozenset(vocab.tokens[i] for i in specials.hidden)
        pre_name = "gemma4" if vocab.model == "gemma4" else vocab.pre
        self._vocab = vocab
        self._types = specials.types
        self._hidden = specials.hidden
        self._partition = Partition(vocab, specials)
        self._merger, self._keeps_bytes = _merger(vocab, pre_name, forbidden)
        self._bytes: list[bytes | None] = [None] * len(vocab.tokens)
        spm = vocab.model == "llama"
        self._space_prefix = spm and vocab.flags.get("add_space_prefix", True)
        self._clean_up = not spm and pre_name not in KEEPS_SPACES
        self._longest = max(map(len, vocab.tokens)) if self._merger.keeps_all else 0
        self.n_vocab = len(vocab.tokens)
        self.bos_id: int | None = vocab.special.get("bos")
        self.eos_id: int | None = vocab.special.get("eos")
        self.add_bos: bool = vocab.flags.get("add_bos_token", spm or pre_name in ADD_BOS) or pre_name == "gemma4"
        self.add_eos: bool = vocab.flags.get("add_eos_token", False)
        self.eog_ids: frozenset[int] = specials.eog_ids
        #: fill-in-the-middle tokens by role (pre, suf, mid, pad, rep, sep); most vocabularies have none
        self.fim: dict[str, int] = specials.fim
        self.control_texts: tuple[str, ...] = tuple(vocab.tokens[i] for i in sorted(specials.hidden))
        for wanted, token, name in ((self.add_bos, self.bos_id, "bos"), (self.add_eos, self.eos_id, "eos")):
            if wanted and token is None:
                raise VocabError(key(f"{name}_token_id"), "missing, though this vocabulary adds it to every prompt")

    def encode(
        self,
        text: str | bytes,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        guard: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Ids of a text; bytes that are no UTF-8 are kept where the vocabulary can, else become U+FFFD.

        parse_special: texts of control tokens become these tokens (for template markup, never for user text).
        guard: {placeholder character: real character}, put back after the special tokens are found, so that guarded
        text can not become one.
        """
        whole, table = self._as_text(text), str.maketrans(dict(guard)) if guard else None
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        after_special = True
        for fragment in self._partition.split(whole, parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
                after_special = True
                continue
            if table is not None:
                fragment = fragment.translate(table)
            if isinstance(text, str):
                fragment = _without_surrogates(fragment)
            prefix = " " if self._space_prefix and after_special else ""
            ids += self._merger.encode(prefix + fragment)
            after_special = False
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def least(self, text: str) -> int:
        """A lower bound for the length of `encode(text)`, without encoding it."""
        return -(-len(text) // self._longest) if self._longest else 0

    def _as_text(self, text: str | bytes) -> str:
        if isinstance(text, str):
            return text
        if not isinstance(text, bytes | bytearray | memoryview):
            raise BadRequest(f"text must be a string or bytes, is {type(text).__name__}", param="text")
        return bytes(text).decode("utf-8", "surrogateescape" if self._keeps_bytes else "pantheon-each-byte")

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:
        """What an id prints: nothing for control, unknown and unused tokens; `special` shows the first two."""
        self._check(id)
        if id in self._hidden and not special:
            return b""
        known = self._bytes[id]
        if known is None:
            known = self._bytes[id] = self._print(id)
        return known

    def _print(self, id: int) -> bytes:
        text, kind = self._vocab.tokens[id], self._types[id]
        if kind == NORMAL:
            return self._merger.token_bytes(text)
        if kind == BYTE:
            value = _HEX_BYTE.fullmatch(text)
            return bytes([int(value[1], 16)]) if value else text.encode("utf-8", "surrogateescape")
        return b"" if self.is_silent(id) else text.encode("utf-8", "surrogateescape")

    def token_text(self, id: int) -> str:
        """The vocabulary string of an id."""
        self._check(id)
        return self._vocab.tokens[id]

    def token_id(self, text: str) -> int | None:
        """The id of a vocabulary string."""
        return self._vocab.ids.get(text)

    def is_control(self, id: int) -> bool:
        """True for tokens that steer the model and print nothing (control and unknown tokens)."""
        return id in self._hidden

    def is_silent(self, id: int) -> bool:
        """True for ids that never print, not even on request: unused ones and those of a type that nobody knows."""
        return self._types[id] not in _PRINTING

    def decode(self, ids: Iterable[int], *, special: bool = False, clean: bool | None = None) -> str:
        """The text of a whole sequence.

        special=False is the readable text as llama.cpp's and Hugging Face's decode give it: the space that a
        SentencePiece vocabulary puts before the first word is dropped, and vocabularies that ask for it lose spaces
        before punctuation (`clean` overrides that; a streamed answer is never cleaned).
        special=True prints every token as it is.
        """
        ids = list(ids)
        pieces = [self.token_bytes(i, special=special) for i in ids]
        if pieces and self.strips_first(special):
            pieces[0] = pieces[0].removeprefix(b" ")
        data = b"".join(pieces)
        if clean or (clean is None and self._clean_up and not special):
            for pattern, to in _CLEAN_UP:
                data = re.sub(pattern, to, data)
        return data.decode("utf-8", "replace")

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """`encode`, as the Python API spells it."""
        return self.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Iterable[int], special: bool = False) -> str:
        """`decode`, as the Python API spells it."""
        return self.decode(ids, special=special)

    def strips_first(self, special: bool) -> bool:
        """True when the first token of a sequence loses its leading space."""
        return self._space_prefix and not special

    def _check(self, id: int) -> None:
        if not 0 <= id < self.n_vocab:
            raise BadRequest(f"token id {id} is outside the vocabulary of {self.n_vocab} tokens", param="ids")


_PRINTING = frozenset({1, 2, 3, 4, 6})


def _merger(vocab: Vocab, pre_name: str, forbidden: frozenset[str]) -> tuple[_Merger, bool]:
    """The merger of a vocabulary, and whether it keeps bytes that are no UTF-8."""
    if vocab.model == "llama":
        return Spm(vocab, forbidden), True
    pre = pretokenizer(pre_name)
    return (RawBpe if pre_name in RAW else ByteBpe)(vocab, pre, forbidden), False


def _without_surrogates(text: str) -> str:
    """Half surrogates can not be UTF-8; JSON lets a client send them."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _each_byte(fault: UnicodeError) -> tuple[str, int]:
    """Decoding: one U+FFFD for each bad byte (Python's own `replace` gives one for each bad sequence)."""
    if not isinstance(fault, UnicodeDecodeError):
        raise fault
    return "\ufffd" * (fault.end - fault.start), fault.end


codecs.register_error("pantheon-each-byte", _each_byte)
