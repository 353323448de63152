"""The Python API: pantheon.load and the Model that it returns (M231, M234)."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pantheon
from pantheon.engine.footprint import footprint
from pantheon.engine.load import pick_ctx
from pantheon.errors import BadRequest, ModelFileError, PantheonError, Unavailable
from tests.engine.tiny import tiny
from tests.golden_data import model_path

STEM = "tiny-llama.F32"


def model() -> Any:
    return tiny(STEM, "reference")


def test_load_gives_a_model_with_its_numbers() -> None:
    with pantheon.load(model_path(STEM), executor="reference") as loaded:
        assert loaded.name == STEM and loaded.architecture == "llama"
        assert loaded.n_ctx == min(8192, loaded.plan.n_ctx_train)
        assert loaded.memory()["weights"] > 0


def test_without_a_ctx_8192_positions_at_most_are_admitted_M059() -> None:
    """The spec's guess is only the default; what is asked for counts [X31]."""
    trained = [replace(model().plan, n_ctx_train=n) for n in (512, 8192, 1 << 17)]
    assert [pick_ctx(None, plan) for plan in trained] == [512, 8192, 8192]
    assert pick_ctx(1 << 17, trained[0]) == 1 << 17


def test_a_ctx_beyond_the_trained_one_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    file, ctx = model_path(STEM), 2 * model().plan.n_ctx_train
    footprint(str(file), ctx=ctx)
    with pantheon.load(file, ctx=ctx, executor="reference") as loaded:
        assert loaded.n_ctx == ctx
    assert [record.getMessage().split(" ctx=")[0] for record in caplog.records] == ["context beyond the trained one"]


def test_ctx_is_obeyed() -> None:
    with pantheon.load(model_path(STEM), ctx=16, executor="reference") as loaded:
        assert loaded.n_ctx == 16
        with pytest.raises(BadRequest, match="16"):
            loaded.logits([1] * 17)


def test_logits_shape_and_chunks() -> None:
    ids = [4, 8, 15, 16, 23, 42]
    rows = model().logits(ids)
    assert rows.shape == (6, model().n_vocab) and rows.dtype == np.float32
    assert np.allclose(model().logits(ids, chunk=4), rows, atol=1e-5)
    assert model().logits([]).shape == (0, model().n_vocab)


def test_tokenize_and_detokenize_are_inverse() -> None:
    text = "Hello wide world"
    assert model().detokenize(model().tokenize(text)) == text


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    for call in (model().logits, model().detokenize, lambda ids: list(model().generate(ids, max_tokens=1))):
        with pytest.raises(BadRequest, match=str(bad)):
            call([1, bad])


@pytest.mark.parametrize("bad", [[1.5, 2], ["a"], np.array([[1, 2, 3]]), None, 5])
def test_what_is_no_sequence_of_ids_is_refused(bad: Any) -> None:
    for call in (model().logits, model().detokenize, lambda ids: list(model().generate(ids, max_tokens=1))):
        with pytest.raises(BadRequest, match="token ids"):
            call(bad)


@pytest.mark.parametrize("bad", [-1, 2.5, "3"])
def test_a_bad_max_tokens_is_refused(bad: Any) -> None:
    with pytest.raises(BadRequest, match="max_tokens"):
        next(model().generate("a", max_tokens=bad))


def test_prompts_may_be_arrays_and_bytes() -> None:
    def ids(prompt: Any) -> list[int]:
        return [p.id for p in model().generate(prompt, max_tokens=4, temperature=0, ignore_eog=True)]

    assert ids(np.array(model().tokenize("Hello"))) == ids("Hello") == ids(b"Hello")


def test_closing_while_a_generator_is_open_ends_it_with_a_refusal() -> None:
    loaded = pantheon.load(model_path(STEM), executor="reference")
    pieces = loaded.generate("a", ignore_eog=True)
    next(pieces)
    loaded.close()
    with pytest.raises(Unavailable, match="closed"):
        next(pieces)


def test_generate_yields_text_and_ids() -> None:
    pieces = list(model().generate("Hello", max_tokens=6, temperature=0, ignore_eog=True))
    assert len(pieces) == 6
    ids = [p.id for p in pieces]
    assert "".join(p.text for p in pieces).strip() == model().detokenize(ids).strip()
    prompt = model().tokenize("Hello")
    assert [p.id for p in model().generate(prompt, max_tokens=6, temperature=0, ignore_eog=True)] == ids


def test_generators_of_one_model_may_be_interleaved() -> None:
    """Each has its own state: two conversations at once equal their solo runs (M074)."""
    solo = [[p.id for p in model().generate(p, max_tokens=8, temperature=0, ignore_eog=True)] for p in ("one", "two")]
    both = [model().generate(p, max_tokens=8, temperature=0, ignore_eog=True) for p in ("one", "two")]
    mixed = list(zip(*both, strict=True))
    assert [[pair[i].id for pair in mixed] for i in (0, 1)] == solo


def test_threads_take_turns_and_get_their_own_answers() -> None:
    prompts = ["alpha", "beta", "gamma", "delta"]
    solo = {p: [x.id for x in model().generate(p, max_tokens=6, temperature=0, ignore_eog=True)] for p in prompts}
    answers: dict[str, list[int]] = {}
    start = threading.Barrier(len(prompts))

    def work(prompt: str) -> None:
        start.wait(10)
        answers[prompt] = [x.id for x in model().generate(prompt, max_tokens=6, temperature=0, ignore_eog=True)]

    threads = [threading.Thread(target=work, args=(p,)) for p in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == solo


def test_chat_answers_through_the_template() -> None:
    pieces = list(model().chat([{"role": "user", "content": "hi"}], max_tokens=3, temperature=0))
    assert 1 <= len(pieces) <= 3


def test_a_closed_model_says_so() -> None:
    loaded = pantheon.load(model_path(STEM), executor="reference")
    loaded.close()
    loaded.close()
    with pytest.raises(Unavailable, match="closed"):
        loaded.logits([1])


def test_load_tokenizer_reads_a_vocabulary() -> None:
    tokenizer: Any = pantheon.load_tokenizer(model_path(STEM))
    ids = tokenizer.tokenize("Hello", add_special=True, parse_special=False)
    assert ids == model().tokenize("Hello")
    assert tokenizer.detokenize(ids, special=False) == "Hello"


def test_render_template_is_exported() -> None:
    made = pantheon.render_template("{{ messages[0].content }}{{ x }}", [{"role": "user", "content": "a"}], x=1)
    assert made == "a1"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"executor": "gpu"}, "executor"),
        ({"ctx": 1}, "ctx"),
        ({"ctx": 10**13}, "ctx"),
        ({"kv_type": "q1"}, "kv_type"),
        ({"threads": 0}, "threads"),
        ({"threads": 5000}, "threads"),
        ({"threads": 1.5}, "threads"),
        ({"ctx": "9"}, "ctx"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        pantheon.load(model_path(STEM), **options)
    assert refused.value.param == param


def test_a_missing_file_is_404(tmp_path: Path) -> None:
    with pytest.raises(PantheonError, match=r"nothing\.gguf") as refused:
        pantheon.load(tmp_path / "nothing.gguf")
    assert refused.value.status == 404


@pytest.mark.parametrize("name", ["arch_unknown", "big_endian", "type_unknown_200", "trunc_data_short"])
def test_hostile_files_are_named(name: str) -> None:
    """B38, B40: through the whole load path."""
    path = model_path(STEM).parent.parent / "hostile" / f"{name}.gguf"
    with pytest.raises(ModelFileError, match=name):
        pantheon.load(path)
