"""Pre-tokenizers of byte-level BPE: which regular expressions cut text into words, by `tokenizer.ggml.pre`.

A pre-tokenizer is a list of stages; each stage cuts the pieces of the one before, and text that a stage does not
match is kept as a piece of its own, so that the pieces always join to the text.  Knows no vocabulary.
Patterns: those the models were trained with (Hugging Face `tokenizer.json`), as llama.cpp names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import regex

from pantheon.text.vocab import VocabError, key

_SLICE = 4096  # characters handed to one call of the regex module, which holds the GIL meanwhile: half a millisecond

# Places where every supported pattern ends a piece whatever stands left or right, so that slices change nothing:
# between a letter and " letter", after the line end of "x\ny", between a Han or kana letter and a full stop or comma.
_CUT = regex.compile(
    r"[A-Za-z](?= [A-Za-z])|[^\s]\n(?=\S)|[\u4e00-\u9fa5\u3041-\u3096\u30a1-\u30fa](?=[\u3002\uff0c\u3001])"
)

_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCT = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCT}|{_SPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCT}|{_SPACE}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCT_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased(suffix: str, numbers: str) -> str:
    """Words that break where lower case turns to upper case (GPT-4o and its kin)."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{numbers}|{_PUNCT_SLASH}|{_SPACE}"


_GPT4O = _cased(rf"(?:{_CONTRACTION})?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_ASCII_PUNCT = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCT}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)
_SPARK = (
    rf"{_ASCII_PUNCT}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
)
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _run(items: str) -> tuple[str, str]:
    """Runs of a character class, and the rest."""
    return f"[{items}]+", f"[^{items}]+"


def _gaps(pattern: str) -> tuple[str, str]:
    """Any pattern, and what lies between its matches."""
    return pattern, rf"(?:(?!{pattern})[\s\S])+"


_DIGIT = (r"\p{N}", r"\P{N}+")
_DIGITS3 = (r"\p{N}{1,3}", r"\P{N}+")
_LINE_END = (r"[\r\n]", r"[^\r\n]+")
_CJK = _run(r"\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff")
# U+0800 to U+9FA5 without its white space, which llama.cpp never takes for a letter.
_HAN_HANGUL = _run(
    r"\u0800-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-\u9fa5\uac00-\ud7ff"
)
_PUNCT_RUN = r"\p{P}\$\+<=>\^~\|"
_THREE = _gaps("[0-9]{3}")
_LINES = (r"[^\n]+", r"\n+")
_WESTERN = _gaps(r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+")
_YOUTU = _gaps(
    r"(?:[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+)"
)
_JAIS2_SPACE = "|".join([*(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s"])

Stage = tuple[str, ...]

# (names, stages).  A stage is a tuple of alternatives that together cover every text.
_TABLE: tuple[tuple[str, tuple[Stage, ...]], ...] = (
    (
        "gpt-2 phi-2 mpt olmo jais exaone4 modern-bert jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum",
        ((_GPT2,),),
    ),
    (
        "trillion granite-docling",
        ((_GPT2,),),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (_DIGIT, (_GPT2,))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe",
        ((_LLAMA3,),),
    ),
    (
        "glm4 glm5",
        ((_LLAMA3,),),
    ),
    (
        "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan kormo f2llmv2 solar-open grok-2",
        ((_QWEN2,),),
    ),
    ("qwen35", ((_QWEN35,),)),
    ("gpt-4o llama4 minimax-m2 kanana2 talkie", ((_GPT4O,),)),
    ("tekken", ((_TEKKEN,),)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (_DIGITS3, _CJK, _gaps(f"(?:{_DEEPSEEK3})"))),
    ("spark2_5", (_DIGITS3, _CJK, _gaps(f"(?:{_SPARK})"), _DIGIT)),
    ("deepseek-coder", (_LINE_END, _gaps(r"\s?\p{L}+"), _gaps(r"\s?\p{P}+"), _HAN_HANGUL, _DIGIT)),
    (
        "deepseek-llm",
        (
            _LINE_END,
            _gaps(rf"\s?[{_CASED_LETTERS}]+"),
            _gaps(r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+"),
            (r"\s+\Z", r"[\s\S]*\S"),  # white space at the end of a piece
            _HAN_HANGUL,
            (r"\p{N}+", r"\P{N}+"),
        ),
    ),
    ("falcon", (_run(_PUNCT_RUN + "`"), (_GPT2,), _THREE)),
    ("default", (_run(_PUNCT_RUN), (_GPT2,), (r"\p{N}+", r"\P{N}+"), _THREE)),
    ("poro-chat bloom gpt3-finnish", (_WESTERN,)),
    ("viking", (_WESTERN, _DIGIT)),
    ("jais-2", ((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCT}|\s*[\r\n]+|{_JAIS2_SPACE}",),)),
    ("seed-coder", ((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}",),)),
    (
        "bailingmoe bailingmoe2 llada-moe",
        ((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCT}|\s*[\r\n]|\s+(?!\S)|\s+",),),
    ),
    ("ufakzeka", ((rf"{_WORD}|\p{{N}}|{_PUNCT}|{_SPACE}",),)),
    ("laguna", (_LINES, (_QWEN2,))),
    ("youtu", (_YOUTU, (_cased(rf"(?:{_CONTRACTION})?", r"\p{N}"),))),
    ("minicpm5", (_DIGITS3, (rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_PUNCT}|{_SPACE}",))),
    ("gemma4 sarvam-moe", (_LINES,)),
)
_STAGES = {name: stages for names, stages in _TABLE for name in names.split()}


# Stages run before the word cache; the later ones look at one word only and run once per new word.
_OUTER = {"deepseek-coder": 2, "deepseek-llm": 2, "falcon": 2, "default": 2, "spark2_5": 3, "viking": 1}

RAW = frozenset({"gemma4", "sarvam-moe"})  # merge raw UTF-8 lines instead of byte-alphabet words
IGNORE_MERGES = _names(
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano glm4 glm5 tekken youtu minicpm5"
)
ADD_BOS = _names("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken gemma4")
KEEPS_SPACES = _names(
    "deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu sarvam-moe command-r qwen2 deepseek-r1-qwen kormo f2llmv2 "
    "qwen35 poro-chat viking tekken smollm gpt-4o llama4 kanana2 talkie trillion granite-docling bailingmoe "
    "bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm ufakzeka grok-2 laguna minimax-m2 "
    "solar-open"
)  # families whose whole-sequence decode leaves spaces before punctuation alone


@dataclass(frozen=True)
class Pretokenizer:
    """Cuts text into words.  `words` runs the stages that need context, `refine` those that look at one word."""

    name: str
    outer: tuple[regex.Pattern[str], ...]
    inner: tuple[regex.Pattern[str], ...]

    def words(self, text: str) -> Iterator[list[str]]:
        """Lists of words which joined give the text; one list per slice of about 4 thousand characters."""
        for piece in [text] if self.name in RAW else slices(text):
            yield _cut([piece], self.outer)

    def refine(self, word: str) -> list[str]:
        """The final pieces of one word."""
        return _cut([word], self.inner)

    def split(self, text: str) -> list[str]:
        """All pieces of a text (for tests and tools; encoding goes through `words`)."""
        return [piece for words in self.words(text) for word in words for piece in self.refine(word)]


def pretokenizer(name: str) -> Pretokenizer:
    """The pre-tokenizer of `tokenizer.ggml.pre`; "" means "default".  Raises VocabError for an unknown name."""
    name = name or "default"
    if name not in _STAGES:
        raise VocabError(key("pre"), f"unknown pre-tokenizer {name!r}")
    stages = tuple(regex.compile("|".join(stage)) for stage in _STAGES[name])
    outer = _OUTER.get(name, len(stages))
    return Pretokenizer(name, stages[:outer], stages[outer:])


def known() -> tuple[str, ...]:
    """Every supported name, sorted."""
    return tuple(sorted(_STAGES))


def slices(text: str) -> Iterator[str]:
    """Cut long text where no pattern cares; a text without such a place comes in one piece."""
    start = 0
    while len(text) - start > _SLICE:
        found = _CUT.search(text, start + _SLICE)
        if found is None:
            break
        yield text[start : found.end()]
        start = found.end()
    if start < len(text):
        yield text[start:] if start else text


def _cut(pieces: list[str], stages: tuple[regex.Pattern[str], ...]) -> list[str]:
    for stage in stages:
        if len(pieces) == 1:
            pieces = stage.findall(pieces[0])
        else:
            pieces = [part for piece in pieces for part in stage.findall(piece)]
    return pieces
