"""The sampler against a naive twin, its order, determinism, ties, edges and errors.  [M040, M082]"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pantheon import seams
from pantheon.engine import sampler_filters as filters
from pantheon.engine.sampler import LEAST_LOGPROB, Sampler, SamplingParams
from pantheon.errors import BadRequest, PantheonError

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def row(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def draws(params: SamplingParams, logits: NDArray[np.float32], n: int, prompt: tuple[int, ...] = ()) -> list[int]:
    """n independent tokens of one sampler; nothing is accepted."""
    sampler = Sampler(params, len(logits))
    sampler.prime(prompt)
    return [sampler.sample(logits).token for _ in range(n)]


def naive(
    logits: NDArray[np.float32], p: SamplingParams, prompt: list[int], output: list[int], banned: set[int]
) -> dict[int, float]:
    """The distribution by the stated order, in plain Python."""
    x = [float(v) for v in logits]
    for token, bias in p.logit_bias:
        x[token] += bias
    everything = prompt + output
    n = p.repeat_last_n
    for token in set(everything if n < 0 else everything[len(everything) - min(n, len(everything)) :]):
        x[token] = x[token] / p.repeat_penalty if x[token] > 0 else x[token] * p.repeat_penalty
    for token in set(output):
        x[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    for token in banned:
        x[token] = -math.inf
    order = sorted((i for i in range(len(x)) if x[i] > -math.inf), key=lambda i: (-x[i], i))
    if p.temperature == 0:
        return {order[0]: 1.0}
    if p.top_k > 0:
        order = order[: p.top_k]
    best = x[order[0]]
    total = sum(math.exp(x[i] - best) for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += math.exp(x[i] - best) / total
        if mass >= p.top_p:
            break
    if p.top_p == 1:
        kept = order
    kept = [i for i in kept if math.exp(x[i] - best) >= p.min_p]
    weights = {i: math.exp((x[i] - best) / p.temperature) for i in kept}
    total = sum(weights.values())
    return {i: w / total for i, w in weights.items()}


class Ban:
    """A constraint that forbids some ids."""

    done = False

    def __init__(self, banned: set[int]) -> None:
        self.banned = sorted(banned)
        self.accepted: list[int] = []

    def mask(self, logits: NDArray[np.float32]) -> None:
        logits[self.banned] = -np.inf

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_samples_come_from_the_naive_distribution(data: st.DataObject) -> None:
    """[M040] Any parameters: only tokens that the stated order keeps, in a support that the twin agrees with."""
    n = data.draw(st.integers(4, 60))
    # multiples of 1/8 with a tiny id-dependent part: ties never sit on a rounding edge of top_p or min_p
    grid = data.draw(st.lists(st.integers(-40, 40), min_size=n, max_size=n))
    logits = (np.array(grid) / 8 + np.arange(n) * 1e-3).astype(np.float32)
    ids = st.integers(0, n - 1)
    prompt, output = data.draw(st.lists(ids, max_size=20)), data.draw(st.lists(ids, max_size=20))
    banned = set(data.draw(st.lists(ids, max_size=n - 1)))
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=data.draw(st.sampled_from([-1, 0, 1, 3, 10, 1000])),
        top_p=data.draw(st.sampled_from([0.0, 0.137, 0.531, 0.913, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.0517, 0.413])),
        repeat_penalty=data.draw(st.sampled_from([1.0, 1.13, 0.87])),
        repeat_last_n=data.draw(st.sampled_from([-1, 0, 1, 5, 64])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.51, -0.53])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.217, -0.313])),
        logit_bias=tuple(data.draw(st.lists(st.tuples(ids, st.sampled_from([-100.0, -1.5, 2.25])), max_size=4))),
        seed=data.draw(st.integers(0, 2**70)),
    )
    sampler = Sampler(params, n, Ban(banned) if banned else None)
    sampler.prime(prompt)
    for token in output:
        sampler.accept(token)
    before = logits.copy()
    seen = [sampler.sample(logits).token for _ in range(60)]
    expected = naive(logits, params, prompt, output, banned)
    assert set(seen) <= set(expected)
    if params.temperature:
        assert all(t in seen for t, q in expected.items() if q > 0.5)
    assert np.array_equal(logits, before), "the row of the runner is only read"


@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        PLAIN | {"temperature": 0.6},
        PLAIN | {"top_k": 7},
        PLAIN | {"top_p": 0.8},
        PLAIN | {"min_p": 0.1},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_chi_square_against_the_exact_distribution(options: dict[str, float]) -> None:
    """[M040] 6,000 draws of a fixed seed fit the exact distribution (chi-square, far beyond the 99.9 % quantile)."""
    logits = (np.random.default_rng(5).standard_normal(40) * 1.5).astype(np.float32)
    params = SamplingParams(seed=11, **options)  # type: ignore[arg-type]
    expected = naive(logits, params, [], [], set())
    seen = draws(params, logits, 6000)
    counts = np.bincount(seen, minlength=40)
    assert sum(counts[t] for t in expected) == 6000
    often = [t for t, q in expected.items() if q * 6000 >= 5]
    statistic = sum((counts[t] - 6000 * expected[t]) ** 2 / (6000 * expected[t]) for t in often)
    freedom = len(often) - 1
    assert freedom >= 3
    assert statistic < freedom + 3.7 * math.sqrt(2 * freedom) + 10


def test_large_flat_row_draws_from_its_nucleus() -> None:
    """top_p alone over a row so flat that its nucleus is thousands of ids: the same set as by sorting."""
    logits = (np.random.default_rng(1).standard_normal(20_000) * 0.3).astype(np.float32)
    for top_p in (0.05, 0.5, 0.9, 0.999):
        order = np.argsort(-logits, kind="stable")
        mass = np.cumsum(np.exp(logits[order].astype(np.float64)))
        size = int(np.searchsorted(mass, top_p * mass[-1])) + 1
        got = filters.nucleus_ids(logits, float(logits.max()), top_p, -math.inf)
        assert abs(len(got) - size) <= 1, "float32 rounding may move the last id"
        assert set(got[: size - 1].tolist()) <= set(order[: size + 1].tolist())
        assert len(set(got.tolist())) == len(got)


def test_bias_comes_before_penalties_and_the_mask_after_them() -> None:
    """Stated order: a bias that turns a logit positive is divided, not multiplied; a mask beats any bias."""
    biased = SamplingParams(temperature=0, logit_bias=((0, 4.0),), repeat_penalty=2.0)
    sampler = Sampler(biased, 3)
    sampler.prime([0])
    # (-1 + 4) / 2 = 1.5 > 1.4; the other order would give -1 * 2 + 4 = 2, and without the penalty 3
    assert sampler.sample(row(-1, 1.4, 0)).token == 0
    assert sampler.sample(row(-1, 1.6, 0)).token == 1
    masked = Sampler(SamplingParams(temperature=0, logit_bias=((1, 100.0),)), 3, Ban({1}))
    assert masked.sample(row(0, 0, 1)).token == 2


def test_top_p_is_measured_on_what_top_k_left_and_before_temperature() -> None:
    logits = row(*np.log([0.4, 0.3, 0.2, 0.1]))
    # among the two best, token 0 holds 4/7 = 0.571; of everything only 0.4
    assert set(draws(SamplingParams(**PLAIN | {"top_k": 2, "top_p": 0.55}, seed=0), logits, 200)) == {0}
    assert set(draws(SamplingParams(**PLAIN | {"top_p": 0.55}, seed=0), logits, 200)) == {0, 1}
    hot = SamplingParams(**PLAIN | {"top_p": 0.65, "temperature": 50.0}, seed=0)
    assert set(draws(hot, logits, 200)) == {0, 1}, "a hot temperature does not widen the nucleus"


def test_repeat_penalty_sees_prompt_and_output_and_forgets_beyond_its_window() -> None:
    params = SamplingParams(temperature=0, repeat_penalty=10.0, repeat_last_n=2)
    sampler = Sampler(params, 3)
    sampler.prime([2, 2, 2, 0])
    assert sampler.sample(row(5, 4, 3)).token == 1
    sampler.accept(1)
    assert sampler.sample(row(5, 4, 0.1)).token == 0, "0.5 against 0.4: both are inside the window"
    sampler.accept(1)
    assert sampler.sample(row(5, 4, 3)).token == 0, "0 has left the window"
    sampler.prime([])
    assert sampler.sample(row(1, 4, 3)).token == 1, "prime begins a new answer"


def test_presence_and_frequency_count_output_only() -> None:
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25), 2)
    sampler.prime([0, 0, 0, 0])
    assert sampler.sample(row(1, 0.9)).token == 0
    sampler.accept(0)
    assert sampler.sample(row(1, 0.26)).token == 1, "1 - 0.5 - 0.25 = 0.25"
    assert sampler.sample(row(1, 0.24)).token == 0
    sampler.accept(0)
    assert sampler.sample(row(1, 0.01)).token == 1, "the count adds up: 1 - 0.5 - 2 * 0.25 = 0"


def test_window_of_everything_grows_past_its_first_allocation() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=2.0, repeat_last_n=-1), 3)
    sampler.prime([0] + [1] * 1000)
    for _ in range(1000):
        sampler.accept(1)
    assert sampler.sample(row(3, 3, 2)).token == 2, "id 0 was seen 2001 tokens ago and still counts"


def test_same_seed_same_tokens_whatever_runs_beside() -> None:
    """[M040, M082, B11f] A request's tokens depend on its seed and rows only, not on interleaved neighbours."""
    rows = (np.random.default_rng(2).standard_normal((50, 500)) * 2).astype(np.float32)
    params = SamplingParams(seed=1234, repeat_penalty=1.1, frequency_penalty=0.1)

    def run(neighbours: int) -> list[int]:
        mine = Sampler(params, 500)
        mine.prime([1, 2, 3])
        others = [Sampler(SamplingParams(seed=k), 500) for k in range(neighbours)]
        out = []
        for r in rows:
            for other in others:
                other.accept(other.sample(r).token)
            np.random.rand()  # the global state must not matter
            out.append(mine.sample(r).token)
            mine.accept(out[-1])
        return out

    alone = run(0)
    assert alone == run(3)
    assert len(set(alone)) > 10
    assert draws(SamplingParams(seed=1235), rows[0], 50) != draws(SamplingParams(seed=1234), rows[0], 50)


def test_without_a_seed_two_runs_differ() -> None:
    logits = np.zeros(1000, np.float32)
    params = SamplingParams(**PLAIN)
    assert draws(params, logits, 20) != draws(params, logits, 20)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5, -(2**80)])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    params = SamplingParams(**PLAIN, seed=seed)
    logits = np.zeros(100, np.float32)
    assert draws(params, logits, 8) == draws(params, logits, 8)


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(5000, np.float32)
    logits[[4000, 300, 77]] = 2
    assert draws(SamplingParams(temperature=0), logits, 1) == [77]
    assert set(draws(SamplingParams(**PLAIN | {"top_k": 2}, seed=0), logits, 100)) == {77, 300}
    assert set(draws(SamplingParams(**PLAIN | {"top_k": 5}, seed=0), logits, 400)) == {77, 300, 4000, 0, 1}
    assert draws(SamplingParams(**PLAIN | {"top_k": 1}, seed=0), logits, 1) == [77]


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"top_k": 1}, {"temperature": 1e-30}, {"min_p": 1.0}])
def test_extreme_values_keep_the_best_token(options: dict[str, float]) -> None:
    logits = (np.random.default_rng(3).standard_normal(3000)).astype(np.float32)
    params = SamplingParams(**PLAIN | options)  # type: ignore[arg-type]
    assert set(draws(params, logits, 20)) == {int(logits.argmax())}


def test_huge_temperature_is_uniform_over_what_is_left() -> None:
    assert set(draws(SamplingParams(**PLAIN | {"temperature": 1e30}, seed=0), row(50, 0, -50), 100)) == {0, 1, 2}


@pytest.mark.parametrize("top_k", [0, 40])
def test_forbidden_tokens_are_never_drawn(top_k: int) -> None:
    logits = np.full(2000, -np.inf, np.float32)
    logits[[3, 1999]] = 0, 0.1
    for top_p in (0.999, 1.0):
        params = SamplingParams(temperature=5, top_k=top_k, top_p=top_p, min_p=0, seed=0)
        assert set(draws(params, logits, 100)) == {3, 1999}


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"repeat_penalty": 1.2}, PLAIN])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_row_is_one_clear_error(options: dict[str, float], value: float) -> None:
    """NaN and +inf are refused, wherever they stand, and never drawn from."""
    logits = np.zeros(1000, np.float32)
    logits[517] = value
    with pytest.raises(PantheonError, match=r"logit of (nan|inf)") as caught:
        draws(SamplingParams(**options), logits, 1, prompt=(1,))  # type: ignore[arg-type]
    assert caught.value.code == "bad_logits"


def test_a_mask_can_not_hide_a_broken_row() -> None:
    with pytest.raises(PantheonError, match="nan"):
        Sampler(SamplingParams(), 3, Ban({0})).sample(row(np.nan, 1, 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_leaves_nothing_is_one_clear_error(temperature: float) -> None:
    with pytest.raises(PantheonError, match="no token is left") as caught:
        Sampler(SamplingParams(temperature=temperature), 3, Ban({0, 1, 2})).sample(row(1, 2, 3))
    assert caught.value.code == "no_token_left"


def test_accept_reaches_the_constraint() -> None:
    ban = Ban({0})
    sampler = Sampler(SamplingParams(), 3, ban)
    sampler.accept(2)
    sampler.accept(1)
    assert ban.accepted == [2, 1]


def test_logprobs_are_those_of_the_model() -> None:
    """[B11c] log-softmax of the unmodified row: bias, penalties, mask and temperature do not touch them."""
    logits = np.random.default_rng(4).standard_normal(300).astype(np.float32)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    params = SamplingParams(temperature=0, logit_bias=((7, 50.0),), top_logprobs=3)
    got = Sampler(params, 300).sample(logits)
    assert got.token == 7
    assert got.logprob == pytest.approx(exact[7], abs=1e-5)
    assert [t for t, _ in got.top] == np.argsort(-logits, kind="stable")[:3].tolist()
    assert [p for _, p in got.top] == pytest.approx(np.sort(exact)[::-1][:3].tolist(), abs=1e-5)
    chosen_only = Sampler(SamplingParams(temperature=0, top_logprobs=0), 300).sample(logits)
    assert chosen_only.logprob is not None and chosen_only.top == ()
    assert Sampler(SamplingParams(temperature=0), 300).sample(logits).logprob is None


def test_logprobs_stay_json_numbers() -> None:
    got = Sampler(SamplingParams(temperature=0, top_logprobs=5), 3).sample(row(0, -np.inf, -np.inf))
    assert got.logprob == 0.0 and got.top == ((0, 0.0),)
    forced = SamplingParams(temperature=0, logit_bias=((0, -100.0),), top_logprobs=0)
    assert Sampler(forced, 2).sample(row(50, -60_000)).logprob == 0.0
    forced = SamplingParams(temperature=0, logit_bias=((0, -100_000.0),), top_logprobs=0)
    assert Sampler(forced, 2).sample(row(50, -60_000)).logprob == LEAST_LOGPROB


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 1.1), ("top_p", -1.0),
        ("min_p", 2.0), ("repeat_penalty", 0.0), ("repeat_penalty", math.nan), ("repeat_last_n", -2),
        ("presence_penalty", math.inf), ("frequency_penalty", math.nan), ("top_logprobs", -1),
        ("logit_bias", ((1, math.inf),)),
    ],
)  # fmt: skip
def test_values_out_of_range_name_their_field(field: str, value: object) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


@pytest.mark.parametrize("token", [-1, 100, 99_999_999])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    """[B11d]"""
    with pytest.raises(BadRequest) as caught:
        Sampler(SamplingParams(logit_bias=((token, 5.0),)), 100)
    assert caught.value.param == "logit_bias"


def test_biases_of_one_token_add_up() -> None:
    assert draws(SamplingParams(temperature=0, logit_bias=((0, 2.0), (0, 2.0))), row(0, 3), 1) == [0]


def test_sampling_is_a_failure_point() -> None:
    seams.arm("sample@2")
    try:
        sampler = Sampler(SamplingParams(), 3)
        sampler.sample(row(1, 2, 3))
        with pytest.raises(seams.InjectedFailure):
            sampler.sample(row(1, 2, 3))
    finally:
        seams.arm("")


@pytest.mark.parametrize("shape", ["peaked", "flat", "constant"])
def test_the_vocabulary_is_never_sorted(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Default parameters on a 49k vocabulary: nothing longer than a few hundred values is sorted or partitioned."""
    n = 49_152
    noise = np.random.default_rng(0).standard_normal(n)
    logits = (noise * {"peaked": 4.0, "flat": 0.01, "constant": 0.0}[shape]).astype(np.float32)
    sizes: list[int] = []
    real = filters.sort_candidates

    def counting(values: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.int64]:
        sizes.append(len(ids))
        return real(values, ids)

    monkeypatch.setattr(filters, "sort_candidates", counting)
    sampler = Sampler(SamplingParams(seed=0), n)
    for _ in range(3):
        sampler.sample(logits)
    assert len(sizes) == 3 and max(sizes) <= 512


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_best_ids_are_those_of_a_stable_sort(data: st.DataObject) -> None:
    """Any size, any number of ties and of forbidden ids, whether or not blocks cover the row evenly."""
    n = data.draw(st.sampled_from([1, 7, 700, 4096, 5000, 20_001]))
    k = data.draw(st.sampled_from([1, 2, 40, 300]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.integers(0, data.draw(st.sampled_from([1, 3, 50, 10**6])), n).astype(np.float32)
    logits[rng.random(n) < data.draw(st.sampled_from([0.0, 0.5, 0.999]))] = -np.inf
    order = np.argsort(-logits, kind="stable")
    assert filters.top_ids(logits, k).tolist() == [i for i in order[:k].tolist() if logits[i] > -np.inf]


@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_a_nucleus_of_the_whole_row_is_cut_by_min_p(top_p: float) -> None:
    """[M040] top_k off, as some clients send it: the same ids as the stated order keeps, few or many."""
    for scale in (0.01, 1.0, 6.0):
        logits = (np.random.default_rng(7).standard_normal(3000) * scale).astype(np.float32)
        params = SamplingParams(**PLAIN | {"top_p": top_p, "min_p": 0.25})
        best = float(logits.max())
        got = filters.nucleus_ids(logits, best, top_p, filters.min_p_floor(best, 0.25))
        assert abs(len(got) - len(wanted := naive(logits, params, [], [], set()))) <= 1, "float32 may move the last id"
        assert len(set(got.tolist()) ^ set(wanted)) <= 1


def test_a_row_of_the_wrong_size_is_a_bug_not_a_guess() -> None:
    with pytest.raises(ValueError, match="shape"):
        Sampler(SamplingParams(), 4).sample(row(1, 2, 3))


ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize("options", [{}, {"top_k": 0}, ALL, {"repeat_penalty": 1.3}])
def test_what_a_token_was_drawn_with(options: dict[str, Any]) -> None:
    """The probabilities that are told are those that the draws have: counted over many seeds."""
    logits = np.asarray([2.0, 1.5, 1.0, 0.0, -1.0, -9.0], np.float32)
    drawn = []
    for seed in range(400):
        sampler = Sampler(SamplingParams(seed=seed, top_logprobs=6, post_sampling=True, temperature=0.8, **options), 6)
        sampler.prime([1, 1])
        token, value, top = sampler.sample(logits)
        drawn.append(token)
        told = dict(top)
        assert value == pytest.approx(told[token]) and sum(map(math.exp, told.values())) == pytest.approx(1)
    for token, value in told.items():
        assert drawn.count(token) / len(drawn) == pytest.approx(math.exp(value), abs=0.08)
    assert set(drawn) <= set(told)
