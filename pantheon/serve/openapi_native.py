"""Field tables and examples of llama-server's own routes: completion, infill, tokens, template, embeddings, props."""

from __future__ import annotations

from typing import Any

from pantheon.serve import openapi_tables as tables
from pantheon.serve.openapi_fields import (
    Field,
    array,
    choice,
    either,
    flag,
    hint,
    integer,
    needed,
    number,
    text,
    unread,
)

_FAR = 1 << 53
_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_MIXED = {"type": "array", "items": {"type": ["string", "integer"]}}
_SAME = tuple(field for field in tables.SAMPLING if field.name not in ("temperature", "min_p", "logit_bias"))

_COMMON: tables.Fields = (
    integer("n_predict", -2, _FAR, "the most tokens of an answer; -1 and -2 are no limit"),
    integer("max_tokens", -2, _FAR, "the same; the smaller one counts"),
    Field("temperature", {"type": "number", "maximum": 2}, "0 and less is greedy; what is not given is as in "
          "llama-server", 0.8),
    number("min_p", 0, 1, 0.05, "sample among those at least this likely, beside the likeliest; 0 is off"),
    hint(either("logit_bias", [{"type": "object"}, {"type": "array", "items": {"type": "array"}}],
                "`{\"token id\": bias}` or `[[id or text, bias or false]]`")),
    hint(either("stop", [_STRING, {"type": "array", "items": _STRING, "maxItems": 16}],
                "ends the answer and is no part of it")),
    integer("n", 1, 8, "answers", 1),
    integer("n_cmpl", 1, 8, "another name of `n`, which wins", 1),
    integer("n_probs", 0, 1000, "log probabilities of each token, and of so many alternatives", 0),
    flag("post_sampling_probs", False, "as probabilities of what sampling left to choose from"),
    hint(integer("logprobs", 0, 1000, "another name of `n_probs`", 0)),
    *tables.HELD,
    array("response_fields", _STRING, "what of the answer is wanted; slashes lead into objects"),
    flag("return_tokens", False, "token ids beside the text"),
    flag("stream", False, "answer as server-sent events, which end without `[DONE]`"),
    flag("timings_per_token", False, "`timings` on each event"),
    flag("return_progress", False, "events with `prompt_progress` while the prompt is read"),
    flag("ignore_eos", False, "go on after an end-of-generation token"),
    *tables.MODEL, *_SAME, *tables.SESSION,
)  # fmt: skip

COMPLETION: tables.Fields = (
    needed(either("prompt", [_STRING, _MIXED, {"type": "object"}, {"type": "array", "items": {"type": "object"}}],
                  "a text, ids and texts mixed, `{\"prompt_string\": …}`, or at most 32 of these")),
    *_COMMON,
)  # fmt: skip

INFILL: tables.Fields = (
    needed(text("input_prefix", "what stands before the gap")),
    needed(text("input_suffix", "what stands behind it")),
    text("prompt", "what stands in it already"),
    array("input_extra", {"type": "object"}, "other files: `{\"filename\": …, \"text\": …}`"),
    *_COMMON,
)

TOKENIZE: tables.Fields = (
    hint(either("content", [_STRING, _MIXED], "a text, or ids and texts mixed")),
    flag("add_special", False, "put the begin token in front"),
    flag("parse_special", True, "read control markers as tokens"),
    flag("with_pieces", False, "ids with the bytes that they stand for"),
    *tables.MODEL,
)
DETOKENIZE: tables.Fields = (array("tokens", {"type": "integer", "minimum": 0}, "token ids"), *tables.MODEL)

_INPUT: list[dict[str, Any]] = [
    _STRING, _IDS, {"type": "array", "items": {"anyOf": [_STRING, _IDS, {"type": "object"}]}}, {"type": "object"},
]  # fmt: skip
EMBEDDINGS: tables.Fields = (
    needed(either("input", _INPUT,
                  "a text, token ids, both mixed, `{\"prompt_string\": …}`, or at most 2,048 of these")),
    choice("encoding_format", ("float", "base64"), "`base64` is of little-endian float32", "float"),
    hint(integer("dimensions", 1, 1 << 20, "only the width of the model")),
    *tables.MODEL,
)  # fmt: skip
EMBEDDING: tables.Fields = (
    hint(either("content", _INPUT, "as `input` of `/v1/embeddings`")),
    unread(either("input", _INPUT, "the same, where there is no `content`")),
    integer("embd_normalize", -1, 64, "norm of the vectors: 2 is Euclid's, 0 the largest, -1 none", 2),
    *tables.MODEL,
)

PROPS_QUERY: tables.Fields = (text("model", "which model; by default the one that was loaded first"),)
PROPS: dict[str, Any] = {
    "default_generation_settings": {"params": {"temperature": 1.0}, "n_ctx": 8192},
    "total_slots": 1,
    "model_alias": "SmolLM2-135M-Instruct.Q4_1",
    "model_path": "/models/SmolLM2-135M-Instruct.Q4_1.gguf",
    "modalities": {"vision": False, "audio": False},
    "chat_template": "",
    "bos_token": "",
    "eos_token": "<|im_end|>",
    "build_info": "pantheon-0.1.0",
}
ANSWER: dict[str, Any] = {
    "index": 0,
    "content": ", there was a curious",
    "tokens": [19556],
    "id_slot": 0,
    "stop": True,
    "model": "SmolLM2-135M-Instruct.Q4_1",
    "tokens_predicted": 8,
    "tokens_evaluated": 4,
    "generation_settings": {"temperature": 1.0},
    "prompt": "Once upon a time",
    "has_new_line": False,
    "truncated": False,
    "stop_type": "limit",
    "stopping_word": "",
    "tokens_cached": 0,
    "timings": {"prompt_n": 4, "prompt_ms": 40.1, "predicted_n": 8, "predicted_ms": 160.2},
}
VECTORS: dict[str, Any] = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.1]}],
    "model": "SmolLM2-135M-Instruct.Q4_1",
    "usage": {"prompt_tokens": 4, "total_tokens": 4},
}
