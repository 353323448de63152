"""Write small GGUF files: any metadata, any tensors, any fault; and tiny llama models with random weights.

    python tools/make_tiny_gguf.py OUT.gguf [--type Q8_0] [--layers 2] [--width 64] [--shards 2] …

The writer checks nothing, so that tests can write what a reader must refuse.  It shares no code with the reader.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.formats.quantize import QUANTIZABLE, quantize

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
_TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "BF16": 30}


@dataclass(frozen=True)
class Array:
    """An array value: the type of its items and the items (Arrays again when the type is ARR)."""

    item_type: int
    items: Sequence[Any]


@dataclass(frozen=True)
class Key:
    """One metadata pair: key, type, value."""

    key: str | bytes
    type: int
    value: Any


@dataclass(frozen=True)
class Tensor:
    """One tensor as it goes to the file: dims in GGUF order (row length first), ggml type number, data.

    `offset` overrides the place in the data section that the writer would choose.
    """

    name: str | bytes
    dims: Sequence[int]
    type: int
    data: bytes
    offset: int | None = None


def encode_string(text: str | bytes) -> bytes:
    """u64 length and the bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def encode_value(kind: int, value: Any) -> bytes:
    """A metadata value without its type number."""
    if kind == STR:
        return encode_string(value)
    if kind == ARR:
        head = struct.pack("<IQ", value.item_type, len(value.items))
        if value.item_type in (STR, ARR):
            return head + b"".join(encode_value(value.item_type, item) for item in value.items)
        return head + struct.pack(f"<{len(value.items)}{_CODES[value.item_type]}", *value.items)
    return struct.pack(f"<{_CODES[kind]}", value)


def encode_key(pair: Key) -> bytes:
    """A metadata pair."""
    return encode_string(pair.key) + struct.pack("<I", pair.type) + encode_value(pair.type, pair.value)


def encode_gguf(
    keys: Sequence[Key], tensors: Sequence[Tensor] = (), *, version: int = 3, alignment: int = 32,
    n_keys: int | None = None, n_tensors: int | None = None, magic: bytes = b"GGUF",
) -> bytes:  # fmt: skip
    """A whole file.  `n_keys` and `n_tensors` override the true counts; `alignment` adds no key."""
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    out = bytearray(magic + struct.pack("<IQQ", version, *counts))
    for pair in keys:
        out += encode_key(pair)
    data = bytearray()
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        out += encode_string(tensor.name) + struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        out += struct.pack("<IQ", tensor.type, offset)
        data += tensor.data
    out += bytes(-len(out) % alignment)
    data += bytes(-len(data) % alignment)
    return bytes(out + data)


def make_tensor(name: str, values: NDArray[np.float32], type_name: str = "F32") -> Tensor:
    """A tensor of float32 values (NumPy order), stored as `type_name`; rows that do not fit its blocks become F16."""
    if type_name in ("Q8_0", "Q4_0") and values.shape[-1] % 32:
        type_name = "F16"
    raw = quantize(type_name, values).tobytes()
    return Tensor(name, tuple(reversed(values.shape)), _TYPE_IDS[type_name], raw)


def write_split(folder: Path, stem: str, keys: Sequence[Key], tensors: Sequence[Tensor], n_shards: int) -> list[Path]:
    """Write `stem-0000k-of-0000n.gguf` as llama.cpp's gguf-split does; the metadata goes to the first."""
    paths = []
    per_shard = -(-len(tensors) // n_shards)
    for number in range(n_shards):
        split = [
            Key("split.no", U16, number), Key("split.count", U16, n_shards),
            Key("split.tensors.count", I32, len(tensors)),
        ]  # fmt: skip
        mine = tensors[number * per_shard : (number + 1) * per_shard]
        path = folder / f"{stem}-{number + 1:05d}-of-{n_shards:05d}.gguf"
        path.write_bytes(encode_gguf([*(keys if number == 0 else ()), *split], mine))
        paths.append(path)
    return paths


# tiny llama models


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a tiny llama model; `type_name` is the type of its matrices."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    ff: int = 128
    ctx: int = 512
    rope_base: float = 10_000.0
    tied: bool = True
    biases: bool = False
    type_name: str = "F32"
    seed: int = 1

    @property
    def head_dim(self) -> int:
        """Values of one head."""
        return self.width // self.heads


_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = tuple("Ġ t,h e,i n,Ġ a,Ġt he,e r,o n,r e,Ġ s,a t,Ġ w,o u,in g,Ġa n,l l,o r".split(","))
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tiny_vocabulary() -> list[str]:
    """Byte-level BPE tokens: specials, the 256 bytes, one token for each merge."""
    return [*_SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in _MERGES)]


def tokenizer_keys() -> list[Key]:
    """Metadata of a tiny byte-level BPE tokenizer with ChatML markers."""
    tokens = tiny_vocabulary()
    types = [3] * len(_SPECIALS) + [1] * (len(tokens) - len(_SPECIALS))
    return [
        Key("tokenizer.ggml.model", STR, "gpt2"),
        Key("tokenizer.ggml.pre", STR, "gpt-2"),
        Key("tokenizer.ggml.tokens", ARR, Array(STR, tokens)),
        Key("tokenizer.ggml.token_type", ARR, Array(I32, types)),
        Key("tokenizer.ggml.merges", ARR, Array(STR, _MERGES)),
        Key("tokenizer.ggml.bos_token_id", U32, 0),
        Key("tokenizer.ggml.eos_token_id", U32, 2),
        Key("tokenizer.ggml.add_bos_token", BOOL, 0),
        Key("tokenizer.chat_template", STR, _TEMPLATE),
    ]


def llama_keys(shape: LlamaShape) -> list[Key]:
    """All metadata of a tiny llama model."""
    return [
        Key("general.architecture", STR, "llama"),
        Key("general.name", STR, "tiny llama, random weights"),
        Key("llama.context_length", U32, shape.ctx),
        Key("llama.embedding_length", U32, shape.width),
        Key("llama.block_count", U32, shape.layers),
        Key("llama.feed_forward_length", U32, shape.ff),
        Key("llama.attention.head_count", U32, shape.heads),
        Key("llama.attention.head_count_kv", U32, shape.kv_heads),
        Key("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        Key("llama.rope.dimension_count", U32, shape.head_dim),
        Key("llama.rope.freq_base", F32, shape.rope_base),
        Key("llama.vocab_size", U32, len(tiny_vocabulary())),
        *tokenizer_keys(),
    ]


def _near_one(noise: NDArray[np.float32]) -> NDArray[np.float32]:
    return noise * np.float32(0.1) + np.float32(1)


def _block_tensors(shape: LlamaShape, layer: int, draw: Callable[..., NDArray[np.float32]]) -> list[Tensor]:
    kv = shape.kv_heads * shape.head_dim
    outs = {
        "attn_q": (shape.width, shape.width), "attn_k": (kv, shape.width), "attn_v": (kv, shape.width),
        "attn_output": (shape.width, shape.width), "ffn_gate": (shape.ff, shape.width),
        "ffn_up": (shape.ff, shape.width), "ffn_down": (shape.width, shape.ff),
    }  # fmt: skip
    tensors = []
    for norm in ("attn_norm", "ffn_norm"):
        tensors.append(make_tensor(f"blk.{layer}.{norm}.weight", _near_one(draw(shape.width))))
    for name, (rows, cols) in outs.items():
        weight = draw(rows, cols) * np.float32(cols**-0.5)
        tensors.append(make_tensor(f"blk.{layer}.{name}.weight", weight, shape.type_name))
        if shape.biases and name.startswith("attn_") and name != "attn_output":
            tensors.append(make_tensor(f"blk.{layer}.{name}.bias", draw(rows) * np.float32(0.1)))
    return tensors


def llama_tensors(shape: LlamaShape) -> list[Tensor]:
    """All tensors of a tiny llama model, normal random weights of the shape's seed."""
    rng = np.random.default_rng(shape.seed)

    def draw(*size: int) -> NDArray[np.float32]:
        return rng.standard_normal(size, dtype=np.float32)

    n_vocab = len(tiny_vocabulary())
    tensors = [make_tensor("token_embd.weight", draw(n_vocab, shape.width), shape.type_name)]
    for layer in range(shape.layers):
        tensors += _block_tensors(shape, layer, draw)
    tensors.append(make_tensor("output_norm.weight", _near_one(draw(shape.width))))
    if not shape.tied:
        tensors.append(make_tensor("output.weight", draw(n_vocab, shape.width), shape.type_name))
    return tensors


def write_tiny_llama(path: Path, shape: LlamaShape | None = None, *, version: int = 3) -> Path:
    """Write a tiny llama model as one file.  Returns the path."""
    shape = shape or LlamaShape()
    path.write_bytes(encode_gguf(llama_keys(shape), llama_tensors(shape), version=version))
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="write a tiny llama model with random weights")
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="F32", choices=QUANTIZABLE, help="type of the matrices")
    for name in ("layers", "width", "heads", "kv_heads", "ff", "ctx", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(LlamaShape, name))
    parser.add_argument("--shards", type=int, default=1, help="write OUT-0000k-of-0000n.gguf")
    parser.add_argument("--gguf-version", type=int, default=3, choices=(2, 3))
    args = parser.parse_args()
    shape = LlamaShape(
        layers=args.layers, width=args.width, heads=args.heads, kv_heads=args.kv_heads, ff=args.ff, ctx=args.ctx,
        seed=args.seed, type_name=args.type,
    )  # fmt: skip
    if args.shards > 1:
        paths = write_split(args.out.parent, args.out.stem, llama_keys(shape), llama_tensors(shape), args.shards)
        print("\n".join(map(str, paths)))
    else:
        print(write_tiny_llama(args.out, shape, version=args.gguf_version))


if __name__ == "__main__":
    main()
