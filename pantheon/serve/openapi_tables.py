"""The field tables of every request body and query, in groups that several routes share.

A new field is one row here; `tests/serve/test_openapi.py` says when a parser reads a name that no row has, and prints
the row for docs/reference/http-api.md.
"""

from __future__ import annotations

from pantheon.serve.openapi_fields import (
    Field,
    array,
    choice,
    either,
    flag,
    hint,
    integer,
    members,
    needed,
    number,
    object_of,
    text,
    unread,
)

Fields = tuple[Field, ...]
_STRING = {"type": "string"}
_STRINGS = {"type": "array", "items": _STRING}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
#: what a bound of 64 bits and more is written as: JSON's numbers are doubles for most clients
_FAR = 1 << 53

MODEL: Fields = (
    text("model", "which model; absent or `default` is the one that was loaded first, and with one model loaded any "
         "name will do, unless `--strict-model` is set"),
)  # fmt: skip

STREAM: Fields = (
    flag("stream", False, "answer as server-sent events"),
    members("stream_options", "`include_usage`: a last chunk with `usage`", flag("include_usage", False, "")),
)

LENGTH: Fields = (
    integer("max_tokens", -1, _FAR, "the most tokens of an answer, -1 is no limit; absent: until the context is full, "
            "but an answer that only repeats itself is ended (`--loop-guard`)"),
    integer("max_completion_tokens", -1, _FAR, "the same; the smaller one counts"),
    either("stop", [_STRING, {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 16}],
           "ends the answer and is no part of it"),
    integer("n", 1, 8, "answers, made one after the other", 1),
    flag("ignore_eos", False, "go on after an end-of-generation token"),
)  # fmt: skip

SAMPLING: Fields = (
    number("temperature", 0, 2, 1, "0 is greedy"),
    integer("top_k", -1, 1 << 31, "sample among the k most likely; 0 or -1 is off", 40),
    number("top_p", 0, 1, 0.95, "sample among the most likely that make up this share; 1 is off"),
    number("min_p", 0, 1, 0.1, "sample among those at least this likely, beside the likeliest; 0 is off"),
    number("repeat_penalty", 0, 100, 1, "divides the logits of recent tokens", above=True),
    number("repetition_penalty", 0, 100, 1, "another name of `repeat_penalty`, which wins", above=True),
    integer("repeat_last_n", -1, 1 << 30, "how many tokens are recent; -1 is the whole context", 64),
    number("presence_penalty", -2, 2, 0, "taken off the logits of tokens that have come up"),
    number("frequency_penalty", -2, 2, 0, "taken off for each time a token has come up"),
    members("logit_bias", "`{\"token id\": bias}`, from -100 to 100"),
    integer("seed", -_FAR, _FAR, "the same seed gives the same answer; absent or -1: another one each time"),
)  # fmt: skip

SESSION: Fields = (
    hint(text("session_id", "names the conversation, so that it finds the replica and the slot where it is warm")),
    hint(text("prompt_cache_key", "of the same kind")),
    hint(either("conversation", [_STRING, members("", "", text("id", "")).schema], "of the same kind")),
    hint(text("conversation_id", "of the same kind")),
    hint(text("thread_id", "of the same kind")),
    hint(text("chat_id", "of the same kind")),
    hint(members("metadata", "may hold one of these names too, or a `user_id` with a session in it")),
    hint(members("client_metadata", "the same")),
)

#: what an answer is held to
HELD: Fields = (
    members("json_schema", "a schema that the answer is held to"),
    text("grammar", "a grammar in GBNF that the answer is held to"),
)

_FUNCTION = object_of((
    needed(text("name", "")), text("description", ""), members("parameters", "JSON Schema"), flag("strict", False, ""),
))  # fmt: skip
_TOOL: Fields = (choice("type", ("function",), ""), needed(Field("function", _FUNCTION, "")))
_MESSAGE: Fields = (
    needed(choice("role", ("system", "developer", "user", "assistant", "tool"), "who says it")),
    either("content", [_STRING, {"type": "array", "items": {"type": "object"}}], "text, or parts of type `text`"),
    text("reasoning_content", "what the model thought before an answer of its own"),
    array("tool_calls", {"type": "object"}, "calls that the assistant made"),
    text("tool_call_id", "which call a tool's answer is for"),
    text("name", "of the tool"),
)

CHAT: Fields = (
    needed(array("messages", object_of(_MESSAGE), "roles `system`, `developer`, `user`, `assistant`, `tool`; text as a "
                 "string or as parts of type `text`", minItems=1)),
    flag("logprobs", False, "log probabilities of each token"),
    integer("top_logprobs", 0, 20, "and of so many alternatives; needs `logprobs`", 0),
    array("tools", object_of(_TOOL), "functions that the model may call"),
    either("tool_choice", [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object"}],
           "or `{\"type\": \"function\", \"function\": {\"name\": …}}`, or `{\"type\": \"allowed_tools\", \"mode\": …, "
           "\"tools\": […]}`", "auto"),
    flag("parallel_tool_calls", True, "several calls in one answer"),
    members("response_format", "`type` is `text`, `json_object`, or `json_schema` with a schema that the answer is "
            "held to",
            choice("type", ("text", "json_object", "json_schema"), "")),
    choice("reasoning_effort", ("none", "minimal", "low", "medium", "high", "xhigh", "max"), "for the chat template; "
           "`none` is also `enable_thinking: false`"),
    flag("enable_thinking", True, "for the chat template"),
    choice("reasoning_format", ("auto", "deepseek", "deepseek-legacy", "none"), "`none` leaves thoughts in the "
           "text, tags and all", "auto"),
    integer("thinking_budget", -1, _FAR, "the most tokens of a thought, which is then closed; -1: no limit"),
    integer("thinking_budget_tokens", -1, _FAR, "the same"),
    integer("reasoning_budget", -1, _FAR, "the same"),
    array("functions", object_of((needed(text("name", "")),)), "the first form of `tools`: calls are answered as "
          "`function_call`; not with `tools`"),
    either("function_call", [{"type": "string", "enum": ["none", "auto"]}, {"type": "object"}],
           "the first form of `tool_choice`"),
    members("chat_template_kwargs", "more variables of the chat template"),
    choice("truncation", ("disabled", "auto"), "`auto`: a conversation that is too long loses its oldest turns instead "
           "of being refused; system messages, tools and the last turn stay", "disabled"),
    flag("timings_per_token", False, "`timings` on every chunk of a stream"),
    flag("return_progress", False, "a stream tells how far the prompt is read: chunks with `prompt_progress`, which "
         "has `total`, `cache`, `processed` (tokens) and `time_ms`"),
    *HELD,
    flag("continue_final_message", True, "a last message of the assistant is how its answer begins; `false`: it is a "
         "turn like the others, and a new answer comes behind it"),
    flag("add_generation_prompt", None, "`true` is the same as `continue_final_message: false`; in `/apply-template`, "
         "`false` ends the prompt behind the last message"),
    flag("verbose", False, "show the prompt that was read, as `__verbose.prompt`"),
    unread(text("user", "and other fields of OpenAI's API that change nothing here")),
)  # fmt: skip

COMPLETION: Fields = (
    needed(either("prompt", [_STRING, _STRINGS, _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}],
                  "at most 32 texts, or token ids; control markers are parsed, and nothing is put around it")),
    integer("logprobs", 0, 5, "log probabilities, and of so many alternatives"),
    flag("echo", False, "repeat the prompt, with `logprobs` also its own; not with `suffix`"),
    text("suffix", "what comes behind the gap that is to be filled, for models with fill-in-the-middle tokens"),
    integer("best_of", 1, 20, "make so many answers and keep the `n` likeliest; not streamed"),
    *HELD,
)  # fmt: skip

LOAD: Fields = (
    needed(text("path", "a file in a folder of `--model-root` (default: the folders of the `--model` files), links "
                "followed; a relative path is looked for there")),
    text("name", "what clients call it; by default the file's name", most=128),
    integer("ctx", 2, 1 << 40, "the context in tokens"),
    array("dies", {"type": "integer", "minimum": 0}, "die numbers, `[]` for the CPU; absent: free dies that fit, if "
          "there are any"),
    flag("wait", True, "`false`: answer 202 at once, load in the background"),
    flag("quantize", False, "`true` is refused: load a file that is quantised already"),
)  # fmt: skip

UNLOAD: Fields = (
    needed(text("name", "the model; all its replicas, unless one is named")),
    number("timeout_s", 0, 3600, 30, "how long requests that use it may take to end"),
    flag("force", False, "end running answers by an error"),
    integer("slot", 0, 1 << 16, "the replica with this number"),
    integer("instance", 0, 1 << 16, "the same"),
    array("dies", {"type": "integer", "minimum": 0}, "the replica on these dies"),
    flag("all", False, "every replica, as without `slot` and `dies`"),
    flag("wait", True, "`false`: answer 202 at once"),
)

SLOTS: Fields = (
    text("model", "only the slots of this model"),
    text("fail_on_no_slot", "`1`: 503 when none is free"),
)

PLAN: Fields = (
    needed(text("model", "a file as for a load, or the name of a loaded model")),
    integer("ctx", 2, 1 << 40, "the context in tokens"),
    text("dies", "die numbers such as `0,1`; empty for the CPU"),
    text("name", "as for a load", most=128),
)
