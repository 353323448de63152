"""Dequantisers against golden blocks, bit for bit [M223], and against a second reading of whole tensors."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from golden_data import load_golden
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.errors import PantheonError
from pantheon.formats import quant

GOLDEN_TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip
PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


@pytest.mark.parametrize("name", GOLDEN_TYPES)
def test_m223_blocks_are_bit_exact(name: str) -> None:
    golden = load_golden("dequant_blocks")[name]
    raw = np.frombuffer(bytes.fromhex("".join(golden["blocks_hex"])), dtype=np.uint8)
    kind = quant.by_name(name)
    assert (kind.id, kind.block_values, kind.block_bytes) == (
        golden["ggml_type"], golden["block_values"], golden["block_bytes"],
    )  # fmt: skip
    values = quant.dequantize(name, raw, len(golden["blocks_hex"]) * kind.block_values)
    assert values.dtype == np.float32 and values.ndim == 1
    assert values.tobytes().hex() == golden["f32_hex"]


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_m223_plain_floats(name: str) -> None:
    bits = np.arange(0, 65536, 7, dtype=np.uint16).astype(f"<u{PLAIN[name].itemsize}")
    stored = bits.view(PLAIN[name])
    stored = stored[~np.isnan(stored)]
    values = quant.dequantize(name, stored.view(np.uint8), stored.size)
    assert np.array_equal(values, stored.astype(np.float32))


def test_m223_bf16_is_the_upper_half_of_float32() -> None:
    wide = np.random.default_rng(1).standard_normal(999).astype(np.float32)
    top = (wide.view(np.uint32) >> 16).astype("<u2")
    values = quant.dequantize("BF16", top.view(np.uint8), wide.size)
    assert np.array_equal(values.view(np.uint32), wide.view(np.uint32) & np.uint32(0xFFFF0000))


@pytest.mark.parametrize("name", [t.name for t in quant.all_types() if quant.can_dequantize(t.name)])
def test_blocks_are_independent_and_input_is_left_alone(name: str) -> None:
    kind = quant.by_name(name)
    raw = np.random.default_rng(kind.id).integers(0, 256, (5, kind.block_bytes), dtype=np.uint8)
    raw.flags.writeable = False
    whole = quant.dequantize(name, raw, 5 * kind.block_values)
    parts = [quant.dequantize(name, row, kind.block_values) for row in raw]
    assert whole.tobytes() == np.concatenate(parts).tobytes()
    assert whole.flags.writeable


@pytest.mark.parametrize("name", [t.name for t in quant.all_types() if quant.can_dequantize(t.name)])
def test_odd_alignment_and_no_values(name: str) -> None:
    kind = quant.by_name(name)
    raw = np.random.default_rng(3).integers(0, 100, 2 * kind.block_bytes + 1, dtype=np.uint8)
    shifted, copied = raw[1:], raw[1:].copy()
    a = quant.dequantize(name, shifted, 2 * kind.block_values)
    b = quant.dequantize(name, copied, 2 * kind.block_values)
    assert a.tobytes() == b.tobytes()
    assert quant.dequantize(name, raw[:0], 0).shape == (0,)


@pytest.mark.parametrize("name", [t.name for t in quant.all_types() if not quant.can_dequantize(t.name)])
def test_known_types_without_a_dequantizer_are_named(name: str) -> None:
    kind = quant.by_name(name)
    with pytest.raises(PantheonError, match=rf"weight type {name} can not be dequantised"):
        quant.dequantize(name, np.zeros(kind.block_bytes, np.uint8), kind.block_values)


@pytest.mark.parametrize("number,shown", [(4, "Q4_2"), (36, "IQ4_NL_4_4"), (200, "200"), (-1, "-1")])
def test_unknown_and_removed_numbers_are_named(number: int, shown: str) -> None:
    with pytest.raises(PantheonError, match=shown):
        quant.by_id(number)


def test_table_is_consistent() -> None:
    for kind in quant.all_types():
        assert quant.by_id(kind.id) is kind and quant.by_name(kind.name) is kind
        assert quant.row_bytes(kind, 3 * kind.block_values) == 3 * kind.block_bytes
    with pytest.raises(PantheonError, match="'Q9_X'"):
        quant.by_name("Q9_X")


@pytest.mark.parametrize("size,values", [(18, 31), (17, 32), (18, 64), (0, 32), (18, -32)])
def test_sizes_that_do_not_fit(size: int, values: int) -> None:
    with pytest.raises(ValueError):
        quant.dequantize("Q4_0", np.zeros(size, np.uint8), values)


#: where the f16 scales of a block are
_SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(_SCALES)), st.integers(1, 4), st.randoms(use_true_random=False))
def test_values_stay_within_what_the_codes_can_hold(name: str, n: int, random: object) -> None:
    """With scales of 1 every value is a whole number below 2**13: no code wraps around."""
    kind = quant.by_name(name)
    raw = np.frombuffer(random.randbytes(n * kind.block_bytes), np.uint8).reshape(n, -1).copy()  # type: ignore[attr-defined]
    for at in _SCALES[name]:
        raw[:, at : at + 2] = np.array([1.0], "<f2").view(np.uint8)
    values = quant.dequantize(name, raw, n * kind.block_values)
    assert np.array_equal(values, np.rint(values))
    assert np.abs(values).max() < 8192


def test_iq1_m_agrees_with_gguf_py() -> None:
    """No golden block of this type is at hand; its scale is spread over four words."""
    raw = np.random.default_rng(29).integers(0, 256, (200, 56), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.IQ1_M)
    assert np.array_equal(quant.dequantize("IQ1_M", raw, raw.shape[0] * 256), theirs.ravel(), equal_nan=True)
