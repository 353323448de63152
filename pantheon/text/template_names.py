"""Chat templates that a command line may name: plain formats of turns, for files that bring no template.

Each turn stands between an opening that names its role and a closing; what the formats are is public knowledge of the
models they were made for.  None of them knows tools.
"""

from __future__ import annotations

from pantheon.text.chat_template import CHATML

_TURNS = (
    "{%- for message in messages -%}{{- OPEN + (message.content | trim) + CLOSE -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- LAST -}}{%- endif -%}"
)


def _turns(opening: str, closing: str, last: str) -> str:
    """A template of such turns; arguments are Jinja expressions."""
    return _TURNS.replace("OPEN", opening).replace("CLOSE", closing).replace("LAST", last)


_ROLE = "message.role"
_COMMAND_R = "{'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}.get(message.role, 'USER')"
NAMED: dict[str, str] = {
    "chatml": CHATML,
    "command-r": _turns(
        f"'<|START_OF_TURN_TOKEN|><|' + {_COMMAND_R} + '_TOKEN|>'", "'<|END_OF_TURN_TOKEN|>'",
        "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'",
    ),
    "llama3": _turns(
        f"'<|start_header_id|>' + {_ROLE} + '<|end_header_id|>\\n\\n'", "'<|eot_id|>'",
        "'<|start_header_id|>assistant<|end_header_id|>\\n\\n'",
    ),
    "phi3": _turns(f"'<|' + {_ROLE} + '|>\\n'", "'<|end|>\\n'", "'<|assistant|>\\n'"),
    "zephyr": _turns(f"'<|' + {_ROLE} + '|>\\n'", "'<|endoftext|>\\n'", "'<|assistant|>\\n'"),
}  # fmt: skip
