"""The generation path without HTTP: jobs, steps, results, order [M046, M054, M078, M079]."""

from __future__ import annotations

from typing import Any

import pytest

from pantheon.engine.scripted import scripted_model
from pantheon.errors import BadRequest, Cancelled
from pantheon.serve.chat_job import Job, prepare_chat
from pantheon.serve.chat_request import parse_chat_request
from pantheon.serve.generation import Delta, Generation

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def job_of(model: Any, **body: Any) -> Job:
    return prepare_chat(model, parse_chat_request({"messages": [{"role": "user", "content": "hi"}], **body}))


def model_of(*pieces: Any, **script: Any) -> Any:
    return scripted_model({"pieces": list(pieces), "template": TEMPLATE, **script})


def run(model: Any, job: Job, **options: Any) -> tuple[list[list[Delta]], Any]:
    generation = Generation(model, model.new_state(), job, **options)
    steps = [step.deltas for step in generation]
    return steps, generation.result


def test_one_step_a_token_and_a_result_at_the_last() -> None:
    model = model_of("ab", "c")
    generation = Generation(model, model.new_state(), job_of(model))
    seen = []
    for step in generation:
        seen.append(([delta.text for delta in step.deltas], generation.result is not None))
    assert seen == [(["ab"], False), (["c"], False), ([], True)]
    assert generation.result is not None
    assert (generation.result.finish_reason, generation.result.prompt_tokens) == ("stop", 2)
    assert generation.result.completion_tokens == 2 and not generation.result.context_capped
    assert generation.result.prompt_ms >= 0 and generation.result.predicted_ms >= 0


def test_order_of_a_generation_M079() -> None:
    """The prompt is read in chunks, each asked for before; only then tokens come, and each is asked for before."""
    model = model_of("a", "b")
    trace: list[str] = []

    def cancelled() -> bool:
        trace.append("?")
        return False

    generation = Generation(
        model,
        model.new_state(),
        job_of(model, messages=[{"role": "user", "content": "x" * 300}]),
        cancelled=cancelled,
        on_prefill=lambda done, total: trace.append(f"{done}/{total}"),
    )
    trace += [delta.text for step in generation for delta in step.deltas]
    assert trace[:7] == ["0/300", "?", "128/300", "?", "256/300", "?", "300/300"]
    assert trace[7:] == ["?", "?", "a", "b"]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_cancel_ends_it_within_a_step_M252(after: int) -> None:
    model = model_of("a", eog=False)
    asked = iter([False] * after)
    with pytest.raises(Cancelled):
        run(model, job_of(model), cancelled=lambda: next(asked, True))


def test_limit_is_cut_to_the_room_B06e() -> None:
    model = model_of("a", n_ctx=10)
    assert job_of(model).limit == 8
    assert job_of(model, max_tokens=3).limit == 3
    assert job_of(model, max_tokens=10_000_000).limit == 8


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(BadRequest) as fault:
        job_of(model_of("a"), messages=[{"role": "user", "content": ""}])
    assert fault.value.param == "messages"


def test_tools_reach_the_prompt_unless_choice_is_none_B09c() -> None:
    model = model_of("a")
    tool = {"type": "function", "function": {"name": "f"}}
    assert bytes(job_of(model, tools=[tool]).prompt_ids) == b"[f]hi"
    none = job_of(model, tools=[tool], tool_choice="none")
    assert bytes(none.prompt_ids) == b"hi" and none.format is None


def test_template_kwargs_reach_the_template_B21b() -> None:
    model = scripted_model({"pieces": ["a"], "template": "{{ reasoning_effort }}-{{ colour }}"})
    job = job_of(model, reasoning_effort="low", chat_template_kwargs={"colour": "red"})
    assert bytes(job.prompt_ids) == b"low-red"


def test_a_fresh_constraint_for_every_choice() -> None:
    model = model_of("{", "}", "{")
    job = job_of(model, response_format={"type": "json_object"})
    for _ in range(2):
        assert run(model, job)[0][0][0].text == "{"


def test_seed_counts_up_over_choices() -> None:
    job = job_of(model_of("a"), seed=5)
    assert [job.choice(i).params.seed for i in range(3)] == [5, 6, 7]
    assert job_of(model_of("a")).choice(1).params.seed is None
    assert job_of(model_of("a"), seed=(1 << 64) - 1).choice(1).params.seed == 0


def test_logit_bias_outside_the_vocabulary_B11d() -> None:
    model = model_of("a")
    with pytest.raises(BadRequest) as fault:
        job_of(model, logit_bias={str(model.n_vocab): 1})
    assert fault.value.param == "logit_bias"
    job_of(model, logit_bias={str(model.n_vocab - 1): 1})


def test_two_runs_on_one_state_are_alike_M076() -> None:
    model = model_of("a", "b", "c")
    state = model.new_state()
    first = Generation(model, state, job_of(model))
    next(iter(first))
    second = Generation(model, state, job_of(model))
    assert "".join(delta.text for step in second for delta in step.deltas) == "abc"
