"""Chat templates render as Hugging Face renders them (B34, M118-M120); faults are 400 and never a traceback."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from pantheon.errors import BadRequest
from pantheon.text.chat_template import CHATML, ChatTemplate, TemplateError, render_template

USER = [{"role": "user", "content": "Say hi."}]
NOW = datetime(2024, 7, 26, 13, 5, 9)
TOOL = {"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ strftime_now('%d %b %Y %H:%M:%S') }}", "26 Jul 2024 13:05:09"),
        ("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "A"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "B"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
            "{% endif %}{% endfor %}{{ ns.n }}{% generation %}x{% endgeneration %}",
            "1x",
        ),
        ("{{ messages[::-1] | map(attribute='content') | join('|') }}", "B|A"),
        ("{{ messages[0].content.startswith('A') }}{{ messages[-1]['content'].lower() }}", "Trueb"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing is defined }}{{ nothing }}", "TrueTrueFalse"),
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", "<s></s>True"),
        ("{{ 'a' ~ 1 ~ none }}{{ 'x' * 3 }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ '%s-%5.2f' % ('a', 1) }}", "a1Nonexxx38a- 1.00"),
        ("{{ '{}{x:>4}'.format(1, x=2) }}{{ ', '.join(['a', 'b']) }}{{ 'a,b'.split(',')[1] }}", "1   2a, bb"),
        ("{%- macro f(a, b='c') -%}[{{ a }}{{ b }}]{%- endmacro -%}{{ f(1) }}{{ f(1, b=2) }}", "[1c][12]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | length }}{% filter upper %}q{% endfilter %}", "2Q"),
        ("{% for k, v in {'b': 1, 'a': [2]} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a[2]b1"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{{ [3, 1] | sort | first }}{{ range(3) | list }}{{ [[1], [2]] | sum(start=[]) }}", "1[0, 1, 2][1, 2]"),
        ("{{ 'x' in 'xy' }}{{ 1 < 2 < 3 }}{{ {'a': 1}.get('b', 5) }}{{ 'a b' | title }}", "TrueTrue5A B"),
    ],
)
def test_the_environment_is_hugging_faces(source: str, expected: str) -> None:
    """B34."""
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    assert render_template(source, messages, bos_token="<s>", eos_token="</s>", now=NOW) == expected


def test_tojson_keeps_utf8_and_html() -> None:
    """B34c."""
    t = {"d": "naïve <b>&'日本"}
    source = (
        "{{ t | tojson }}|{{ t | tojson(ensure_ascii=False) }}|{{ t | tojson(indent=2) }}|"
        "{{ t | tojson(ensure_ascii=True) }}|{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}"
    )
    parts = render_template(source, USER, t=t).split("|")
    assert parts[0] == parts[1] == '{"d": "naïve <b>&\'日本"}'
    assert parts[2] == json.dumps(t, ensure_ascii=False, indent=2)
    assert parts[3] == json.dumps(t)
    assert parts[4] == '{"a":2,"b":1}'


def test_strftime_now_is_the_time() -> None:
    """B34a: the real clock when none is injected."""
    before = datetime.now().replace(second=0, microsecond=0)
    shown = datetime.strptime(render_template("{{ strftime_now('%d %b %Y %H:%M') }}", USER), "%d %b %Y %H:%M")
    assert before <= shown <= datetime.now()


def test_kwargs_and_tools_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ tools[0].function.name }}{{ documents[0] }}", bos_token="<s>")
    assert template.render(USER, [TOOL], enable_thinking=False, documents=["d"]) == "Falsefd"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('need tools') }}", "need tools"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ nothing() }}", "undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% include 'other' %}", "loader"),
    ],
)
def test_a_render_fault_is_400_with_the_templates_words(source: str, words: str) -> None:
    """B34e."""
    with pytest.raises(TemplateError, match=words) as refused:
        render_template(source, USER)
    fault = refused.value
    assert isinstance(fault, BadRequest) and fault.status == 400
    assert (fault.type, fault.code, fault.refused) == ("invalid_request_error", "template_error", True)
    assert "Traceback" not in fault.message and fault.__cause__ is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "line 1"),
        ("a\n{{ x ", "line 2"),
        ("\n\n{{ x | nofilter }}", "line 3.*nofilter"),
        ("{% break %}", "outside loop"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "nested"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "recursion"),
        ("x" * 200_000, "longer"),
    ],
)
def test_a_fault_of_compilation_is_reported_at_construction(source: str, words: str) -> None:
    """B34: found at load, with its line."""
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source)


# -- ChatML ----------------------------------------------------------------------------------------------------------


def chatml(messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:
    return ChatTemplate(CHATML).render(messages, tools, **kwargs)


def test_chatml_golden() -> None:
    """M118."""
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    turns = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n a\n<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    turns += "<|im_start|>user\nc<|im_end|>\n"
    assert chatml(messages, add_generation_prompt=False) == turns
    assert chatml(messages) == turns + "<|im_start|>assistant\n"
    assert chatml(messages, enable_thinking=True) == turns + "<|im_start|>assistant\n<think>\n"


def test_chatml_tool_loop_golden() -> None:
    """M045: results stand in <tool_response>, calls in <tool_call>, tools in the system turn."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "r1"},
        {"role": "tool", "content": "r2"},
    ]
    text = chatml(messages, [TOOL])
    head, rest = text.split("<|im_end|>\n", 1)
    assert head.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>" in head
    one = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert rest == (
        f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{one}\n{one}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (CHATML, "chatml"),
        ("{{ '<|im_start|>' + m.role + '<|im_end|>' }}", "chatml"),
        ("{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}", "llama3"),
        ("{{ '<start_of_turn>' + m.role }}", "gemma"),
        ("{{ '<|user|>\n' + m.content + '<|end|>\n<|assistant|>\n' }}", "phi3"),
        ("{{ '[INST]' + m.content + '[/INST]' }}", "mistral"),
        ("{% if enable_thinking %}<|im_start|>assistant\n<think>\n\n</think>{% endif %}", "qwen3"),
        ("<|im_start|>{{ m.content }}<function=x><parameter=y>", "qwen3-coder"),
        ("{{ messages }}", "unknown"),
        ("", "unknown"),
    ],
)  # fmt: skip
def test_the_family_is_detected(source: str, name: str) -> None:
    """M120."""
    assert ChatTemplate(source).name == name
