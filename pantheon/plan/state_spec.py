"""What one conversation owns: KV rows and recurrent state per layer, and what that costs in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class KVType(Enum):
    """Number format of the KV cache.  Q8_0, Q4_0: 8 or 4 bits with one F16 scale for every 32 dims of a head's row."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"

    def row_bytes(self, dim: int) -> int:
        """Bytes of one head's K or V at one position."""
        if self in (KVType.Q8_0, KVType.Q4_0):
            return (dim if self is KVType.Q8_0 else -(-dim // 2)) + 2 * -(-dim // 32)
        return dim * (4 if self is KVType.F32 else 2)


@dataclass(frozen=True)
class KVSpec:
    """One KV layer: `kv_heads` rows of `k_dim` and of `v_dim` values for each position."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0

    def bytes_per_token(self, kv_type: KVType) -> int:
        """Bytes of one position in this layer."""
        return self.kv_heads * (kv_type.row_bytes(self.k_dim) + kv_type.row_bytes(self.v_dim))


@dataclass(frozen=True)
class RecurrentSpec:
    """One recurrent layer, float32: the last `taps` - 1 inputs of `channels` channels of a convolution, oldest first;
    then for each of `heads` heads a matrix of key_dim x value_dim."""

    channels: int
    taps: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def conv_floats(self) -> int:
        """Values of the convolution's past."""
        return (self.taps - 1) * self.channels

    @property
    def floats(self) -> int:
        """Values of the layer."""
        return self.conv_floats + self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class StateSpec:
    """`kv[layer]` is what `StoreKV.layer` and `Attend.layer` index, `recurrent[layer]` what `Conv.layer` and
    `DeltaRule.layer` do."""

    kv: tuple[KVSpec, ...]
    recurrent: tuple[RecurrentSpec, ...] = ()

    @property
    def recurrent_bytes(self) -> int:
        """What one slot costs however long its conversation is."""
        return 4 * sum(layer.floats for layer in self.recurrent)

    def bytes_per_token(self, kv_type: KVType) -> int:
        """KV bytes that one more position of one slot costs."""
        return sum(layer.bytes_per_token(kv_type) for layer in self.kv)

    def slot_bytes(self, kv_type: KVType, n_ctx: int) -> int:
        """Bytes of one slot that can hold n_ctx positions."""
        return self.bytes_per_token(kv_type) * n_ctx + self.recurrent_bytes
