"""`pantheon perplexity`: how well a model predicts a text: by this operators compare files and KV formats."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pantheon.commands import common
from pantheon.errors import BadRequest

if TYPE_CHECKING:
    from pantheon.engine.model import Model

#: columns of one forward, each with a row of logits
_CHUNK = 64


class Score(NamedTuple):
    """Over all scored tokens: mean negative log likelihood, its standard error, how many."""

    nll: float
    error: float
    tokens: int


def add_parser(subparsers: Any) -> None:
    """`pantheon perplexity [MODEL] --text FILE …`."""
    parser = subparsers.add_parser(
        "perplexity",
        help="measure how well a model predicts a text",
        usage="pantheon perplexity [MODEL] --text FILE [flags]",
        description="Perplexity of a text file, in windows: the second half of each is scored, given all before it.",
    )
    common.add_model_flags(parser, "the window")
    parser.add_argument("--text", metavar="FILE", required=True, help="a UTF-8 text; - reads stdin")
    parser.add_argument("--window", type=common.whole(8), default=512, metavar="N", help="tokens of a window (default: 512)")  # fmt: skip # noqa: E501
    parser.add_argument("--max-windows", type=common.whole(1), metavar="N", help="score no more than so many windows")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Load, score, print."""
    text = _read(args.text)
    args.ctx = args.ctx or args.window
    if args.ctx < args.window:
        raise common.UsageError(f"--window {args.window} does not fit --ctx {args.ctx}")
    with common.load(args, common.pick_model(args.words)) as model:
        began = time.monotonic()
        score = perplexity(model, model.tokenize(text), args.window, args.max_windows)
        took_s = time.monotonic() - began
        report = {
            "model": model.name,
            "kv_type": model.runner.kv_type.value,
            "window": args.window,
            "scored_tokens": score.tokens,
            "nll": round(score.nll, 5),
            "perplexity": round(math.exp(score.nll), 4),
            "perplexity_error": round(math.exp(score.nll) * score.error, 4),
            "seconds": round(took_s, 2),
        }
    if args.json:
        print(json.dumps(report))
    else:
        shown = f"{report['perplexity']:.4f} +/- {report['perplexity_error']:.4f}"
        print(f"perplexity {shown} over {score.tokens} tokens ({report['kv_type']} cache, window {args.window})")
    return 0


def perplexity(model: Model, ids: list[int], window: int, most: int | None = None) -> Score:
    """Score the second half of each whole window; each begins with the model's begin token where it has one.

    Raises BadRequest for a text that is shorter than one window.
    """
    n_windows = min(len(ids) // window, most or len(ids))
    if not n_windows:
        raise BadRequest(f"the text has {len(ids)} tokens, less than one window of {window}", param="--text")
    state, losses = model.new_state(), []
    for i in range(n_windows):
        part = ids[i * window : (i + 1) * window]
        if model.tokenizer.add_bos and model.tokenizer.bos_id is not None:
            part = [model.tokenizer.bos_id, *part[1:]]
        state.reset(0)
        losses.append(_losses(model, state, part))
    flat = np.concatenate(losses)
    return Score(float(flat.mean()), float(flat.std() / math.sqrt(len(flat))), len(flat))


def _losses(model: Model, state: Any, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """-log p of each token of the second half, given all before it."""
    from pantheon.accel.executor import Columns

    first, found = len(ids) // 2, []
    for begin in range(0, len(ids) - 1, _CHUNK):
        end = min(begin + _CHUNK, len(ids) - 1)
        columns = Columns.of_slot(ids[begin:end], begin, wanted="all" if end > first else "none")
        rows = model.forward(state, columns)
        if not len(rows):
            continue
        wide = rows.astype(np.float64)
        top = wide.max(axis=-1, keepdims=True)
        log_sum = top[:, 0] + np.log(np.exp(wide - top).sum(axis=-1))
        losses = log_sum - wide[np.arange(len(wide)), ids[begin + 1 : end + 1]]
        found.append(losses[max(0, first - begin) :])
    return np.concatenate(found)


def _read(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else "is no UTF-8 text"
        raise BadRequest(f"--text {path}: {why}", param="--text") from None
