"""The family of a chat template, told by the marks it writes [M120].

Only a name for people, `inspect` and defaults; rendering never depends on it.
"""

from __future__ import annotations

# name, marks that must all be in the source, marks that must not; first match wins, so the special come first
_FAMILIES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("gpt-oss", ("<|channel|>", "<|start|>"), ()),
    ("llama4", ("<|header_start|>",), ()),
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>"), ()),
    ("gemma4", ("<|turn>", "<turn|>"), ()),
    ("gemma", ("<start_of_turn>",), ()),
    ("deepseek", ("<｜User｜>",), ()),
    ("deepseek", ("<｜Assistant｜>",), ()),
    ("command-r", ("<|START_OF_TURN_TOKEN|>",), ()),
    ("granite", ("<|start_of_role|>",), ()),
    ("glm4", ("[gMASK]",), ()),
    ("qwen3-coder", ("<|im_start|>", "<function=", "<parameter="), ("<think>",)),
    ("qwen3.5", ("<|im_start|>", "<function=", "<think>"), ()),
    ("phi4", ("<|im_start|>", "<|im_sep|>"), ()),
    ("smollm3", ("<|im_start|>", "reasoning_mode", "<think>"), ()),
    ("qwen3", ("<|im_start|>", "<think>", "</think>", "enable_thinking"), ()),
    ("hermes", ("<|im_start|>", "json_to_python_type"), ()),
    ("chatml", ("<|im_start|>",), ()),
    ("mistral", ("[INST]",), ("<<SYS>>",)),
    ("llama2", ("[INST]", "<<SYS>>"), ()),
    ("falcon3", ("<|user|>", "<|assistant|>", "falcon"), ()),
    ("phi3", ("<|end|>", "<|assistant|>"), ()),
    ("phi3", ("<|end|>", "'<|' + message['role'] + '|>'"), ()),
    ("zephyr", ("<|user|>", "<|assistant|>"), ()),
    ("rwkv", ("User: ", "Assistant:"), ("USER:",)),
    ("vicuna", ("USER:", "ASSISTANT:"), ()),
    ("alpaca", ("### Instruction:",), ()),
)


def family(source: str) -> str:
    """`chatml`, `llama3`, `gemma`, `phi3`, `mistral`, `qwen3` …; `unknown` when no mark is known."""
    for name, marks, absent in _FAMILIES:
        if all(mark in source for mark in marks) and not any(mark in source for mark in absent):
            return name
    return "unknown"
