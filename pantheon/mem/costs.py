"""What turns and loads cost, in bytes [X16, M192].

The engine fills these from the plan: the KV rows, state and scratch of this very model.  Must not know plans, models
or what is available.
"""

from __future__ import annotations

from dataclasses import dataclass

#: tokens of an answer that a turn is charged for in advance; what comes beyond them is left to the next looks
REPLY_TOKENS = 512


@dataclass(frozen=True)
class TurnCosts:
    """What one turn of a model takes beyond what is resident already.

    `kv_bytes_per_token`: KV rows of one position; `state_bytes`: conv and recurrent state of one conversation;
    `column_bytes`: activations of one column of a forward, at most `max_columns` of them at a time;
    `resident_tokens`, `resident_columns`: positions and columns whose pages are in memory already (a reused prefix, a
    scratch that earlier turns have touched).  `on_die`: KV and activations live on an accelerator, so that the host
    pays nothing [M190, M195].
    """

    kv_bytes_per_token: int
    column_bytes: int = 0
    max_columns: int = 256
    state_bytes: int = 0
    resident_tokens: int = 0
    resident_columns: int = 0
    on_die: bool = False

    def activation_bytes(self, n_tokens: int) -> int:
        """The peak of activations while n_tokens are read: bounded, because prompts run in chunks [M193]."""
        columns = min(max(0, n_tokens), self.max_columns)
        return self.column_bytes * max(0, columns - self.resident_columns)

    def bytes_for(self, prompt_tokens: int, reply_tokens: int = 0) -> int:
        """Bytes that a turn of so many tokens adds to the host; never falls when either grows."""
        if self.on_die:
            return 0
        new = max(0, prompt_tokens + reply_tokens - self.resident_tokens)
        return self.state_bytes + self.kv_bytes_per_token * new + self.activation_bytes(prompt_tokens)


@dataclass(frozen=True)
class LoadCosts:
    """What a loaded model takes in one place: a whole model, or its share of one die.

    `fixed_bytes`: weights, tables and scratch; `state_bytes`: what a slot owns whatever its length; `spike_bytes`: what
    the load itself takes for a while on top, on the host only.  KV is counted for `n_slots` full contexts [M196].
    """

    weights_bytes: int
    kv_bytes_per_token: int = 0
    scratch_bytes: int = 0
    table_bytes_per_token: int = 0
    state_bytes: int = 0
    n_slots: int = 1
    spike_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """What does not depend on the context."""
        return self.weights_bytes + self.scratch_bytes + self.n_slots * self.state_bytes

    @property
    def bytes_per_token(self) -> int:
        """What one more position of context costs, over all slots."""
        return self.n_slots * self.kv_bytes_per_token + self.table_bytes_per_token

    def bytes_for(self, n_ctx: int) -> int:
        """Resident bytes once every slot is full."""
        return self.fixed_bytes + self.bytes_per_token * n_ctx
