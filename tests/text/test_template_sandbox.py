"""A chat template is a stranger's program: it runs nothing, changes nothing, and ends soon and small [B37]."""

from __future__ import annotations

import copy
import resource
import threading
import time
from typing import Any

import pytest

from pantheon.text import template_guard
from pantheon.text.chat_template import ChatTemplate, TemplateError, render_template

USER = [{"role": "user", "content": "Say hi."}]
BIG = "{% set s = 'x' * 4000000 %}"
GROW = (
    "{{% set ns = namespace(s={0}) %}}{{% for i in range(200) %}}{{% set ns.s = {1} %}}{{% endfor %}}{{{{ ns.s {2} }}}}"
)


def refusal(source: str, messages: Any = USER, **kwargs: Any) -> TemplateError:
    with pytest.raises(TemplateError) as refused:
        render_template(source, messages, **kwargs)
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__['os'].popen('touch pwned.txt').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() | length }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ (''|attr('__class__')).x }}",
        "{{ (messages|map('upper')).gi_frame.f_back }}",
        "{{ (messages|map('upper')).send(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__code__.x }}",
        "{{ dict.mro() }}",
        "{{ 'a'.encode() }}",
        "{{ (5).to_bytes(10, 'big') }}",
        "{{ dict.fromkeys('a') }}",
    ],
)
def test_nothing_of_python_can_be_reached(source: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """B37a, B37b."""
    monkeypatch.chdir(tmp_path)
    refusal(source)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        "messages.append({'role': 'system'})",
        "messages[0].update({'role': 'x'})",
        "messages[0].pop('role')",
        "messages.clear()",
        "messages[0].setdefault('a', 1)",
        "messages.sort()",
        "messages.insert(0, 1)",
    ],
)
def test_messages_can_not_be_changed(change: str) -> None:
    """B37d."""
    messages = copy.deepcopy(USER)
    refusal(f"{{% set _ = {change} %}}{{{{ messages | length }}}}", messages)
    assert messages == USER


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ [1] * 10**10 }}",
        "{{ 2 ** (2 ** 40) }}",
        "{{ (9 ** 4000) ** 99 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x'.center(10**10) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x'.rjust(10**10) }}",
        "{{ 'x'.zfill(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x\ny' | indent(10**10) }}",
        "{{ ('\t' * 9).expandtabs(10**10) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10**10) }}",
        "{{ '{a:9999999}'.format_map({'a': 1}) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%((a))999999999d' % {'(a)': 1} }}",
        "{{ '%.999999999f' % 1 }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '%(a)99999999s' | format(a=1) }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ [1] | slice(10**9) | list }}",
        "{{ 1.5 | round(10**9, 'ceil') }}",
        "{{ [[1]] | tojson(indent=10**9) }}",
        BIG + "{{ [1, 2] | tojson(separators=(s, s)) }}",
        GROW.format("'xx'", "ns.s + ns.s", "| length"),
        GROW.format("'xx'", "ns.s ~ ns.s", "| length"),
        GROW.format("'xx'", "ns.s.replace('x', 'xx')", "| length"),
        GROW.format("'xx'", "ns.s | replace('x', 'xx')", "| length"),
        GROW.format("'xx'", "[ns.s, ns.s] | join(ns.s)", "| length"),
        GROW.format("'xx'", "ns.s.join([ns.s, ns.s])", "| length"),
        GROW.format("'xx'", "'%s%s' % (ns.s, ns.s)", "| length"),
        GROW.format("'xx'", "'{}{}'.format(ns.s, ns.s)", "| length"),
        GROW.format("[1]", "ns.s + ns.s", "| length"),
        BIG + "{% for i in range(9999) %}{{ s }}{% endfor %}",
        BIG + "{% set x %}{% for i in range(9999) %}{{ s }}{% endfor %}{% endset %}",
        BIG + "{% set x %}{% for i in range(9999) %}{{ s[1:] }}{% endfor %}{% endset %}",
        BIG + "{% set x %}{% for i in range(9999) %}{{ s ~ i }}{% endfor %}{% endset %}",
        BIG + "{% set l = [s] * 250000 %}{{ 'y' in l }}",
        BIG + "{% for i in range(9999) %}{% set y = s.upper() %}{% endfor %}",
        BIG + "{{ (s + s).strip(s) }}",
        BIG + "{{ s | trim(s) }}",
        BIG + "{{ s | wordwrap(3) }}",
        BIG + "{{ s | urlize }}",
        "{{ ('ab,' * 2000000).split(',') | length }}",
        "{{ ('😀' * 8000000) | list | length }}",
        "{% for c in '😀' * 8000000 if true %}{{ loop.length }}{% endfor %}",
        "{{ ('f' * 4000000) | int(base=16) % 7 }}",
        "{{ strftime_now('%c' * 1000000) }}",
        "{{ range(99999) | map('string') | map('center', 100000) | list | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
)
def test_what_one_step_could_blow_up_is_refused_at_once(source: str) -> None:
    """B37c: bounded in time, output and memory, whatever builds the size."""
    template = ChatTemplate(source)  # compiled whatever it will do
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(TemplateError):
        template.render(USER)
    assert time.monotonic() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        GROW.format("[1]", "[ns.s, ns.s]", "| string"),
        GROW.format("[1]", "{'a': ns.s, 'b': ns.s}", "| tojson"),
        GROW.format("[1]", "dict(a=ns.s, b=ns.s)", "| tojson"),
        BIG + "{% for i in range(99999) %}{% set y = s.count('xy') %}{% endfor %}",
        "{% set c = cycler(1) %}{% for i in range(99999) %}{% for j in range(99999) %}{% set y = c.next() %}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_endless_work_ends_in_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B37c, with a shorter limit so that the tests are fast."""
    template = ChatTemplate(source)
    make = template_guard.Guard

    def brief(*args: Any, **kwargs: Any) -> template_guard.Guard:
        return make(*args, **{**kwargs, "seconds": 0.2})

    monkeypatch.setattr("pantheon.text.chat_template.Guard", brief)
    began = time.monotonic()
    with pytest.raises(TemplateError) as refused:
        template.render(USER)
    assert time.monotonic() - began < 3
    assert not refused.value.refused


def test_the_limit_is_two_seconds() -> None:
    assert template_guard.MAX_SECONDS == 2.0 and template_guard.MAX_WALL_SECONDS <= 4


def test_other_threads_render_meanwhile() -> None:
    """B37c: a template that spins holds up nobody; each rendering has its own allowance."""
    endless = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    quick = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    ended = threading.Event()

    def spin() -> None:
        with pytest.raises(TemplateError, match="longer than 2 s"):
            endless.render(USER)
        ended.set()

    thread = threading.Thread(target=spin)
    thread.start()
    rendered = 0
    while not ended.is_set():
        assert quick.render(USER) == "Say hi."
        rendered += 1
    thread.join()
    assert rendered > 20


def test_cyclic_namespaces_print() -> None:
    shown = render_template("{% set n = namespace() %}{% set n.a = n %}{{ [n, n.a] }}", USER)
    assert shown == "[<Namespace>, <Namespace>]"


def test_long_conversations_are_no_attack() -> None:
    """A megabyte of text through the usual steps of a template stays well within the allowance."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 2000} for i in range(100)]
    source = (
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.content.startswith('x') %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set c = m.content | trim %}"
        "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>' + '\n' }}{% endfor %}"
    )
    assert len(render_template(source, messages)) > 999_000
