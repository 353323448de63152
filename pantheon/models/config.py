"""The hyper-parameters that every decoder-only architecture reads, with the defaults of llama.cpp's loader.

Reads a metadata mapping and a table of tensor shapes; never weights.  Every fault names the metadata key or tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pantheon.errors import PantheonError
from pantheon.plan.rope import RopeSpec, yarn_ramp

#: name -> shape in numpy order, (out, in) for matrices
Shapes = Mapping[str, tuple[int, ...]]
#: what an item of an array of flags may be
_FLAG = (bool, int, np.bool_, np.integer)
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"


#: llama.cpp knows 512
MAX_EXPERTS = 4096


class ModelConfigError(PantheonError):
    """Metadata or tensor shapes that do not describe a model that we can run."""

    status = 422
    type = "invalid_request_error"
    code = "invalid_model_file"


def tensor_shape(shapes: Shapes, name: str, expected: tuple[int, ...]) -> None:
    """Raise ModelConfigError unless the tensor is there with this shape; dims of 1 in front do not count, since
    writers drop and add them."""
    found = shapes.get(name)
    if found is None:
        raise ModelConfigError(f"tensor {name} is missing (expected shape {expected})", param=name)
    if _stripped(found) != _stripped(expected):
        raise ModelConfigError(f"tensor {name} has shape {found}, but the metadata asks for {expected}", param=name)


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


class Metadata:
    """Typed access to `general.*` and `<arch>.*` keys."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.arch = self._typed("general.architecture", str, None)

    def _typed(self, key: str, kind: type, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise ModelConfigError(f"metadata key {key} is missing", param=key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelConfigError(f"metadata key {key} should be {kind.__name__}, not {value!r:.60}", param=key)
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        """`<arch>.key` as a whole number within low..high; a per-layer array counts when all its items agree."""
        name = f"{self.arch}.{key}"
        value = self.values.get(name, default)
        if value is not None and not isinstance(value, int | float | str) and len(value):
            # items may be of any kind, lists included: compared, never hashed
            first = value.item(0) if isinstance(value, np.ndarray) else value[0]
            value = first if isinstance(first, int) and all(item == first for item in value) else value
        if value is default and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            fault = "is missing" if value is None else f"should be one whole number, not {value!r:.60}"
            raise ModelConfigError(f"metadata key {name} {fault}", param=name)
        if not low <= value <= high:
            raise ModelConfigError(f"metadata key {name} is {value}, outside {low}..{high}", param=name)
        return value

    def number(self, key: str, default: float | None = None, *, low: float = -1e30) -> float:
        """`<arch>.key` as a finite float, at least `low`."""
        name = f"{self.arch}.{key}"
        value = float(self._typed(name, float, default))
        if not abs(value) < 1e30:
            raise ModelConfigError(f"metadata key {name} is {value}, not a usable number", param=name)
        if value < low:
            raise ModelConfigError(f"metadata key {name} is {value:g}, below {low:g}", param=name)
        return value

    def base(self, key: str, default: float) -> float:
        """`<arch>.key` as what a rope table takes powers of."""
        return self.number(key, default, low=1e-6)

    def layer_flags(self, key: str, n_layer: int, default_period: int, n_block: int | None = None) -> tuple[bool, ...]:
        """`<arch>.key` as one flag for each layer: a bool array, or a period of which the last layer is False.

        n_block: how many flags an array may have as well, for blocks behind the layers.
        """
        name = f"{self.arch}.{key}"
        value = self.values.get(name, default_period)
        if isinstance(value, int) and not isinstance(value, bool):
            if not 1 <= value <= 1 << 16:
                raise ModelConfigError(f"metadata key {name} is {value}, no period of layers", param=name)
            return tuple(i % value < value - 1 for i in range(n_layer))
        flags = [] if isinstance(value, str | float | bool) else list(value)
        if len(flags) not in (n_layer, n_block) or not all(isinstance(f, _FLAG) and f in (0, 1) for f in flags):
            raise ModelConfigError(
                f"metadata key {name} is not a flag for each of {n_layer} layers: {value!r:.60}", param=name
            )
        return tuple(bool(flag) for flag in flags[:n_layer])

    def text(self, key: str, default: str) -> str:
        """`<arch>.key` as a string."""
        return str(self._typed(f"{self.arch}.{key}", str, default))


@dataclass(frozen=True)
class Config:
    """What the common decoder needs (ARCH.md §2 gives keys and defaults)."""

    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: int
    n_kv: int
    head_dim: int
    v_dim: int
    n_ff: int
    eps: float
    n_rot: int

    @staticmethod
    def read(meta: Metadata, shapes: Shapes, n_ff: int | None = None) -> Config:
        """Read and cross-check the common keys; n_ff: where feed_forward_length may be missing, what counts then."""
        n_embd = meta.integer("embedding_length")
        n_head = meta.integer("attention.head_count", high=4096)
        head_dim = meta.integer("attention.key_length", max(1, n_embd // n_head))
        n_kv = meta.integer("attention.head_count_kv", n_head, high=4096)
        embd = shapes.get("token_embd.weight")
        if embd is None or len(embd) != 2 or embd[1] != n_embd:
            raise ModelConfigError(
                f"tensor token_embd.weight has shape {embd}, but {meta.arch}.embedding_length is {n_embd}",
                param="token_embd.weight",
            )
        if n_head % n_kv:
            raise ModelConfigError(f"{n_head} heads can not share {n_kv} KV heads", param="attention.head_count_kv")
        n_rot = meta.integer("rope.dimension_count", head_dim)
        if n_rot > head_dim or n_rot % 2 or head_dim % 2:
            raise ModelConfigError(
                f"{meta.arch}.rope.dimension_count {n_rot} does not fit heads of {head_dim} (both must be even)",
                param="rope.dimension_count",
            )
        return Config(
            n_vocab=embd[0],
            n_ctx_train=meta.integer("context_length", high=1 << 30),
            n_embd=n_embd,
            n_layer=meta.integer("block_count", high=1024),
            n_head=n_head,
            n_kv=n_kv,
            head_dim=head_dim,
            v_dim=meta.integer("attention.value_length", head_dim),
            n_ff=meta.integer("feed_forward_length", n_ff),
            eps=meta.number("attention.layer_norm_rms_epsilon", low=0.0),
            n_rot=n_rot,
        )


def expert_counts(meta: Metadata, *, needed: bool = False) -> tuple[int, int]:
    """(experts, experts used by each token); (0, 0) for a model without, which is a fault when they are `needed`."""
    n = meta.integer("expert_count", 0, low=0, high=MAX_EXPERTS)
    if not n and needed:
        key = f"{meta.arch}.expert_count"
        raise ModelConfigError(f"metadata key {key} is missing or 0", param=key)
    if not n:
        return 0, 0
    return n, meta.integer("expert_used_count", high=n)


def still_pairs(meta: Metadata, n_rot: int) -> tuple[int, ...]:
    """The pairs of a rope by sections that no text position reaches: a fourth stream's, which stays 0 (ARCH.md §3)."""
    key = f"{meta.arch}.rope.dimension_sections"
    value = meta.values.get(key)
    if value is None:
        return ()
    items = [] if isinstance(value, str | int | float) else list(value)
    if not (3 <= len(items) <= 4 and all(isinstance(i, _FLAG) and 0 <= i <= n_rot for i in items) and sum(items)):
        raise ModelConfigError(f"metadata key {key} should be four sections of the rope, not {value!r:.60}", param=key)
    sectors = [pair % int(sum(items)) for pair in range(n_rot // 2)]
    return tuple(pair for pair, sector in enumerate(sectors) if sector >= 3 * items[sector % 3])


def rope_spec(
    meta: Metadata, cfg: Config, shapes: Shapes, *, pairing: Literal["norm", "neox"], still: tuple[int, ...] = ()
) -> RopeSpec:
    """The rope table of a model: linear and YaRN scaling, llama-3's factor tensor, longrope's two."""
    base = meta.base("rope.freq_base", 10000.0)
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 0.0, low=0.0), low=0.0)
    kind = meta.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelConfigError(f"unknown {meta.arch}.rope.scaling.type {kind!r}", param="rope.scaling.type")
    if kind == "yarn" and base <= 1:
        raise ModelConfigError(f"YaRN needs a rope.freq_base above 1, not {base:g}", param="rope.freq_base")
    freq_scale = 1.0 / factor if factor and kind != "none" else 1.0
    n_orig = meta.integer("rope.scaling.original_context_length", cfg.n_ctx_train, high=1 << 30)
    yarn = yarn_ramp(cfg.n_rot, base, n_orig) if kind == "yarn" else None
    short, long = _factor_tensors(shapes, cfg.n_rot)
    return RopeSpec(
        cfg.n_rot, base, pairing, freq_scale, meta.number("rope.scaling.attn_factor", 1.0), short, yarn,
        long, n_orig if long else 0, still,
    )  # fmt: skip


def _factor_tensors(shapes: Shapes, n_rot: int) -> tuple[str | None, str | None]:
    """(the tensor of rope divisors, the one for long contexts): llama-3's one, or longrope's two."""
    names = ("rope_freqs.weight", None) if "rope_freqs.weight" in shapes else (_SHORT, _LONG)
    if not any(name in shapes for name in names if name):
        return None, None
    for name in names:
        if name is not None:
            tensor_shape(shapes, name, (n_rot // 2,))
    return names
