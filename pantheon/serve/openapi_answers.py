"""Examples of answers; the schemas in /openapi.json are their shapes.  A test holds them against a real server's.

A key that ends in `?` may be left out of the answer, a pair `(example, None)` may be null.
"""

from __future__ import annotations

from typing import Any

from pantheon.serve.openapi_fields import Schema

_TYPES = {bool: "boolean", str: "string", int: "integer", float: "number", type(None): "null"}


def shape(example: Any) -> Schema:
    """The schema of everything that looks like the example: the same members of the same types, and maybe others."""
    if isinstance(example, tuple):
        return {"anyOf": [shape(example[0]), {"type": "null"}]}
    if isinstance(example, list):
        return {"type": "array", **({"items": shape(example[0])} if example else {})}
    if not isinstance(example, dict):
        return {"type": _TYPES[type(example)]}
    schema: Schema = {"type": "object"}
    if example:
        schema["properties"] = {key.rstrip("?"): shape(value) for key, value in example.items()}
        schema["required"] = [key for key in example if not key.endswith("?")]
    return schema


def plain(example: Any) -> Any:
    """The example as an answer has it."""
    if isinstance(example, tuple):
        return plain(example[0])
    if isinstance(example, list):
        return [plain(item) for item in example]
    if isinstance(example, dict):
        return {key.rstrip("?"): plain(value) for key, value in example.items()}
    return example


ERROR = {
    "error": {
        "message": "temperature: must be from 0 to 2, not 3",
        "type": "invalid_request_error",
        "param": ("temperature", None),
        "code": ("context_length_exceeded", None),
        "retry_after?": 1.0,
    }
}
MODEL = {
    "id": "SmolLM2-135M-Instruct.Q4_1",
    "object": "model",
    "created": 1795997655,
    "owned_by": "pantheon",
    "max_model_len": (8192, None),
    "context_length": (8192, None),
}
_USAGE = {
    "prompt_tokens": 21,
    "completion_tokens": 2,
    "total_tokens": 23,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_REPLY = {
    "created": 1795997655,
    "model": "SmolLM2-135M-Instruct.Q4_1",
    "system_fingerprint": "pantheon-0.1.0",
    "usage": _USAGE,
    "timings?": {"prompt_n": 21, "prompt_ms": 40.1, "predicted_n": 2, "predicted_ms": 20.2},
}
CHAT = {
    "id": "chatcmpl-14433371d05d9e58",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ("Hello.", None), "reasoning_content?": "", "tool_calls?": []},
            "logprobs": ({"content": []}, None),
            "finish_reason": "stop",
        }
    ],
    **_REPLY,
}
COMPLETION = {
    "id": "cmpl-397e63f9d4ee0fb1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "Hello.", "logprobs": ({"tokens": []}, None), "finish_reason": "stop"}],
    **_REPLY,
}

INSTANCE = {
    "name": "qwen",
    "slot": 0,
    "status": "ready",
    "stage": "ready",
    "progress": 1.0,
    "path": "/models/qwen.gguf",
    "dies": [0],
    "refs": 0,
    "created": (1795997655, None),
    "architecture": ("qwen35", None),
    "n_ctx": (8192, None),
    "memory": {"weights?": 1, "scratch?": 1, "kv_per_token?": 1},
}
UNDER_WAY = {"status": "loading", "name": "qwen", "location": "/admin/models/qwen"}
UNLOADED = {"status": "unloaded", "name": "qwen", "instances": [{"slot": 0, "dies": [0]}]}
STATE = {"name": "qwen", "status": "ready", "progress": 1.0, "instances": [INSTANCE], "error?": {"status": 507}}
DIES = {
    "dies": [
        {
            "index": 0,
            "kind": "virtual",
            "usable": True,
            "total_bytes": 1 << 31,
            "budget_bytes": 1 << 31,
            "used_bytes": 1 << 28,
            "free_bytes": (1 << 30, None),
            "model": ("qwen", None),
            "slot": (0, None),
        }
    ],
    "cpu": {"cores": 2, "models": [INSTANCE]},
}
MEMORY = {
    "process": {"rss_bytes": 1 << 28},
    "models": [{"name": "qwen", "slot": 0, "status": "ready", "dies": [0], "memory": {}}],
    "admission": "on",
    "level?": "OK",
    "host?": {"level": "OK"},
    "watcher?": {"alive": True},
    "thresholds?": {},
    "ladder": [{"name": "qwen", "slot": 0, "level": "OK", "rungs": [], "notes": []}],
}
SLOT = {
    "id": 0,
    "id_task": -1,
    "model": "qwen",
    "replica": 0,
    "dies": [0],
    "n_ctx": (8192, None),
    "speculative": False,
    "is_processing": True,
    "state": "decode",
    "n_prompt_tokens": 300,
    "n_prompt_tokens_processed": 20,
    "n_prompt_tokens_cache": 280,
    "next_token": [{"has_next_token": True, "has_new_line": False, "n_remain": 90, "n_decoded": 10}],
}
SCHED = {
    "entries": [
        {
            "name": "qwen",
            "slot": 0,
            "dies": [0],
            "mode": "single",
            "capacity": 1,
            "busy": False,
            "active": 0,
            "refs": 0,
            "waiting": 0,
            "running_s": (1.5, None),
            "service_s": 2.0,
            "wait_s": 0.0,
            "cached_tokens": 0,
            "totals": {"prompt_tokens": 300, "cached_tokens": 280, "completion_tokens": 10},
            "requests": [
                {
                    "id": "req_1",
                    "session": ("9d2cfe01", None),
                    "phase": "decode",
                    "age_s": 1.5,
                    "prompt_tokens": 300,
                    "cached_tokens": 280,
                    "read_tokens": 300,
                    "made_tokens": 10,
                    "answers": 1,
                }
            ],
            "scheduler?": {"slots": [], "users": {}, "queue": {}, "turnstile": {}, "level": "OK", "totals": {}},
        }
    ]
}
PLAN = {
    "name": "qwen",
    "fits": True,
    "n_ctx": 8192,
    "executor": "cpu",
    "dies": [0],
    "bytes": {"weights?": 1},
    "need_bytes": 1,
    "have_bytes": 1,
    "reserve_bytes": 1,
    "largest_ctx": (8192, None),
    "reason?": "",
}
