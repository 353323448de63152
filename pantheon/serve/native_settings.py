"""`generation_settings` and the `params` of /props and /slots: a request's settings under llama-server's names.

Names of samplers that this server does not have are there with the values that turn them off, since clients read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pantheon.engine.sampler import SamplingParams
from pantheon.serve.text_request import TextRequest

if TYPE_CHECKING:
    from pantheon.engine.model import Model

#: what llama-server shows for no seed
ANY_SEED = (1 << 32) - 1
_OFF: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 0,
    "dry_sequence_breakers": [],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
    "lora": [],
}


def settings_of(params: SamplingParams, cap: int | None, *, stream: bool = False) -> dict[str, Any]:
    """The settings of a request whose answer may have `cap` tokens (None: no limit)."""
    n_predict = -1 if cap is None else cap
    return {
        "seed": ANY_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": params.repeat_last_n,
        "repeat_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_probs": params.top_logprobs or 0,
        "stream": stream,
        **_OFF,
    }


def generation_settings(asked: TextRequest, model: Model) -> dict[str, Any]:
    """The settings that one answer of /completion was made with."""
    bias: list[dict[str, Any]] = [{"token": token, "bias": value} for token, value in asked.params.logit_bias]
    if asked.ignore_eog:
        # null stands for minus infinity
        bias += [{"token": token, "bias": None} for token in sorted(model.tokenizer.eog_ids)]
    return {
        **settings_of(asked.params, asked.max_tokens, stream=asked.stream),
        "stop": list(asked.stop),
        "ignore_eos": asked.ignore_eog,
        "logit_bias": bias,
        "grammar": "",
        "n_ctx": model.n_ctx,
    }
