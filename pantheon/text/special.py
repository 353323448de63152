"""Special tokens: which ids control the model, which end an answer, and where their texts split a prompt.

Knows no merging and no bytes; works on a checked `Vocab`.  Rules as llama.cpp applies them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pantheon.text.vocab import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocab

# Tokens that end generation by their text, and become control tokens whatever type the file gives them.
_EOG_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<\uff5cend\u2581of\u2581sentence\uff5c> [e~["
)
# Fill-in-the-middle tokens, first hit counts; (role, ends generation, texts).
_FIM = (
    (
        "fim_pre",
        False,
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> "
        "<PRE> \u2581<PRE> <|code_prefix|> <|prefix|>",
    ),
    (
        "fim_suf",
        False,
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> "
        "<SUF> \u2581<SUF> <|code_suffix|> <|suffix|>",
    ),
    (
        "fim_mid",
        False,
        "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> "
        "<MID> \u2581<MID> <|code_middle|> <|middle|>",
    ),
    ("fim_pad", True, "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    ("fim_rep", True, "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    ("fim_sep", True, "<|file_sep|>"),
)
# gpt-oss marks parts of an answer with these, so they always print.
_ALWAYS_PRINT = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_KEEP_SPACE_AFTER = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's exceptions
_C_SPACE = " \t\n\v\f\r"
_PROBE = 3  # characters of a special text that the scan looks for


@dataclass(frozen=True)
class Specials:
    """Token types after the corrections by text, and what follows from them."""

    types: list[int]
    eog_ids: frozenset[int]
    hidden: frozenset[int]  # control and unknown tokens: print nothing unless asked
    fim: dict[str, int]  # fill-in-the-middle tokens by role: pre, suf, mid, pad, rep, sep


def classify(vocab: Vocab) -> Specials:
    """Correct the types by token text and collect the end-of-generation ids (eos, eot, eom, FIM ends, _EOG_TEXTS)."""
    types = list(vocab.types)
    eog = {vocab.special[r] for r in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep") if r in vocab.special}
    fim = {}
    for role, ends, names in _FIM:
        if role in vocab.special:
            fim[role.removeprefix("fim_")] = vocab.special[role]
            continue
        token = next((vocab.ids[t] for t in names.split(" ") if t in vocab.ids), None)
        if token is not None:
            fim[role.removeprefix("fim_")] = token
            types[token] = CONTROL
            if ends:
                eog.add(token)
    for text in _EOG_TEXTS.split():
        if text in vocab.ids:
            types[vocab.ids[text]] = CONTROL
            eog.add(vocab.ids[text])
    for text in _ALWAYS_PRINT:
        if text in vocab.ids:
            types[vocab.ids[text]] = USER_DEFINED
    _drop_false_ends(vocab, types, eog)
    hidden = frozenset(i for i, t in enumerate(types) if t in (CONTROL, UNKNOWN))
    return Specials(types, frozenset(eog), hidden, fim)


def _drop_false_ends(vocab: Vocab, types: list[int], eog: set[int]) -> None:
    """`<|end|>` only ends a part of an answer where `<|return|>` exists too; `</s>` is a plain word for Gemma 4."""
    have = {vocab.tokens[i] for i in eog}
    called = "<|call|>" in have or "<|calls|>" in have
    if "<|end|>" in have and called and ("<|return|>" in have or "<|flush|>" in have):
        eog.discard(vocab.ids["<|end|>"])
        types[vocab.ids["<|end|>"]] = USER_DEFINED
    if "</s>" in have and "<|tool_response>" in have:
        eog.discard(vocab.ids["</s>"])
        types[vocab.ids["</s>"]] = NORMAL


class Partition:
    """Splits text at special tokens: the longest token text first over the whole text, not the leftmost first."""

    def __init__(self, vocab: Vocab, specials: Specials) -> None:
        ids = [i for i, t in enumerate(specials.types) if t in (UNKNOWN, CONTROL, USER_DEFINED)]
        ids.sort(key=lambda i: -len(vocab.tokens[i].encode("utf-8", "surrogateescape")))
        strips = _strip_after(vocab, ids)
        self._rank = {i: n for n, i in enumerate(ids)}
        self._text = {i: vocab.tokens[i] for i in ids}
        self._strips = strips
        self._all = _Finder({vocab.tokens[i]: i for i in ids})
        self._plain = _Finder({vocab.tokens[i]: i for i in ids if specials.types[i] == USER_DEFINED})

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """Raw fragments (str, never empty) and token ids, in order."""
        present = (self._all if parse_special else self._plain).present(text)
        fragments: list[str | int] = [text] if text else []
        for token in sorted(present, key=self._rank.__getitem__):
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, str):
                    cut.extend(self._cut(fragment, token))
                else:
                    cut.append(fragment)
            fragments = cut
        return fragments

    def _cut(self, text: str, token: int) -> Iterator[str | int]:
        mark, strips = self._text[token], token in self._strips
        start = 0
        while (at := text.find(mark, start)) >= 0:
            if at > start:
                yield text[start:at]
            yield token
            start = at + len(mark)
            while strips and start < len(text) and text[start] in _C_SPACE:
                start += 1
        if start < len(text):
            yield text[start:]


def _strip_after(vocab: Vocab, ids: list[int]) -> frozenset[int]:
    """Phi-3 tokens swallow the white space that follows them (the file does not say so; its name does)."""
    if not ("phi-3" in vocab.name or "phi3" in vocab.name):
        return frozenset()
    return frozenset(i for i in ids if vocab.tokens[i] not in _KEEP_SPACE_AFTER)


class _Finder:
    """Which of many texts occur in a string, in one scan: thousands of `in` tests would take seconds per megabyte."""

    def __init__(self, texts: dict[str, int]) -> None:
        self._texts = texts
        lengths: dict[str, set[int]] = defaultdict(set)
        for text in texts:
            lengths[text[:_PROBE]].add(len(text))
        self._lengths = {probe: sorted(ns) for probe, ns in lengths.items()}
        # Longest probe first, and look-ahead so that hits may overlap; shorter probes are looked up beside.
        probes = sorted(self._lengths, key=len, reverse=True)
        self._scan = re.compile("(?=(" + "|".join(map(re.escape, probes)) + "))") if probes else None

    def present(self, text: str) -> set[int]:
        found: set[int] = set()
        if self._scan is None:
            return found
        for hit in self._scan.finditer(text):
            at, probe = hit.start(), hit[1]
            for size in range(1, len(probe) + 1):
                for n in self._lengths.get(probe[:size], ()):
                    token = self._texts.get(text[at : at + n])
                    if token is not None:
                        found.add(token)
        return found
