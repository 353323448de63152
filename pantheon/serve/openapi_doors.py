"""Field tables and examples of the APIs beside chat and text: OpenAI's Responses, Anthropic's Messages."""

from __future__ import annotations

from typing import Any

from pantheon.serve import openapi_tables as tables
from pantheon.serve.openapi_fields import (
    Schema,
    array,
    choice,
    either,
    flag,
    hint,
    integer,
    members,
    needed,
    text,
)

_STRING: Schema = {"type": "string"}
_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
_FAR = 1 << 53
_STREAM = flag("stream", False, "answer as server-sent events")
_EOS = flag("ignore_eos", False, "go on after an end-of-generation token")
_THINK = flag("enable_thinking", True, "for the chat template")
_TEMPLATE = members("chat_template_kwargs", "more variables of the chat template")

RESPONSES: tables.Fields = (
    needed(either("input", [_STRING, _OBJECTS], "a text, or items: `message`, `reasoning`, `function_call`, "
                  "`function_call_output`, `custom_tool_call`, `custom_tool_call_output`")),
    text("instructions", "a system message in front of them"),
    integer("max_output_tokens", 1, _FAR, "the most tokens of the answer"),
    array("tools", {"type": "object"}, "`function` and `custom` tools, also in a `namespace`; others, which a server "
          "would run itself, are left out"),
    either("tool_choice", [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object"}],
           "or an object that names a tool, or `allowed_tools`", "auto"),
    flag("parallel_tool_calls", True, "several calls in one answer"),
    members("text", "`format`: `text`, `json_object`, or `json_schema` with a schema that the answer is held to"),
    members("reasoning", "`effort` for the chat template; with `summary`, thoughts come as the summary of their item, "
            "otherwise as its content"),
    array("include", _STRING, "`message.output_text.logprobs`, `reasoning.encrypted_content`"),
    integer("top_logprobs", 0, 20, "log probabilities of each token, and of so many alternatives", 0),
    either("stop", [_STRING, {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 16}],
           "ends the answer and is no part of it"),
    choice("truncation", ("disabled", "auto"), "as in a chat", "disabled"),
    members("metadata", "is repeated in the answer"),
    hint(text("previous_response_id", "is refused, as are `conversation`, `prompt` and `background`: nothing is kept "
              "here between requests")),
    hint(text("conversation", "is refused")),
    hint(text("prompt", "is refused")),
    hint(flag("background", False, "`true` is refused")),
    flag("return_progress", False, "`response.in_progress` events with `prompt_progress` while the prompt is read"),
    flag("timings_per_token", False, "`timings` on every delta of text"),
    hint(integer("max_tool_calls", 1, _FAR, "is repeated in the answer, and changes nothing")),
    hint(text("service_tier", "the same")),
    hint(text("safety_identifier", "the same")),
    hint(text("user", "the same")),
    _THINK, _TEMPLATE, _EOS, _STREAM, *tables.MODEL, *tables.SAMPLING,
    *(field for field in tables.SESSION if field.name not in ("conversation", "metadata")),
)  # fmt: skip

RESPONSE: dict[str, Any] = {
    "id": "resp_6f0ca3a1",
    "object": "response",
    "created_at": 1795997655,
    "status": "completed",
    "error": ({"code": "server_error", "message": "…"}, None),
    "incomplete_details": ({"reason": "max_output_tokens"}, None),
    "model": "SmolLM2-135M-Instruct.Q4_1",
    "output": [{"type": "message", "id": "msg_25c1", "status": "completed", "role?": "assistant", "content?": []}],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 21,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 23,
    },
}

_ASKED: tables.Fields = (
    needed(array("messages", {"type": "object"}, "roles `user` and `assistant`; text or blocks", minItems=1)),
    either("system", [_STRING, _OBJECTS], "text, or blocks of it"),
    array("tools", {"type": "object"}, "`name`, `description`, `input_schema`; tools that Anthropic's servers run are "
          "left out"),
    members("tool_choice", "`type` is `auto`, `any`, `tool` (with its `name`) or `none`; "
            "`disable_parallel_tool_use`"),
    members("thinking", "`type` is `enabled`, `adaptive` or `disabled`: thoughts are off unless asked for, "
            "and the model's own way with `adaptive`; `budget_tokens` goes to the chat template as `thinking_budget`"),
    array("stop_sequences", _STRING, "up to 16; they end the answer and are no part of it"),
    members("output_config", "`format` with a `schema` that the answer is held to; `effort` for the chat template"),
    members("output_format", "the same as `output_config.format`"),
    members("metadata", "a `user_id` with a session in it names the conversation"),
    _THINK, _TEMPLATE, _EOS, _STREAM, *tables.MODEL, *tables.SAMPLING,
    *(field for field in tables.SESSION if field.name not in ("conversation", "metadata")),
)  # fmt: skip
MESSAGES: tables.Fields = (
    *_ASKED, needed(integer("max_tokens", 1, _FAR, "the most tokens of the answer")),
)  # fmt: skip
COUNTED: tables.Fields = (*_ASKED, integer("max_tokens", 1, _FAR, "changes nothing here"))

MESSAGE: dict[str, Any] = {
    "id": "msg_0c9bd07a41",
    "type": "message",
    "role": "assistant",
    "model": "SmolLM2-135M-Instruct.Q4_1",
    "content": [{"type": "text", "text?": "Hello."}],
    "stop_reason": "end_turn",
    "stop_sequence": ("END", None),
    "usage": {
        "input_tokens": 21,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 2,
    },
}
