"""The figures of GET /metrics: the text format to the letter, names that others know, histograms that add up [B47]."""

from __future__ import annotations

import gc
import re

import pytest

from pantheon.serve.metrics import FAMILIES, FIRST_S, GAP_S, Gaps, Metrics

LABELS = {"model": "m", "replica": "0", "die": "cpu"}
#: what llama-server's own test of its metrics asks for
LLAMA = {
    "counter": (
        "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total", "tokens_predicted_total",
        "tokens_predicted_seconds_total", "n_decode_total", "n_tokens_max", "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total",
    ),
    "gauge": (
        "prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing", "requests_deferred",
        "n_busy_slots_per_decode",
    ),
}  # fmt: skip
#: what dashboards of vLLM ask for
VLLM = {
    "counter": (
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "request_success_total",
    ),
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    "histogram": (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_prompt_tokens", "request_generation_tokens",
    ),
}  # fmt: skip


def test_every_family_has_its_head_once_whether_it_has_samples_or_not() -> None:
    text = Metrics().render()
    heads = re.findall(r"^# HELP (\S+) (.+)\n# TYPE (\S+) (\S+)$", text, re.M)
    assert [(name, kind) for name, _, again, kind in heads if name == again] == [
        (name, family.kind) for name, family in FAMILIES.items()
    ]
    assert text.count("# TYPE") == len(FAMILIES) and text.endswith("\n") and "\n\n" not in text
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"[a-z][a-z0-9_:]*", name) and "\n" not in family.help and "\\" not in family.help
        # what falls is a gauge; llama-server's one exception is a high watermark
        assert (family.kind == "counter") == name.endswith(("_total", "llamacpp:n_tokens_max")), name


@pytest.mark.parametrize(("prefix", "names"), [("llamacpp", LLAMA), ("vllm", VLLM)])
def test_the_names_that_others_know_have_their_types(prefix: str, names: dict[str, tuple[str, ...]]) -> None:
    for kind, wanted in names.items():
        for name in wanted:
            assert FAMILIES[f"{prefix}:{name}"].kind == kind
    # llama-server's clients read its samples without labels, from the start
    text = Metrics().render()
    assert all(f"\nllamacpp:{name} 0\n" in text for wanted in LLAMA.values() for name in wanted)


def test_a_histogram_is_cumulative_and_ends_with_everything() -> None:
    metrics = Metrics()
    for value in (0.0005, 0.001, 0.0011, 5000.0):
        metrics.observe("vllm:time_to_first_token_seconds", value, **LABELS)
    name, labels = "vllm:time_to_first_token_seconds", 'die="cpu",model="m",replica="0"'
    lines = [line for line in metrics.render().splitlines() if line.startswith(name)]
    assert lines[0] == f'{name}_bucket{{{labels},le="0.001"}} 2', "a bound belongs to its bucket"
    assert lines[1] == f'{name}_bucket{{{labels},le="0.005"}} 3'
    assert lines[len(FIRST_S)] == f'{name}_bucket{{{labels},le="+Inf"}} 4'
    assert lines[-2:] == [f"{name}_sum{{{labels}}} 5000.0026", f"{name}_count{{{labels}}} 4"]
    counts = [int(line.rpartition(" ")[2]) for line in lines[: len(FIRST_S) + 1]]
    assert counts == sorted(counts) and len(lines) == len(FIRST_S) + 3
    bounds = [float(bound) for bound in re.findall('le="([^"]+)"', "\n".join(lines))]
    assert bounds == sorted(bounds)


def test_gaps_that_were_gathered_alone_are_merged() -> None:
    metrics, gaps = Metrics(), Gaps()
    for value in (0.004, 0.02, 100.0):
        gaps.add(value)
    for _ in range(2):
        metrics.merge("vllm:inter_token_latency_seconds", gaps, **LABELS)
    text = metrics.render()
    assert 'inter_token_latency_seconds_count{die="cpu",model="m",replica="0"} 6' in text
    assert sum(gaps.counts) == 3, "what was gathered is its owner's"
    with pytest.raises(AssertionError):
        metrics.merge("vllm:time_to_first_token_seconds", Gaps(GAP_S))


def test_gauges_of_what_is_gone_are_gone_and_counters_stay() -> None:
    metrics = Metrics()
    metrics.replace("slots", [(LABELS, 8), ({**LABELS, "model": "n"}, 1)])
    assert metrics.value("slots") == 9 and metrics.value("slots", model="m") == 8
    metrics.replace("slots", [(LABELS, 4)])
    assert metrics.value("slots") == 4
    metrics.raise_to("llamacpp:n_tokens_max", 9)
    metrics.raise_to("llamacpp:n_tokens_max", 5)
    assert metrics.value("llamacpp:n_tokens_max") == 9


def test_totals_that_others_keep_never_fall_when_they_are_made_anew() -> None:
    class Keeper:
        pass

    metrics, keeper = Metrics(), Keeper()
    for total in (3, 3, 5):
        metrics.advance("forwards_total", keeper, total, **LABELS)
    assert metrics.value("forwards_total") == 5
    # the same replica again after an unload: its totals begin at 0
    del keeper
    gc.collect()
    metrics.advance("forwards_total", Keeper(), 2, **LABELS)
    assert metrics.value("forwards_total") == 7


def test_an_unknown_name_is_a_bug_of_ours() -> None:
    for call in (Metrics().add, lambda name: Metrics().observe(name, 1)):
        with pytest.raises(KeyError):
            call("no_such_total")
