"""The account of a request: where its time went, however it ended [M047, issue 5 point 5]."""

from __future__ import annotations

import pytest

from pantheon.serve.entry import Entry
from pantheon.serve.flight import Flight, Flights, labels_of, session_hash, timings_of
from pantheon.serve.metrics import Metrics


class Watch:
    """Stands for time.perf_counter."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setattr("pantheon.serve.flight.time.perf_counter", found)
    return found


def fly(watch: Watch, flight: Flight, tokens: int = 4, finish: str | None = "stop") -> None:
    """Half a second in the queue, a prompt of 300 of which 100 are warm in two chunks of 1 s, tokens 0.1 s apart."""
    watch.now += 0.5
    flight.entered(0.5)
    flight.begin(300, 100, 50)
    for done in (100, 200, 300):
        flight.on_prefill(done, 300)
        watch.now += 1.0 if done < 300 else 0.0
    for _ in range(tokens):
        flight.on_token()
        watch.now += 0.1
    flight.end(finish)


def test_the_parts_of_a_request(watch: Watch) -> None:
    flight = Flight(Entry("m", "/m", 3, dies=(0, 1)), watch.now, "req_1", "bob@example.org")
    fly(watch, flight)
    facts = flight.facts()
    assert facts.pop("session") == session_hash("bob@example.org") != "bob@example.org"
    assert facts == {
        "model": "m", "replica": 3, "dies": [0, 1], "queue_ms": 500.0, "ttft_ms": 2500.0, "prompt_ms": 2000.0,
        "predicted_ms": 400.0, "prompt_tokens": 300, "cached_tokens": 100, "completion_tokens": 4, "answers": 1,
        "finish": ["stop"],
    }  # fmt: skip
    assert flight.forwards == 2 + 3, "the first token comes with the last chunk"
    assert sum(flight.gaps.counts) == 3 and flight.gaps.total == pytest.approx(0.3)
    assert flight.labels == {"model": "m", "replica": "3", "die": "0,1"}
    assert labels_of(Entry("m", "/m", 0))["die"] == "cpu"


def test_several_answers_add_up(watch: Watch) -> None:
    flight = Flight(Entry("m", "/m", 0), watch.now)
    fly(watch, flight)
    fly(watch, flight, finish="length")
    facts = flight.facts()
    assert (facts["answers"], facts["prompt_tokens"], facts["completion_tokens"]) == (2, 600, 8)
    assert facts["finish"] == ["stop", "length"] and facts["ttft_ms"] == 2500.0, "of the first one"


def test_timings_while_it_runs_never_go_back(watch: Watch) -> None:
    flight = Flight(Entry("m", "/m", 0), watch.now)
    assert all(value == 0 for value in flight.timings().values())
    flight.entered(0.0)
    flight.begin(300, 0, None)
    flight.on_prefill(0, 300)
    watch.now += 1
    assert flight.timings()["prompt_n"] == 0 == flight.timings()["prompt_ms"], "before its first chunk is read"
    flight.on_prefill(128, 300)
    assert (flight.timings()["prompt_n"], flight.timings()["prompt_ms"]) == (128, 1000.0)
    flight.on_prefill(300, 300)
    flight.on_token()
    watch.now += 1
    now = flight.timings()
    assert (now["prompt_n"], now["prompt_ms"], now["predicted_n"], now["predicted_ms"]) == (300, 1000.0, 1, 1000.0)
    assert now["predicted_per_second"] == 0.0


def test_the_rate_leaves_the_first_token_out() -> None:
    """As llama-server's: it comes from the prompt's last forward and costs no step."""
    found = timings_of(cached=10, read=20, prompt_ms=40.0, made=16, predicted_ms=30.0)
    assert found["predicted_per_second"] == 500.0 and found["predicted_per_token_ms"] == 2.0
    assert found["prompt_per_second"] == 500.0 and found["prompt_per_token_ms"] == 2.0
    alone = timings_of(cached=0, read=1, prompt_ms=0.0, made=1, predicted_ms=0.0)
    assert alone["predicted_per_second"] == alone["predicted_per_token_ms"] == alone["prompt_per_second"] == 0.0


def test_what_a_flight_did_is_counted_when_it_leaves(watch: Watch) -> None:
    metrics = Metrics()
    flights, entry = Flights(metrics), Entry("m", "/m", 0)
    flight = Flight(entry, watch.now)
    with flights.track(flight):
        assert flights.on(entry) == [flight] and flights.on(Entry("m", "/m", 1)) == []
        fly(watch, flight)
        assert metrics.value("completion_tokens_total") == 0
    assert flights.on(entry) == []
    assert metrics.value("prompt_tokens_total", model="m", replica="0", die="cpu") == 300
    assert metrics.value("llamacpp:prompt_tokens_total") == 200 and metrics.value("vllm:prompt_tokens_total") == 300
    assert metrics.value("llamacpp:prompt_tokens_cached_total") == 100
    assert metrics.value("vllm:request_success_total", finished_reason="stop", model_name="m") == 1
    text = metrics.render()
    for name, total in (("time_to_first_token", 2.5), ("inter_token_latency", 0.3), ("e2e_request_latency", 2.9)):
        assert f'vllm:{name}_seconds_sum{{die="cpu",model="m",model_name="m",replica="0"}} {total:.10g}' in text


def test_one_that_was_cut_off_counts_what_it_made(watch: Watch) -> None:
    metrics = Metrics()
    flight = Flight(Entry("m", "/m", 0), watch.now)
    with pytest.raises(RuntimeError), Flights(metrics).track(flight):
        fly(watch, flight, finish="tool_calls")
        flight.begin(10, 0, None)
        flight.on_token()
        raise RuntimeError
    assert metrics.value("completion_tokens_total") == 5
    assert metrics.value("vllm:request_success_total", finished_reason="stop") == 1
    assert metrics.value("vllm:request_success_total", finished_reason="abort") == 1


def test_one_that_never_got_in_has_no_first_token(watch: Watch) -> None:
    metrics = Metrics()
    with Flights(metrics).track(Flight(Entry("m", "/m", 0), watch.now)):
        watch.now += 30
    text = metrics.render()
    assert 'vllm:request_queue_time_seconds_sum{die="cpu",model="m",model_name="m",replica="0"} 30' in text
    assert "vllm:time_to_first_token_seconds_count" not in text


def test_a_session_is_told_apart_and_not_told() -> None:
    assert session_hash(None) is None and session_hash("") is None
    assert session_hash("a") == session_hash("a") != session_hash("b")
