"""One answer on the command line: tokens to text as they come, Ctrl-C, and how fast it went."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from pantheon import seams
from pantheon.errors import Cancelled

if TYPE_CHECKING:
    from pantheon.accel.executor import RunnerState
    from pantheon.engine.model import Model
    from pantheon.engine.sampler import SamplingParams


@dataclass
class Answer:
    """What came out: `ids` holds every sampled token; finish is "stop", "length" or "interrupted"."""

    n_prompt: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str = "length"
    prompt_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: the first token belongs to the prompt's forward."""
        return (len(self.ids) - 1) / self.decode_s if len(self.ids) > 1 and self.decode_s > 0 else 0.0

    def summary(self) -> str:
        """One line for people."""
        speed = f", {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else ""
        prompt = f"prompt {self.n_prompt} tokens in {self.prompt_s:.2f} s"
        stopped = {"length": ", cut at the limit", "interrupted": ", interrupted"}.get(self.finish, "")
        return f"[{len(self.ids)} tokens{speed}; {prompt}{stopped}]"


class StopKey:
    """While it is open the first Ctrl-C only sets `pressed`; the second raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> StopKey:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


def stream_answer(
    model: Model,
    state: RunnerState,
    ids: Sequence[int],
    params: SamplingParams,
    max_tokens: int | None,
    emit: Callable[[str], None],
    cancelled: Callable[[], bool],
) -> Answer:
    """Generate after `ids`, hand the text to `emit` piece by piece.  A cancel ends the answer, not the program."""
    from pantheon.engine.generate import generate
    from pantheon.text.detokenizer import Detokenizer

    answer, detokenizer, now = Answer(len(ids)), Detokenizer(model.tokenizer), seams.SYSTEM_CLOCK.monotonic
    started = first = last = now()

    def put(text: str) -> None:
        answer.text += text
        emit(text)

    try:
        limit = model.n_ctx if max_tokens is None else max_tokens
        for token in generate(model, state, ids, params, max_tokens=limit, cancelled=cancelled):
            last = now()
            first = last if token.n == 1 else first
            answer.ids.append(token.id)
            if token.is_eog:
                answer.finish = "stop"
            else:
                put(detokenizer.push(token.id))
    except Cancelled:
        answer.finish = "interrupted"
    put(detokenizer.flush())
    answer.prompt_s, answer.decode_s = first - started, last - first
    return answer
