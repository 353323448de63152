"""`pantheon generate`, in this process: what is the model, what the prompt, and what comes out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from pantheon.cli import main
from pantheon.engine.load import load_model
from tests.cli.terminal import write_script


@pytest.fixture
def script(tmp_path: Path) -> str:
    return write_script(tmp_path, "Once", " more", "…")


def test_text_streams_to_stdout_and_the_speed_to_stderr(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", script, "a prompt"]) == 0
    out, err = capsys.readouterr()
    assert out == "Once more…\n"
    assert "[4 tokens" in err and f"prompt {len('a prompt')} tokens" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--temp", "0", "MODEL", "text"],
        ["MODEL", "--temp", "0", "text"],
        ["MODEL", "text", "--temp", "0"],
        ["MODEL", "--prompt", "text"],
        ["--prompt", "text", "MODEL"],
    ],
)
def test_words_and_flags_in_any_order(words: list[str], script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *[script if w == "MODEL" else w for w in words], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == len("text")


@pytest.mark.parametrize("words", [["--chat", "Hi"], ["Hi", "--chat"]])
def test_chat_goes_through_the_template(words: list[str], script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", script, *words, "--json", "--system", "S"]) == 0
    with load_model(script) as model:
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
        n = len(model.tokenizer.encode(model.template.render(messages), parse_special=True))
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == n


def test_an_empty_chat_message_is_a_chat_too(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", script, "--chat", "", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] > 0


def test_without_a_prompt_stdin_is_read(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert main(["generate", script, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == len("from stdin")


def test_json_holds_what_happened(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", script, "x", "--json", "--max-tokens", "2", "--seed", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == "Once more" and report["finish_reason"] == "length"
    assert report["completion_tokens"] == 2 == len(report["tokens"])
    assert main(["generate", script, "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "words", [["MODEL", "a", "b"], ["MODEL", "a", "--prompt", "b"], ["MODEL", "--prompt", "a", "--chat", "b"]]
)
def test_two_prompts_are_a_usage_error(words: list[str], script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """[M016]"""
    with pytest.raises(SystemExit) as caught:
        main(["generate", *[script if w == "MODEL" else w for w in words]])
    assert caught.value.code == 2 and "one prompt" in capsys.readouterr().err


def test_a_word_that_looks_like_a_file_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no-such.gguf", "x"]) == 1
    assert main(["generate", "no-such.gguf", "--prompt", "x"]) == 1
    assert "no-such.gguf" in capsys.readouterr().err
