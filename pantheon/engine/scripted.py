"""The scripted model: a test seam that answers with given pieces, under the real tokenizer, sampler and loop.

Only the runner and the vocabulary are made up: every wanted column of a conversation asks for the next piece, so
prompts, templates, detokenizer, stop strings, tools and streams run as they do over weights.  `script:FILE.json`
stands wherever a model path is taken.

A script is a JSON object; every key but `pieces` may be left out:

    pieces      list of what is emitted, one token each: "text", {"hex": "f09f"} (bytes, may cut a character),
                {"special": "<|eot_id|>"} (a control token), {"user": "<think>"} (a user-defined token)
    then        {"text in the prompt": pieces}: what is emitted instead behind such a prompt; the last one that is found
                counts, so that the turns of an agent can differ: {"<tool_response>": ["done"]}
    eog         true: the end-of-generation token follows the last piece; false: the filler follows for ever
    filler      text that is repeated when eog is false (" ...")
    template    chat template source; null for ChatML
    n_ctx       context length in tokens (131072; text that is no piece costs one token a byte)
    prefill_ms, decode_ms   how long each prefill chunk and each decode step sleeps
    fail_at     k: the k-th decode step of every answer raises (PN_FAIL_AT=forward@k does so once)
    name        the model's name ("scripted")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon import seams
from pantheon.accel.executor import Columns, Progress, RunnerState
from pantheon.engine.model import Model
from pantheon.errors import PantheonError
from pantheon.plan.builder import Plan, PlanBuilder
from pantheon.plan.state_spec import KVType, StateSpec
from pantheon.text.chat_template import CHATML, ChatTemplate
from pantheon.text.tokenizer import Tokenizer, load_tokenizer

#: Marks a path as a script.
PREFIX = "script:"
#: Logit of the scripted token; the rest have 0: far above any bias or penalty, yet a mask still leaves a choice.
CERTAIN = 1000.0

CONTROL_TEXTS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
)  # fmt: skip
_NORMAL, _CONTROL, _USER = 1, 3, 4


@dataclass(frozen=True)
class Piece:
    """One scripted emission: `data` as bytes, and the token type that it gets in the vocabulary."""

    data: bytes
    kind: int = _NORMAL


@dataclass(frozen=True)
class Script:
    """A checked script; see the module's docstring for the fields."""

    pieces: tuple[Piece, ...]
    then: tuple[tuple[bytes, tuple[Piece, ...]], ...] = ()
    template: str | None = None
    n_ctx: int = 131_072
    eog: bool = True
    filler: Piece = field(default=Piece(b" ..."))
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    fail_at: int | None = None
    name: str = "scripted"


def parse_script(spec: Mapping[str, Any], source: str = "script") -> Script:
    """The checked form of a script.  Raises PantheonError naming `source` and the key at fault."""
    checked: dict[str, Any] = {}
    for key, value in spec.items():
        if key not in _CHECKS:
            raise _fault(source, f"unknown key {key!r}; known: {', '.join(_CHECKS)}")
        try:
            checked[key] = _CHECKS[key](value)
        except (TypeError, ValueError) as fault:
            raise _fault(source, f"{key}: {fault}") from None
    if "pieces" not in checked:
        raise _fault(source, "the key 'pieces' is missing")
    try:
        _check_kinds([*checked["pieces"], *(piece for _, part in checked.get("then", ()) for piece in part)])
    except ValueError as fault:
        raise _fault(source, f"pieces: {fault}") from None
    return Script(**checked)


def load_script(path: str | Path) -> Model:
    """The scripted model of a JSON file, `script:` in front or not.  Raises PantheonError naming the file."""
    file = str(path).removeprefix(PREFIX)
    try:
        spec = json.loads(Path(file).read_text("utf-8"))
    except OSError as fault:
        raise _fault(file, fault.strerror or str(fault)) from None
    except ValueError as fault:
        raise _fault(file, f"not JSON in UTF-8: {fault}") from None
    if not isinstance(spec, dict):
        raise _fault(file, "a script is a JSON object")
    return _build(parse_script(spec, file))


def scripted_model(spec: Mapping[str, Any], *, clock: seams.Clock = seams.SYSTEM_CLOCK) -> Model:
    """A model that emits the spec's pieces; sleeps go through `clock`.  Raises PantheonError for a bad spec."""
    return _build(parse_script(spec), clock)


def _build(script: Script, clock: seams.Clock = seams.SYSTEM_CLOCK) -> Model:
    tokenizer, id_of = script_tokens(script)
    last = tokenizer.eos_id if script.eog else id_of[script.filler.data]
    assert last is not None
    runner = ScriptedRunner(script, id_of, last, tokenizer.n_vocab, clock)
    return Model(
        name=script.name,
        path=None,
        architecture="scripted",
        plan=runner.plan,
        runner=runner,
        tokenizer=tokenizer,
        template=ChatTemplate(CHATML if script.template is None else script.template),
        n_ctx=script.n_ctx,
    )


# ---- the vocabulary ---------------------------------------------------------------------------------------------


def script_tokens(script: Script) -> tuple[Tokenizer, dict[bytes, int]]:
    """The tokenizer, and the id of every token's bytes.

    A text piece that is spelled like a control token of the vocabulary stays text: it is emitted as two tokens.
    """
    answers = [script.pieces, *(pieces for _, pieces in script.then)]
    pieces = [part for answer in answers for piece in answer for part in _plain(piece)]
    tokens, types = list(_ALPHABET), [_NORMAL] * 256
    ids = {data: i for i, data in enumerate(bytes([b]) for b in range(256))}
    controls = [Piece(text.encode(), _CONTROL) for text in CONTROL_TEXTS]
    for piece in [*controls, *pieces, script.filler]:
        if piece.data not in ids:
            ids[piece.data] = len(tokens)
            tokens.append(_printable(piece.data) if piece.kind == _NORMAL else piece.data.decode())
            types.append(piece.kind)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        # a list of merges must not be empty: bytes C0 C1 never stand in UTF-8, so that text stays one token a byte
        "tokenizer.ggml.merges": [f"{_ALPHABET[0xC0]} {_ALPHABET[0xC1]}"],
        "tokenizer.ggml.eos_token_id": ids[b"<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }
    return load_tokenizer(metadata), ids


#: Texts that a tokenizer takes for end-of-generation tokens wherever they stand in a vocabulary.
_END_TEXTS = frozenset((
    "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "</s>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
_NEVER_TEXT = {text.encode() for text in (*CONTROL_TEXTS, *_END_TEXTS)}


def _plain(piece: Piece) -> list[Piece]:
    """The piece, or its two halves when its text would be taken for a control token."""
    if piece.kind == _NORMAL and piece.data in _NEVER_TEXT:
        return [Piece(piece.data[:2]), Piece(piece.data[2:])]
    return [piece]


def _ids_of(pieces: Sequence[Piece], ids: Mapping[bytes, int]) -> list[int]:
    return [ids[part.data] for piece in pieces for part in _plain(piece)]


def _byte_alphabet() -> list[str]:
    """The printable stand-in of every byte in byte-level BPE vocabularies (Radford et al. 2019)."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


_ALPHABET = _byte_alphabet()


def _printable(data: bytes) -> str:
    return "".join(_ALPHABET[b] for b in data)


# ---- the runner -------------------------------------------------------------------------------------------------


class ScriptedState:
    """How many pieces of its answer each slot has been asked for, its decode steps, and (with `then`) what it read."""

    def __init__(self, n_slots: int, n_ctx: int) -> None:
        self.n_slots = n_slots
        self.n_ctx = n_ctx
        self.asked = [0] * n_slots
        self.steps = [0] * n_slots
        self.read: list[list[int]] = [[] for _ in range(n_slots)]
        self.answer: list[list[int]] = [[] for _ in range(n_slots)]

    def reset(self, slot: int) -> None:
        """Begin the script again."""
        self.truncate(slot, 0)

    def truncate(self, slot: int, n: int) -> None:
        """Begin the script again."""
        self.asked[slot] = self.steps[slot] = 0
        del self.read[slot][n:]

    def copy_prefix(self, source: int, target: int, n: int, first: int = 0) -> None:
        """What was read goes along."""
        self.read[target][first:] = self.read[source][first:n]

    def nbytes(self) -> int:
        """A script keeps no rows."""
        return 0


class ScriptedRunner:
    """An `accel.executor.Runner` that puts all mass on the script's next token."""

    kv_type = KVType.F32
    max_columns = 512

    def __init__(self, script: Script, ids: Mapping[bytes, int], last: int, n_vocab: int, clock: seams.Clock) -> None:
        """`ids` of every token's bytes; `last` follows an answer for ever."""
        self.plan = _empty_plan(n_vocab, script.n_ctx)
        self._script = script
        self._bytes = {id: data for data, id in ids.items()}
        self._answer = _ids_of(script.pieces, ids)
        self._then = [(text, _ids_of(pieces, ids)) for text, pieces in script.then]
        self._last = last
        self._clock = clock

    def new_state(self, n_slots: int, n_ctx: int) -> ScriptedState:
        """A state for n_slots conversations, each at the beginning of the script."""
        return ScriptedState(n_slots, n_ctx)

    def forward(self, state: RunnerState, columns: Columns) -> NDArray[np.float32]:
        """float32 [n_wanted, n_vocab]: CERTAIN for the scripted token, 0 elsewhere.

        Sleeps as the script says; raises InjectedFailure at the decode step that fail_at names.
        """
        assert isinstance(state, ScriptedState)
        columns.check(self.plan.n_vocab, state.n_slots, state.n_ctx)
        self._pass_time(state, columns)
        if self._then:
            for token, slot, position in zip(columns.tokens, columns.slots, columns.positions, strict=True):
                state.read[slot][position:] = [int(token)]
        logits = np.zeros((len(columns.wanted), self.plan.n_vocab), np.float32)
        for i, column in enumerate(columns.wanted.tolist()):
            slot = int(columns.slots[column])
            asked = state.asked[slot]
            if asked == 0:
                state.answer[slot] = self._choose(state.read[slot])
            answer = state.answer[slot]
            logits[i, answer[asked] if asked < len(answer) else self._last] = CERTAIN
            state.asked[slot] = asked + 1
        return logits

    def _choose(self, read: list[int]) -> list[int]:
        """The answer to what was read."""
        prompt = b"".join(self._bytes[token] for token in read)
        return next((answer for text, answer in reversed(self._then) if text in prompt), self._answer)

    def hidden(self, state: RunnerState, columns: Columns) -> NDArray[np.float32]:
        """float32 [n_wanted, 8]: what a token looks like, wherever it stands."""
        assert isinstance(state, ScriptedState)
        columns.check(self.plan.n_vocab, state.n_slots, state.n_ctx)
        tokens = columns.tokens[columns.wanted].astype(np.float64)
        rows: NDArray[np.float32] = np.cos(tokens[:, None] * np.arange(1, 9)).astype(np.float32)
        return rows

    def _pass_time(self, state: ScriptedState, columns: Columns) -> None:
        """A slot that was asked before and brings one column is decoding; the rest is prefill."""
        slots, counts = np.unique(columns.slots, return_counts=True)
        decoding = [s for s, n in zip(slots.tolist(), counts.tolist(), strict=True) if n == 1 and state.asked[s]]
        pause_ms = self._script.prefill_ms if len(decoding) < len(slots) else 0.0
        pause_ms = max(pause_ms, self._script.decode_ms if decoding else 0.0)
        if pause_ms > 0:
            self._clock.sleep(pause_ms / 1000)
        for slot in decoding:
            state.steps[slot] += 1
            if state.steps[slot] == self._script.fail_at:
                raise seams.InjectedFailure(f"the script fails at decode step {self._script.fail_at}")

    def warm_up(self, progress: Progress | None = None) -> None:
        """Nothing to compile."""

    def memory(self) -> dict[str, int]:
        """A script has no weights."""
        return {"weights": 0, "scratch": 0}

    def close(self) -> None:
        """Nothing to free."""


def _empty_plan(n_vocab: int, n_ctx: int) -> Plan:
    """A plan with no ops: only its numbers are read."""
    builder = PlanBuilder()
    hidden = builder.buffer("hidden", 1)
    builder.begin_head(hidden)
    return builder.finish("scripted", n_vocab, n_ctx, builder.buffer("logits", n_vocab), StateSpec(kv=()))


# ---- checks -----------------------------------------------------------------------------------------------------


def _fault(source: str, what: str) -> PantheonError:
    return PantheonError(f"{source}: {what}", status=422, type="invalid_request_error", code="invalid_script")


def _piece(value: Any) -> Piece:
    if isinstance(value, str):
        data, kind = value.encode(), _NORMAL
    elif isinstance(value, dict) and len(value) == 1 and isinstance(text := next(iter(value.values())), str):
        form = next(iter(value))
        if form not in ("hex", "special", "user"):
            raise ValueError(f"a piece has no form {form!r}")
        data = bytes.fromhex(text) if form == "hex" else text.encode()
        kind = {"hex": _NORMAL, "special": _CONTROL, "user": _USER}[form]
    else:
        raise ValueError('a piece is a text, {"hex": "…"}, {"special": "…"} or {"user": "…"}')
    if not data:
        raise ValueError("a piece is empty")
    return Piece(data, kind)


def _pieces(value: Any) -> tuple[Piece, ...]:
    if not isinstance(value, list):
        raise ValueError("expects a list")
    return tuple(_piece(item) for item in value)


def _then(value: Any) -> tuple[tuple[bytes, tuple[Piece, ...]], ...]:
    if not isinstance(value, dict) or "" in value:
        raise ValueError("expects an object of texts and lists of pieces")
    return tuple((text.encode(), _pieces(pieces)) for text, pieces in value.items())


def _check_kinds(pieces: Sequence[Piece]) -> None:
    kinds: dict[bytes, int] = {}
    for piece in pieces:
        if kinds.setdefault(piece.data, piece.kind) != piece.kind:
            raise ValueError(f"{piece.data!r} is both a text and a special piece")


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"expects a whole number from {low} to {high}")
        return value

    return check


def _milliseconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 600_000:
        raise ValueError("expects milliseconds from 0 to 600000")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expects true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expects a text")
    return value


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "pieces": _pieces,
    "then": _then,
    "template": _optional(_text),
    "n_ctx": _whole(1, 1 << 24),
    "eog": _flag,
    "filler": lambda value: _piece(_text(value)),
    "prefill_ms": _milliseconds,
    "decode_ms": _milliseconds,
    "fail_at": _optional(_whole(1, 1 << 30)),
    "name": _text,
}
