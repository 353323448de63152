"""What one conversation owns: KV rows per layer (later: conv and recurrent state), and what that costs in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class KVType(Enum):
    """Number format of the KV cache.  Q8_0 and Q4_0 come with the degradation ladder."""

    F32 = "f32"
    F16 = "f16"

    @property
    def value_bytes(self) -> int:
        """Bytes of one cached value."""
        return 4 if self is KVType.F32 else 2


@dataclass(frozen=True)
class KVSpec:
    """One KV layer: `kv_heads` rows of `k_dim` and of `v_dim` values for each position."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0


@dataclass(frozen=True)
class StateSpec:
    """`kv[layer]` is what `StoreKV.layer` and `Attend.layer` index."""

    kv: tuple[KVSpec, ...]

    def bytes_per_token(self, kv_type: KVType) -> int:
        """KV bytes that one more position of one slot costs."""
        values = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in self.kv)
        return values * kv_type.value_bytes

    def slot_bytes(self, kv_type: KVType, n_ctx: int) -> int:
        """Bytes of one slot that can hold n_ctx positions."""
        return self.bytes_per_token(kv_type) * n_ctx
