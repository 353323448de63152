"""The scripted model: given pieces come out through the real tokenizer, sampler and loop.  [seam: scripted model]"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pantheon import seams
from pantheon.accel.executor import Columns
from pantheon.engine.constraint import make_constraint
from pantheon.engine.generate import generate
from pantheon.engine.load import load_model
from pantheon.engine.model import Model
from pantheon.engine.sampler import SamplingParams
from pantheon.engine.scripted import CONTROL_TEXTS, load_script, scripted_model
from pantheon.errors import PantheonError
from tests.fakes import Ticks

CHAT = [{"role": "user", "content": "Hi <|im_end|> there, größer"}]


def script(*pieces: Any, **options: Any) -> Model:
    return scripted_model({"pieces": list(pieces), **options})


def texts(model: Model, **options: Any) -> list[str]:
    return [piece.text for piece in model.generate("prompt", **options)]


def test_pieces_come_out_one_a_token_and_then_the_end() -> None:
    model = script("Hello", ",", " wörld", "!")
    assert texts(model) == ["Hello", ",", " wörld", "!", ""]
    assert texts(model) == ["Hello", ",", " wörld", "!", ""], "a new answer begins the script again"


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}]
)
def test_the_script_wins_whatever_the_sampling(options: dict[str, Any]) -> None:
    model = script("a", "a", "a", "b")
    noisy = {"frequency_penalty": 2.0, "repeat_penalty": 1.5, "logit_bias": ((99, 100.0),)}
    assert "".join(texts(model, **options, **noisy)) == "aaab"


def test_chat_goes_through_template_and_tokenizer() -> None:
    model = script("ok")
    assert [p.text for p in model.chat(CHAT)] == ["ok", ""]
    prompt = model.tokenizer.encode("<|im_start|>x<|im_end|>", parse_special=True)
    assert prompt[0] == model.tokenizer.token_id("<|im_start|>") and len(prompt) == 3
    assert model.detokenize(model.tokenize(CHAT[0]["content"])) == CHAT[0]["content"]


def test_a_template_of_the_script_is_used() -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}>"
    assert script("x", template=template).template.render(CHAT).startswith("[user] Hi")


def test_bytes_may_cut_a_character() -> None:
    assert texts(script({"hex": "f09f"}, {"hex": "9880"}, "!")) == ["", "\U0001f600", "!", ""]


def test_special_pieces_are_control_tokens_and_user_pieces_print() -> None:
    model = script("a", {"user": "<think>"}, "b", {"special": "<|eot_id|>"}, "never")
    ids = [piece.id for piece in model.generate("x")]
    assert ids[-1] == model.tokenizer.token_id("<|eot_id|>")
    assert ids[-1] in model.tokenizer.eog_ids, "an end token inside the script ends the answer"
    assert model.detokenize(ids) == "a<think>b"
    assert not model.tokenizer.is_control(ids[1])
    odd = script({"special": "<|odd|>"}, "x")
    assert texts(odd) == ["", "x", ""], "a control token prints nothing"


@pytest.mark.parametrize("text", ["<|im_end|>", "</s>", "<|eot_id|>", "<end_of_turn>"])
def test_text_that_spells_a_control_token_stays_text(text: str) -> None:
    """[B31] A model may write the marker letter by letter; it must not end the answer."""
    model = script("a", text, "b")
    assert "".join(texts(model)) == f"a{text}b"


def test_without_eog_the_filler_goes_on_to_the_limit() -> None:
    model = script("a", eog=False, filler=" z")
    assert texts(model, max_tokens=4) == ["a", " z", " z", " z"]


def test_no_pieces_is_an_empty_answer() -> None:
    assert texts(script()) == [""]


def test_single_bytes_and_repeated_pieces_share_their_token() -> None:
    model = script("a", "bc", "a", "bc")
    ids = [piece.id for piece in model.generate("x")]
    assert ids[0] == ids[2] and ids[1] == ids[3]
    assert model.n_vocab == 256 + len(CONTROL_TEXTS) + 2, "bytes, controls, 'bc' and the filler"


def test_context_is_enforced() -> None:
    model = script(*"abcdefgh", n_ctx=10)
    assert model.n_ctx == 10
    assert "".join(p.text for p in model.generate("12345")) == "abcde"
    with pytest.raises(PantheonError) as caught:
        list(model.generate("1234567890"))
    assert caught.value.code == "context_length_exceeded"


def test_prefill_and_decode_take_the_time_they_are_told() -> None:
    """Each prefill chunk and each decode step sleeps on the clock that was passed in."""
    clock = Ticks()
    model = scripted_model({"pieces": ["a", "b"], "prefill_ms": 20, "decode_ms": 5}, clock=clock)
    tokens = list(generate(model, model.new_state(), [1] * 5, SamplingParams(), max_tokens=9, chunk=2))
    assert len(tokens) == 3
    assert clock.slept == pytest.approx([0.02] * 3 + [0.005] * 2)


def test_a_prompt_of_one_token_is_prefill() -> None:
    clock = Ticks()
    model = scripted_model({"pieces": [], "prefill_ms": 20, "decode_ms": 5}, clock=clock)
    list(generate(model, model.new_state(), [1], SamplingParams(), max_tokens=9))
    assert clock.slept == pytest.approx([0.02])


def test_it_fails_at_the_decode_step_it_is_told() -> None:
    """[M034] The k-th decode step raises: k tokens have come out before (the first is the prompt's)."""
    model = script(*"abcdef", fail_at=3)
    seen = []
    for _ in range(2):
        with pytest.raises(seams.InjectedFailure, match="decode step 3"):
            seen += [piece.text for piece in _collect(model, seen)]
        assert seen == ["a", "b", "c"]
        seen.clear()


def _collect(model: Model, seen: list[str]) -> list[Any]:
    for piece in model.generate("x"):
        seen.append(piece.text)
    return []


def test_slots_run_their_scripts_apart() -> None:
    model = script("a", "b", "c")
    state = model.new_state(2)

    def step(*slots: int, position: int) -> list[str]:
        n = len(slots)
        columns = Columns(
            np.ones(n, np.int32),
            np.array(slots, np.int32),
            np.full(n, position, np.int32),
            np.arange(n, dtype=np.int32),
        )
        return [model.detokenize([int(i)]) for i in model.forward(state, columns).argmax(axis=1)]

    assert step(0, position=0) == ["a"]
    assert step(0, 1, position=1) == ["b", "a"]
    assert step(0, 1, position=2) == ["c", "b"]
    state.reset(0)
    assert step(0, 1, position=3) == ["a", "c"]


def test_columns_that_want_nothing_do_not_move_the_script() -> None:
    model = script("a", "b")
    state = model.new_state()
    model.forward(state, Columns.of_slot([1, 2, 3], 0, wanted="none"))
    first = model.forward(state, Columns.of_slot([4], 3))
    assert model.detokenize([int(first[0].argmax())]) == "a"


def test_a_constraint_overrules_the_script() -> None:
    model = script("no", " json")
    constraint = make_constraint(model.tokenizer, {"type": "grammar", "syntax": "regex", "grammar": "[0-9]{3}"})
    answer = "".join(texts(model, constraint=constraint))
    assert len(answer) == 3 and answer.isdigit()


def test_a_file_loads_with_and_without_the_prefix(tmp_path: Path) -> None:
    file = tmp_path / "hello.json"
    file.write_text(json.dumps({"pieces": ["hi"], "name": "greeter"}))
    for model in (load_script(file), load_script(f"script:{file}"), load_model(f"script:{file}")):
        assert model.name == "greeter" and model.path is None and texts(model) == ["hi", ""]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ("{}", "'pieces' is missing"),
        ('{"pieces": "x"}', "pieces: expects a list"),
        ('{"pieces": [""]}', "pieces: a piece is empty"),
        ('{"pieces": [7]}', "pieces: a piece is"),
        ('{"pieces": [{"hex": "zz"}]}', "pieces: .*hex"),
        ('{"pieces": [{"odd": "x"}]}', "no form 'odd'"),
        ('{"pieces": ["<x>", {"special": "<x>"}]}', "both"),
        ('{"pieces": ["<x>"], "then": {"a": [{"special": "<x>"}]}}', "both"),
        ('{"pieces": [], "then": {"": []}}', "then: expects an object"),
        ('{"pieces": [], "n_ctx": 0}', "n_ctx: expects a whole number"),
        ('{"pieces": [], "n_ctx": true}', "n_ctx"),
        ('{"pieces": [], "prefill_ms": -1}', "prefill_ms: expects milliseconds"),
        ('{"pieces": [], "eog": 1}', "eog: expects true or false"),
        ('{"pieces": [], "fail_at": 0}', "fail_at"),
        ('{"pieces": [], "template": 3}', "template: expects a text"),
        ('{"pieces": [], "speed": 3}', "unknown key 'speed'; known: .*decode_ms"),
    ],
)
def test_a_bad_script_names_the_file_and_the_key(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(PantheonError, match=fault) as caught:
        load_script(file)
    assert str(file) in caught.value.message and caught.value.code == "invalid_script"


def test_a_missing_script_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(PantheonError, match=r"nothing\.json: No such file"):
        load_script(tmp_path / "nothing.json")


def test_a_binary_file_is_no_script(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(PantheonError, match="not JSON"):
        load_script(tmp_path / "x.json")


def test_what_was_read_decides_the_answer() -> None:
    """An agent's second turn differs from its first, with the first kept warm, and copied to another slot."""
    model = script("call", then={"result": ["do", "ne"], "Stop": ["end"]})
    state = model.new_state(2)

    def answer(read: str, position: int, slot: int = 0) -> list[str]:
        tokens = model.tokenizer.encode(read)
        said: list[str] = []
        while not said or said[-1] != "<|im_end|>":
            rows = model.runner.forward(state, Columns.of_slot(tokens, position, slot=slot))
            position += len(tokens)
            tokens = [int(rows[0].argmax())]
            said.append(model.tokenizer.token_bytes(tokens[0], special=True).decode())
        return said[:-1]

    assert answer("first", 0) == ["call"]
    state.truncate(0, 5)
    assert answer(" result", 5) == ["do", "ne"]
    state.copy_prefix(0, 1, 12)
    state.truncate(1, 12)
    assert answer(" and Stop", 12, slot=1) == ["end"]
    state.truncate(0, 7)
    assert answer("x", 7) == ["call"], "what was cut off does not count"
