"""POST /infill: code between a prefix and a suffix, for models that were trained with fill-in-the-middle tokens.

The prompt is laid out as llama-server does: repository and other files first where the model has tokens for them, then
prefix, suffix and what stands in the middle already.  What does not fit goes: other files first, then the far ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pantheon.serve.http_errors import HttpError
from pantheon.serve.request_fields import Fields, kind

if TYPE_CHECKING:
    from pantheon.engine.model import Model

_PROJECT = "myproject\n"
#: files that stand in front of the prefix: (name, text)
Extra = tuple[str | None, str]


def check_fim(model: Model) -> None:
    """Raise HttpError 501 for a model without the tokens."""
    missing = [role for role in ("pre", "suf", "mid") if role not in model.tokenizer.fim]
    if missing:
        raise HttpError(
            501, f"{model.name}: this model has no fill-in-the-middle tokens ({', '.join(missing)})",
            code="not_supported", type="not_supported_error",
        )  # fmt: skip


def read_extra(fields: Fields) -> tuple[Extra, ...]:
    """`input_extra`: [{"filename": …, "text": …}].  Raises BadRequest."""
    found: list[Extra] = []
    for i, item in enumerate(fields.items("input_extra")):
        if not isinstance(item, dict):
            raise fields.fault(f"input_extra[{i}]", f"must be an object, not {kind(item)}")
        inner = Fields(item, f"input_extra[{i}].")
        text = inner.text("text")
        if text is None:
            raise inner.fault("text", "must be a string")
        found.append((inner.text("filename"), text))
    return tuple(found)


def fill_in_ids(
    model: Model,
    prefix: Sequence[int],
    suffix: str,
    middle: str = "",
    extra: Sequence[Extra] = (),
    most: int | None = None,
) -> list[int]:
    """The prompt, of at most `most` tokens where it can be cut.  Raises HttpError 501: see check_fim."""
    check_fim(model)
    fim = model.tokenizer.fim

    def ids(text: str) -> list[int]:
        return model.tokenize(text, add_special=False)

    before, after, behind = list(prefix), ids(suffix), ids(middle)
    bos = [model.tokenizer.bos_id] if model.tokenizer.add_bos and model.tokenizer.bos_id is not None else []
    left = (model.n_ctx - 1 if most is None else most) - len(behind) - len(bos) - 3
    if left < len(before) + len(after):
        # three parts before for one behind, and what one side leaves the other may have
        keep = min(len(after), max(left // 4, left - len(before), 0))
        after, before = after[:keep], before[max(0, len(before) - max(0, left - keep)) :]
    others = _files(model, extra, ids)
    others = others[max(0, len(others) - max(0, left - len(before) - len(after))) :]
    return [*bos, *others, fim["pre"], *before, fim["suf"], *after, fim["mid"], *behind]


def _files(model: Model, extra: Sequence[Extra], ids: Any) -> list[int]:
    fim = model.tokenizer.fim
    found = [fim["rep"], *ids(_PROJECT)] if "rep" in fim and "sep" in fim and extra else []
    for name, text in extra:
        head = [fim["sep"], *ids(f"{name or 'tmp'}\n")] if "sep" in fim else []
        found += [*head, *ids(text)]
    if extra and "sep" in fim:
        found += [fim["sep"], *ids("filename\n")]
    return found
