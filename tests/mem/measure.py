"""Run in a process of its own: load a model, fill its context, print predicted and measured bytes as JSON."""

from __future__ import annotations

import gc
import json
import sys

import psutil

from pantheon.accel.executor import Columns
from pantheon.engine.admit import load_costs
from pantheon.engine.footprint import footprint
from pantheon.engine.generate import PREFILL_CHUNK
from pantheon.engine.load import load_model
from pantheon.serve.loading import give_back


def main(path: str, ctx: int, kv_type: str) -> dict[str, int]:
    """{before, predicted, measured}: RSS before the load, and the growth until every position is written."""
    need = footprint(path, ctx=ctx, kv_type=kv_type)
    before = settled()
    model = load_model(path, ctx=ctx, kv_type=kv_type)
    state = model.new_state()
    ids = [7 * i % (model.n_vocab - 1) + 1 for i in range(ctx)]
    for first in range(0, ctx, PREFILL_CHUNK):
        model.forward(state, Columns.of_slot(ids[first : first + PREFILL_CHUNK], first))
    return {"before": before, "predicted": load_costs(need).bytes_for(ctx), "measured": settled() - before}


def settled() -> int:
    """RSS without what only waits to be freed."""
    gc.collect()
    give_back()
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
