"""POST /infill and `suffix`: prompts for models with fill-in-the-middle tokens."""

from __future__ import annotations

from typing import Any

import pytest

from pantheon.engine.model import Model
from pantheon.engine.scripted import scripted_model
from pantheon.serve.http_errors import HttpError
from pantheon.serve.infill import fill_in_ids
from tests.serve.api_server import scripted

FIM = [{"special": f"<|fim_{role}|>"} for role in ("prefix", "suffix", "middle")]
FILES = [{"special": "<|repo_name|>"}, {"special": "<|file_sep|>"}]


def model(*more: Any, n_ctx: int = 200) -> Model:
    return scripted_model({"pieces": ["x", *FIM, *more], "n_ctx": n_ctx})


def shown(found: Model, *args: Any, **more: Any) -> str:
    prefix, *rest = args
    ids = fill_in_ids(found, found.tokenize(prefix, add_special=False), *rest, **more)
    return found.detokenize(ids, special=True)


def test_the_prompt_is_laid_out_as_llama_server_does() -> None:
    assert shown(model(), "ab", "cd") == "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"
    assert shown(model(), "ab", "cd", "m") == "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>m"
    # markers in code are code
    marked = fill_in_ids(model(), model().tokenize("<|fim_middle|>", add_special=False), "")
    assert marked.count(model().tokenizer.fim["mid"]) == 1


def test_other_files_stand_in_front() -> None:
    extra = [("a.h", "A"), (None, "B")]
    files = "<|repo_name|>myproject\n<|file_sep|>a.h\nA<|file_sep|>tmp\nB<|file_sep|>filename\n"
    assert shown(model(*FILES), "p", "s", extra=extra) == files + "<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    assert shown(model(), "p", "s", extra=extra) == "AB<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"


def test_what_does_not_fit_is_left_out_from_afar() -> None:
    long = "".join(chr(97 + i % 26) for i in range(300))
    found = model(n_ctx=44)
    text = shown(found, long, long[::-1])
    before, after = text.removeprefix("<|fim_prefix|>").removesuffix("<|fim_middle|>").split("<|fim_suffix|>")
    assert (len(before), len(after)) == (30, 10) and long.endswith(before) and long[::-1].startswith(after)
    # what one side leaves the other may have, and other files get what both leave
    assert len(shown(found, "ab", long).split("<|fim_suffix|>")[1].removesuffix("<|fim_middle|>")) == 38
    assert shown(found, "ab", "cd", extra=[("f", "x" * 100)]).startswith("x" * 36 + "<|fim_prefix|>ab")


def test_a_model_without_the_tokens_says_so() -> None:
    with pytest.raises(HttpError, match="no fill-in-the-middle tokens"):
        fill_in_ids(scripted_model({"pieces": ["x"]}), [97], "b")


def test_through_both_doors() -> None:
    with scripted("x", *FIM) as api:
        body = api.post("/infill", {"input_prefix": "ab", "input_suffix": "cd", "prompt": "m", "n_predict": 1}).json()
        assert (body["content"], body["prompt"]) == ("x", "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>m")
        answer = api.post("/v1/completions", {"prompt": "ab", "suffix": "cd", "max_tokens": 1}).json()
        assert answer["choices"][0]["text"] == "x" and answer["usage"]["prompt_tokens"] == 7
