"""/tokenize, /detokenize, /apply-template, …/input_tokens, /props, and the doors that only say no."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.serve.api_server import USER, WEATHER, answer_of, scripted


def test_there_and_back() -> None:
    with scripted("x") as api:
        tokens = api.post("/tokenize", {"content": "ab<|im_end|>"}).json()["tokens"]
        assert tokens[:2] == [97, 98] and len(tokens) == 3
        assert api.post("/detokenize", {"tokens": tokens}).json() == {"content": "ab<|im_end|>"}
        assert len(api.post("/tokenize", {"content": "<|im_end|>", "parse_special": False}).json()["tokens"]) == 10
        assert api.post("/tokenize", {}).json() == {"tokens": []}
        assert api.post("/detokenize", {}).json() == {"content": ""}
        assert api.post("/tokenize", {"content": [97, "b"]}).json() == {"tokens": [97, 98]}


def test_pieces_are_texts_or_bytes() -> None:
    with scripted("x") as api:
        found = api.post("/tokenize", {"content": "aé", "with_pieces": True}).json()["tokens"]
        assert found[0] == {"id": 97, "piece": "a"}
        assert [item["piece"] for item in found[1:]] == [[0xC3], [0xA9]]


def test_wrong_types_name_the_field() -> None:
    with scripted("x") as api:
        for path, body, param in (
            ("/tokenize", {"content": 5}, "content"),
            ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces"),
            ("/tokenize", {"content": [1 << 40]}, "content"),
            ("/detokenize", {"tokens": ["a"]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": 7}, "tokens"),
        ):
            answer = api.post(path, body)
            assert (answer.status, answer.json()["error"]["param"]) == (400, param), (path, body)


def test_a_template_is_applied_as_for_a_chat() -> None:
    with scripted("x") as api:
        prompt = api.post("/apply-template", {"messages": USER, "tools": [WEATHER]}).json()["prompt"]
        assert "get_weather" in prompt and prompt.endswith("<|im_start|>assistant\n")
        bare = api.post("/apply-template", {"messages": USER, "add_generation_prompt": False}).json()["prompt"]
        assert bare.endswith("<|im_end|>\n") and prompt.startswith("<|im_start|>system")
        count = api.post("/v1/chat/completions/input_tokens", {"messages": USER, "tools": [WEATHER]}).json()
        assert count["input_tokens"] == api.whole(tools=[WEATHER])["usage"]["prompt_tokens"]


def test_no_place_of_a_conversation_is_taken() -> None:
    with scripted("x", eog=False, decode_ms=5) as api:
        sock = api.open_chat(max_tokens=100)
        for _ in range(3):
            assert api.post("/tokenize", {"content": "a"}).status == 200
            assert api.post("/apply-template", {"messages": USER}).status == 200
            assert api.get("/props").status == 200
        assert answer_of(sock).status == 200


def test_props_describe_the_model_and_the_defaults() -> None:
    with scripted("x", n_ctx=64) as api:
        api.app.defaults = replace(api.app.defaults, seed=42, n_predict=9)
        body = api.get("/props").json()
        assert body["default_generation_settings"]["n_ctx"] == 64 and body["total_slots"] == 1
        params = body["default_generation_settings"]["params"]
        assert (params["seed"], params["n_predict"]) == (42, 9)
        assert body["model_alias"] == "m" and "im_start" in body["chat_template"]
        api.add("other", pieces=["y"])
        assert api.get("/props?model=other").json()["model_alias"] == "other"
        assert api.get("/props?model=none").status == 404


def test_aliases_without_v1() -> None:
    with scripted("x") as api:
        assert api.post("/chat/completions", {"messages": USER}).json()["object"] == "chat.completion"
        assert api.get("/models").json() == api.get("/v1/models").json()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/reranking", "/v1/reranking", "/props", "/lora-adapters"])
def test_doors_that_say_no(path: str) -> None:
    with scripted("x") as api:
        answer = api.post(path, {"query": "a", "documents": ["b"]})
        assert answer.status == 501 and answer.json()["error"]["type"] == "not_supported_error"


def test_no_adapters_and_no_code_models() -> None:
    with scripted("x") as api:
        assert api.get("/lora-adapters").json() == []
        answer = api.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
        assert answer.status == 501 and "fill-in-the-middle" in answer.json()["error"]["message"]
        for body, param in (
            ({"input_suffix": "b"}, "input_prefix"),
            ({"input_prefix": "b"}, "input_suffix"),
            ({"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}, "input_extra[0].text"),
            ({"input_prefix": "a", "input_suffix": "b", "prompt": 5}, "prompt"),
        ):
            answer = api.post("/infill", body)
            assert (answer.status, answer.json()["error"]["param"]) == (400, param)


def test_a_last_message_of_the_assistant_is_how_the_answer_begins() -> None:
    begun = [*USER, {"role": "assistant", "content": "So"}]
    with scripted("x") as api:
        prompts = [
            api.post("/apply-template", {"messages": begun, **more}).json()["prompt"]
            for more in ({}, {"continue_final_message": True}, {"continue_final_message": False})
        ]
        assert prompts[0] == prompts[1] and prompts[0].endswith("<|im_start|>assistant\nSo")
        assert prompts[2].endswith("So<|im_end|>\n<|im_start|>assistant\n")
        shown = api.whole(messages=begun, verbose=True)["__verbose"]
        assert shown["prompt"] == prompts[0] and "__verbose" not in api.whole(messages=begun)
        assert api.stream(messages=begun, verbose=True).chunks[-1]["__verbose"]["prompt"] == prompts[0]
        both = {"continue_final_message": True, "add_generation_prompt": True}
        for body, param in (
            ({"messages": begun, **both}, "continue_final_message"),
            ({"messages": [*begun, begun[-1]]}, "messages"),
        ):
            answer = api.chat(**body)
            assert (answer.status, answer.json()["error"]["param"]) == (400, param)
