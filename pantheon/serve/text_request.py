"""What every door to plain text completion asks for: one checked request, and the jobs that it becomes.

The doors (completions.py, native_completion.py, infill.py) translate their bodies into a `TextRequest`; nothing here
knows the shape of a reply.  A prompt is the caller's own: control markers in it are parsed, nothing is put around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pantheon.engine.constraint import make_constraint
from pantheon.engine.sampler import Constraint, SamplingParams
from pantheon.errors import BadRequest
from pantheon.serve.chat_job import Job, check_bias, room
from pantheon.serve.constraint_fields import constraint_names
from pantheon.serve.placement import marks_of_text
from pantheon.serve.request_fields import Fields, kind
from pantheon.serve.translated import named_as
from pantheon.text.prompt import check_least

if TYPE_CHECKING:
    from pantheon.engine.model import Model
    from pantheon.engine.prefix_cache import Marks

MAX_PROMPTS = 32
#: texts and token ids in order
Prompt = tuple[str | int, ...]
_FORMS = "a string, an array of token ids and strings, or an array of such prompts"
#: what a bias of `false` adds: nothing survives it, and it is still a number
_NEVER = -1e30


@dataclass(frozen=True)
class TextRequest:
    """One checked request for text.

    `max_tokens` None means until the model ends or the window is full.  `n` answers are made for each prompt.
    `constraint` is what make_constraint takes.  `bias_texts`: biases of every token of a text.
    """

    prompts: tuple[Prompt, ...]
    model: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    ignore_eog: bool = False
    constraint: dict[str, Any] | None = None
    bias_texts: tuple[tuple[str, float], ...] = ()
    session_id: str | None = None


def read_prompts(fields: Fields, name: str = "prompt") -> tuple[Prompt, ...]:
    """One prompt or several, each a text, token ids, both mixed, or an object with `prompt_string`.

    Raises BadRequest (param: name).
    """
    return tuple(_prompt(fields, name, item) for item in read_items(fields, name))


def read_items(fields: Fields, name: str, most: int = MAX_PROMPTS) -> list[Any]:
    """The prompts of a field as they stand; one alone as a list of one.  Raises BadRequest (param: name)."""
    value = fields.body.get(name)
    items = [value] if isinstance(value, str | dict) or _is_sequence(value) else value
    if not isinstance(items, list) or not items:
        raise fields.fault(name, f"must be {_FORMS}")
    if len(items) > most:
        raise fields.fault(name, f"at most {most} of them, not {len(items)}")
    return items


def is_several(value: Any) -> bool:
    """Whether a prompt field holds a list of prompts rather than one."""
    return isinstance(value, list) and not _is_sequence(value)


def _is_sequence(value: Any) -> bool:
    # ["a", "b"] are two prompts, [1, "a"] is one: a number tells them apart
    return isinstance(value, list) and any(_is_id(item) for item in value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt(fields: Fields, name: str, item: Any) -> Prompt:
    if isinstance(item, dict):
        if item.get("multimodal_data"):
            raise fields.fault(name, "multimodal_data: this model reads text only")
        item = item.get("prompt_string")
        if not isinstance(item, str):
            raise fields.fault(name, f"prompt_string must be a string, not {kind(item)}")
    if isinstance(item, str):
        return (item,)
    return read_sequence(fields, name, item)


def read_sequence(fields: Fields, name: str, item: Any) -> Prompt:
    """An array of texts and token ids.  Raises BadRequest (param: name)."""
    if isinstance(item, list) and item and all(isinstance(part, str) or _is_id(part) for part in item):
        return tuple(item)
    raise fields.fault(name, f"must be {_FORMS}")


def read_bias(fields: Fields) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[str, float], ...]]:
    """`logit_bias` in llama-server's forms: pairs or an object, of ids or texts; `false` forbids a token.

    Returns the biases of ids and those of texts.
    """
    value = fields.body.get("logit_bias")
    pairs = list(value.items()) if isinstance(value, dict) else [] if value is None else value
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise fields.fault("logit_bias", "must be an object, or an array of [token, bias]")
    ids, texts = [], []
    for token, bias in pairs:
        if bias is False:
            bias = _NEVER
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= -_NEVER:
            raise fields.fault("logit_bias", f"the bias of {str(token)[:40]!r} must be a number or false")
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 12:
            token = int(token)
        if _is_id(token) and token >= 0:
            ids.append((token, float(bias)))
        elif isinstance(token, str):
            texts.append((token, float(bias)))
        else:
            raise fields.fault("logit_bias", "a token must be an id or a text")
    return tuple(ids), tuple(texts)


def prompt_ids(model: Model, prompt: Prompt, param: str = "prompt", *, special: bool = True) -> list[int]:
    """Token ids of one prompt; with `special` a text in front gets the begin token that the model wants.

    Raises BadRequest for a token that the model does not have, and for a text that can not fit, unread.
    """
    for part in prompt:
        if isinstance(part, str):
            check_least(model.tokenizer, part, model.n_ctx, param)
    return text_ids(model, prompt, param, add_special=special)


def text_ids(
    model: Model, prompt: Prompt, param: str, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """Token ids of texts and ids in order.  Raises BadRequest for a token that the model does not have."""
    ids: list[int] = []
    for at, part in enumerate(prompt):
        if isinstance(part, str):
            ids += model.tokenize(part, add_special and at == 0, parse_special)
        elif 0 <= part < model.n_vocab:
            ids.append(part)
        else:
            raise BadRequest(f"{param}: token {part} is outside the vocabulary of {model.n_vocab}", param=param)
    return ids


def marks_of_prompt(prompt: Prompt) -> Marks:
    """Where this prompt may be warm."""
    return marks_of_text(prompt[0] if isinstance(prompt[0], str) else " ".join(map(str, prompt)))


def make_jobs(model: Model, asked: TextRequest, prompts: Sequence[Sequence[int]]) -> Iterator[Job]:
    """One job for each prompt (token ids) and choice.  Raises BadRequest for whatever this model has to refuse."""
    params = _with_texts(model, asked)
    check_bias(params, model.n_vocab)
    spec = asked.constraint

    def new_constraint() -> Constraint | None:
        return make_constraint(model.tokenizer, spec) if spec else None

    with named_as(constraint_names(spec)):
        new_constraint()
    for ids in prompts:
        job = Job(
            prompt_ids=list(ids),
            params=params,
            limit=room(ids, model.n_ctx, asked.max_tokens, "prompt"),
            stop=asked.stop,
            parse_reasoning=False,
            new_constraint=new_constraint,
            ignore_eog=asked.ignore_eog,
            uncapped=asked.max_tokens is None,
        )
        yield from (job.choice(index) for index in range(asked.n))


def _with_texts(model: Model, asked: TextRequest) -> SamplingParams:
    if not asked.bias_texts:
        return asked.params
    more = [
        (token, bias) for text, bias in asked.bias_texts for token in model.tokenize(text, add_special=False)
    ]
    return replace(asked.params, logit_bias=(*asked.params.logit_bias, *more))
