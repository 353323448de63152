"""`pantheon chat` on a terminal and on a pipe.  [M124]"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pantheon.commands.chat import HELP, Conversation
from pantheon.commands.common import printable
from pantheon.engine.load import load_model
from tests.cli.terminal import Terminal, run, write_script


def prompt_sizes(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"prompt (\d+) tokens", text)]


def expected_prompt(script: str, *turns: tuple[str, str]) -> int:
    """Prompt tokens of a conversation, by template and tokenizer."""
    with load_model(script) as model:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = model.template.render(messages)
        return len(model.tokenizer.encode(text, parse_special=True))


def test_two_turns_on_a_terminal_keep_the_context(tmp_path: Path) -> None:
    """[M124] The second prompt holds the first question and its answer; speed is shown after each answer."""
    script = write_script(tmp_path, "Hello", " you", "!")
    with Terminal("chat", script, "--system", "Be brief.") as terminal:
        terminal.wait_for("> ")
        terminal.type("One\n")
        first = terminal.wait_for("> ")
        terminal.type("Two\n")
        second = terminal.wait_for("> ")
        terminal.type("/quit\n")
        assert terminal.end() == 0
    assert "Hello you!\r\n" in first and "tokens/s" in first
    system = ("system", "Be brief.")
    assert prompt_sizes(first) == [expected_prompt(script, system, ("user", "One"))]
    turns = (("user", "One"), ("assistant", "Hello you!"), ("user", "Two"))
    assert prompt_sizes(second) == [expected_prompt(script, system, *turns)]


def test_the_speed_line_is_dim_on_a_terminal(tmp_path: Path) -> None:
    with Terminal("chat", write_script(tmp_path, "x", "y")) as terminal:
        terminal.wait_for("> ")
        terminal.type("a\n")
        assert re.search(r"\x1b\[2m\[3 tokens.*\]\x1b\[0m", terminal.wait_for("> "))
        terminal.type("\x04")
        assert terminal.end() == 0, "Ctrl-D leaves"


def test_ctrl_c_stops_the_answer_and_at_the_prompt_ends_the_chat(tmp_path: Path) -> None:
    """[M124] The interrupted answer stays in the conversation; the exit code is that of Ctrl-C."""
    script = write_script(tmp_path, "go", eog=False, filler=" on", decode_ms=20)
    with Terminal("chat", script) as terminal:
        terminal.wait_for("> ")
        terminal.type("a\n")
        terminal.wait_for("go on on")
        terminal.type("\x03")
        assert "interrupted" in terminal.wait_for("> ")
        terminal.type("b\n")
        terminal.wait_for("go on")
        terminal.type("\x03")
        size = prompt_sizes(terminal.wait_for("> "))[0]
        assert size > expected_prompt(script, ("user", "a"), ("assistant", "go on on"), ("user", "b")) - 1
        terminal.type("\x03")
        assert terminal.end(again="\x03") == 130


def test_piped_lines_are_answered_one_by_one(tmp_path: Path) -> None:
    """Answers alone go to stdout; remarks go to stderr, without colours."""
    script = write_script(tmp_path, "Yes", ".")
    done = run("chat", script, stdin="one\n\n/reset\ntwo\n/nonsense\nthree")
    assert done.returncode == 0
    assert done.stdout == "Yes.\nYes.\nYes.\n"
    sizes = prompt_sizes(done.stderr)
    assert sizes[0] == sizes[1] == expected_prompt(script, ("user", "two")), "/reset forgot the first turn"
    assert sizes[2] == expected_prompt(script, ("user", "two"), ("assistant", "Yes."), ("user", "three"))
    assert "no command /nonsense" in done.stderr and "\x1b" not in done.stderr


def test_a_full_context_is_said_and_the_turn_taken_back(tmp_path: Path) -> None:
    script = write_script(tmp_path, "ok", n_ctx=60)
    done = run("chat", script, stdin="hi\n" + "x" * 100 + "\n/reset\nhi\n")
    assert done.returncode == 0 and done.stdout == "ok\nok\n"
    assert "maximum context length is 60 tokens" in done.stderr and "/reset starts over" in done.stderr


def test_a_template_that_refuses_is_one_line(tmp_path: Path) -> None:
    template = "{{ raise_exception('no, thanks') }}"
    done = run("chat", write_script(tmp_path, "x", template=template), stdin="hi\n")
    assert done.returncode == 0 and done.stdout == ""
    assert "no, thanks" in done.stderr and "Traceback" not in done.stderr


def test_max_tokens_and_sampling_flags_reach_the_sampler(tmp_path: Path) -> None:
    script = write_script(tmp_path, "a", "b", "c")
    done = run("chat", script, "--max-tokens", "2", "--temp", "0", "--top-k", "1", "--top-p", "0.5", "--seed", "1", stdin="x\n")  # fmt: skip # noqa: E501
    assert done.stdout == "ab\n" and "cut at the limit" in done.stderr


def test_commands_change_the_conversation_only() -> None:
    chat = Conversation("old")
    chat.turns = [{"role": "user", "content": "a"}]
    assert chat.command("/system  Be a poet. ") == "system message set"
    assert chat.messages()[0] == {"role": "system", "content": "Be a poet."} and len(chat.messages()) == 2
    assert chat.command("/reset") == "conversation forgotten" and chat.messages()[1:] == []
    assert chat.command("/system") == "system message removed" and chat.messages() == []
    assert chat.command("/help") == HELP
    assert "/help lists them" in (chat.command("/xyz") or "")


@pytest.mark.parametrize("line", ["hello", "/etc/hosts is a file", "/", "//", "what is /reset", "/Quit now", "/2"])
def test_other_lines_are_for_the_model(line: str) -> None:
    assert Conversation().command(line) is None


def test_an_answer_can_not_steer_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\r\n\tü\x9b31m\u200d") == "a]0;titleb\n\tü31m\u200d"
