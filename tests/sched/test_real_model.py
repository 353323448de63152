"""Eight users on a real (tiny) model: every answer equals its solo run, token for token.
[M074, M077, M107, M232, B30]"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from pantheon.engine.generate import generate
from pantheon.engine.prefix_cache import PrefixCache
from pantheon.engine.sampler import SamplingParams
from pantheon.sched.scheduler import SchedConfig, Scheduler
from tests.engine.tiny import tiny

GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "turns"])
@pytest.mark.parametrize("stem", ["tiny-llama-k.Q4_K_M", "tiny-qwen35.Q8_0"], ids=["attention", "recurrent"])
def test_eight_at_once_equal_their_solo_runs_M074_M107(stem: str, mixed: bool) -> None:
    """Three turns of twelve conversations on eight slots, some seeded: prompts of 1 to 150 tokens, warm from turn 2.

    Also where a state can only be taken back to what was remembered of it [X12]."""
    model = tiny(stem, "cpu", 512)
    chance = random.Random(11)
    state = model.new_state(12)
    config = SchedConfig(users=8, chunk=32, mixed=mixed)
    scheduler = Scheduler(model, state, PrefixCache(state, users=8), config)
    logs = [[chance.randrange(model.n_vocab) for _ in range(chance.choice([1, 7, 40, 150]))] for _ in range(12)]

    def params(who: int) -> SamplingParams:
        return GREEDY if who % 3 else SamplingParams(seed=who)

    def turn(who: int) -> list[int]:
        place, handle = scheduler.submit(
            logs[who], params(who), max_tokens=5 + who, ignore_eog=True, session=str(who) if who % 2 else None
        )
        with place:
            return [token.id for token in handle]

    try:
        with ThreadPoolExecutor(12) as pool:
            for _ in range(3):
                for who, answer in enumerate(pool.map(turn, range(12))):
                    alone = generate(
                        model, model.new_state(1), logs[who], params(who), max_tokens=5 + who, ignore_eog=True
                    )
                    assert answer == [token.id for token in alone], f"user {who}"
                    logs[who] += [*answer, *(chance.randrange(model.n_vocab) for _ in range(9))]
                scheduler.check_integrity()
        totals = scheduler.view()["totals"]
        assert totals["runs"] == 36 and totals["cached_tokens"] > 300 and totals["faults"] == 0
        assert totals["decode_columns"] > totals["steps"], "nobody shared a step"
    finally:
        scheduler.close()
