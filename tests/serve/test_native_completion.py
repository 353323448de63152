"""POST /completion: llama-server's own text API over the one generation path."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pantheon.errors import BadRequest
from pantheon.serve.native_completion import parse_native, pick
from tests.serve.api_server import Api, scripted

FINAL = {
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
    "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
    "timings",
}  # fmt: skip


def ask(api: Api, path: str = "/completion", **body: Any) -> Any:
    answer = api.post(path, {"prompt": "abc", **body})
    assert answer.status == 200, answer.body
    return answer.json()


def events(api: Api, **body: Any) -> list[dict[str, Any]]:
    answer = api.post("/completion", {"prompt": "abc", "stream": True, **body})
    assert answer.status == 200, answer.body
    return [json.loads(event) for event in answer.events]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_whole_reply(path: str) -> None:
    with scripted("x\n", "y") as api:
        body = ask(api, path)
        assert set(body) == FINAL
        assert (body["content"], body["prompt"], body["model"], body["stop"]) == ("x\ny", "abc", "m", True)
        assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens"]) == (2, 3, [])
        assert (body["stop_type"], body["stopping_word"], body["has_new_line"]) == ("eos", "", True)
        assert body["timings"]["predicted_n"] == 2
        # null stands for any seed elsewhere; clients of this API read a number
        assert body["generation_settings"]["seed"] == 0xFFFFFFFF and body["generation_settings"]["n_predict"] == -1


def test_why_it_ended() -> None:
    with scripted("x", " STOP", " y") as api:
        stopped = ask(api, stop=["", "STOP"])
        assert (stopped["stop_type"], stopped["stopping_word"], stopped["content"]) == ("word", "STOP", "x ")
        limited = ask(api, n_predict=1)
        assert (limited["stop_type"], limited["content"], limited["has_new_line"]) == ("limit", "x", False)
        assert limited["generation_settings"]["max_tokens"] == 1
        assert ask(api, max_tokens=1)["stop_type"] == "limit"
        assert ask(api, n_predict=-2)["stop_type"] == "eos"


def test_the_tokens_of_the_answer_are_shown_on_request() -> None:
    with scripted("x", "y") as api:
        tokens = ask(api, return_tokens=True)["tokens"]
        assert len(tokens) == 2
        assert api.post("/detokenize", {"tokens": tokens}).json() == {"content": "xy"}


def test_stream_has_every_token_and_ends_without_a_word() -> None:
    with scripted("x", " ST", "OP y") as api:
        body = {"stop": [" STOP"]}
        found = events(api, **body)
        whole = ask(api, **body)
        assert [event["stop"] for event in found] == [False] * 3 + [True]
        assert "".join(event["content"] for event in found) == whole["content"] == "x"
        assert all(len(event["tokens"]) == 1 for event in found[:-1])
        assert set(found[-1]) == FINAL and found[-1]["stop_type"] == "word" and found[-1]["tokens"] == []
        assert [event["tokens_predicted"] for event in found] == [1, 2, 3, 3]


def test_probabilities_have_ids_and_bytes() -> None:
    with scripted("x", "y") as api:
        found = ask(api, n_probs=3)["completion_probabilities"]
        assert [item["token"] for item in found] == ["x", "y"]
        first = found[0]
        assert first["id"] == first["top_logprobs"][0]["id"] and first["bytes"] == [120] and first["logprob"] <= 0
        assert len(first["top_logprobs"]) == 3
        streamed = events(api, n_probs=3)
        assert [len(event["completion_probabilities"]) for event in streamed[:-1]] == [1, 1]
        assert "completion_probabilities" not in streamed[-1]


def test_prompts_of_every_form() -> None:
    with scripted("x") as api:
        assert ask(api, prompt=[97, "bc"])["prompt"] == "abc"
        assert ask(api, prompt={"prompt_string": "abc"})["tokens_evaluated"] == 3
        several = ask(api, prompt=["ab", [97], [97, "b"], {"prompt_string": "c"}])
        assert [item["prompt"] for item in several] == ["ab", "a", "ab", "c"]
        assert [item["index"] for item in several] == [0, 1, 2, 3]
        assert [item["prompt"] for item in ask(api, prompt=["ab"])] == ["ab"]
        assert len(ask(api, n_cmpl=2)) == 2


def test_some_fields_of_the_answer() -> None:
    with scripted("x") as api:
        shown = ask(api, n_predict=5, response_fields=["content", "generation_settings/n_predict", "prompt", "nothing"])
        assert shown == {"content": "x", "generation_settings/n_predict": 5, "prompt": "abc"}
    assert pick({"a": {"b": 1}}, ["a/b", "a/c", "a/b/c"]) == {"a/b": 1}


def test_biases_of_ids_texts_and_never() -> None:
    asked = parse_native({"prompt": "x", "logit_bias": [[5, -1], ["ab", 2.5], ["7", False]]})
    assert asked.text.params.logit_bias == ((5, -1.0), (7, -1e30)) and asked.text.bias_texts == (("ab", 2.5),)
    assert parse_native({"prompt": "x", "logit_bias": {"5": 1, "a": 1}}).text.bias_texts == (("a", 1.0),)
    with scripted("x", "y") as api:
        # the script makes one token certain; a forbidden one is not chosen all the same
        assert "x" not in ask(api, n_predict=1, logit_bias=[["x", False]])["content"]


def test_ignored_ends_are_shown_as_biases() -> None:
    with scripted("x") as api:
        assert ask(api)["generation_settings"]["logit_bias"] == []
        shown = ask(api, ignore_eos=True, n_predict=3)["generation_settings"]["logit_bias"]
        assert shown and all(item["bias"] is None for item in shown)


def test_samplers_of_llama_server_are_let_pass() -> None:
    more = {"samplers": ["top_k"], "dry_multiplier": 0.5, "mirostat": 2, "typical_p": 0.5, "xtc_probability": 0.1}
    with scripted("x") as api:
        assert ask(api, temperature=-1, id_slot=3, cache_prompt=False, **more)["content"] == "x"


def test_a_schema_is_enforced() -> None:
    with scripted("x") as api:
        assert ask(api, json_schema={"const": "42"}, n_predict=20)["content"] == '"42"'


def test_the_defaults_of_the_server_are_shown_and_used() -> None:
    from dataclasses import replace

    with scripted(eog=False) as api:
        api.app.defaults = replace(api.app.defaults, seed=42, n_predict=3, temperature=0.5)
        found = ask(api)["generation_settings"]
        assert (found["seed"], found["n_predict"], found["temperature"]) == (42, 3, 0.5)
        assert ask(api, n_predict=5, seed=1)["tokens_predicted"] == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["a"]}}, "prompt"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": [[-1, 1]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"n_probs": -1}, "n_probs"),
        ({"response_fields": [1]}, "response_fields"),
        ({"n_predict": "x"}, "n_predict"),
    ],
)
def test_bad_fields(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as fault:
        parse_native({"prompt": "x", **fields})
    assert fault.value.param == param


def test_errors_come_before_the_stream() -> None:
    with scripted("x", n_ctx=8) as api:
        answer = api.post("/completion", {"prompt": "a" * 20, "stream": True})
        assert answer.status == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "prompt"


def test_progress_and_live_timings_of_a_stream() -> None:
    with scripted("x", "y") as api:
        found = events(api, prompt="a" * 300, return_progress=True, timings_per_token=True)
        progress = [event["prompt_progress"] for event in found if "prompt_progress" in event]
        assert [item["processed"] for item in progress] == [0, 128, 256, 300]
        assert {item["total"] for item in progress} == {300}
        first = found[0]["timings"]
        assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"]) == (0, 0, 0)
        assert all("timings" in event and event["tokens_evaluated"] == 300 for event in found)
        assert "timings" not in events(api)[0]


def test_a_grammar_is_enforced_and_a_bad_one_refused() -> None:
    with scripted("x") as api:
        assert ask(api, grammar='root ::= "a"{5,5}', n_predict=9)["content"] == "aaaaa"
        for more in ({"grammar": "root ::= (a"}, {"grammar": 'root ::= "a"', "json_schema": {}}):
            answer = api.post("/completion", {"prompt": "x", **more})
            assert (answer.status, answer.json()["error"]["param"]) == (400, "grammar")


def test_probabilities_that_sampling_left() -> None:
    with scripted("x", "y") as api:
        for temperature in (0, 1):
            found = ask(api, n_probs=5, post_sampling_probs=True, temperature=temperature)["completion_probabilities"]
            assert [item["token"] for item in found] == ["x", "y"]
            for item in found:
                # min_p leaves the script's token alone
                assert item["prob"] == 1 and [other["prob"] for other in item["top_probs"]] == [1]
                assert item["top_probs"][0]["id"] == item["id"] and "logprob" not in item


def test_a_prompt_that_is_only_read_is_warm_afterwards() -> None:
    with scripted("x", "y") as api:
        body = ask(api, n_predict=0)
        assert (body["content"], body["tokens_predicted"], body["stop_type"]) == ("", 0, "limit")
        (event,) = events(api, n_predict=0)
        assert event["stop"] and event["content"] == ""
        assert api.post("/completion", {"prompt": "x", "n_predict": False}).status == 400
