"""`pantheon quantize IN OUT TYPE`: a GGUF file with its matrices in another weight type."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon import __version__
from pantheon.commands import common
from pantheon.errors import BadRequest, ModelFileError
from pantheon.formats import quant
from pantheon.formats.gguf import GGUFFile, TensorInfo, open_gguf
from pantheon.formats.quantize import quantize
from pantheon.progress import Progress

TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
_FLOATS = ("F32", "F16", "BF16")
#: read in full precision whatever the rest is: small, and everything behind them depends on them
_KEPT = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight")
#: general.file_type, a label that other tools show (llama.h)
_LABELS = {"Q8_0": 7, "Q4_0": 2, "Q4_K": 14, "Q6_K": 18}
#: values that are float32 at a time
_PART = 1 << 20


def add_parser(subparsers: Any) -> None:
    """`pantheon quantize IN OUT TYPE …`."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a GGUF file with its matrices in another weight type",
        usage="pantheon quantize IN OUT TYPE [flags]",
        description="Quantise the matrices of a float GGUF file. Norms, biases and routers stay as they are; the "
        "output matrix of a 4-bit file is Q6_K; rows that TYPE does not fit become Q8_0 or F16.",
    )
    parser.add_argument("source", metavar="IN", help="a GGUF file of F32, F16 or BF16 weights")
    parser.add_argument("target", metavar="OUT", help="the file to write")
    parser.add_argument("type", metavar="TYPE", choices=TYPES, type=str.upper, help=f"one of {', '.join(TYPES)}")
    parser.add_argument("--allow-requantize", action="store_true", help="also take matrices that are quantised")
    parser.add_argument("--force", action="store_true", help="replace OUT when it is there")
    parser.add_argument("--threads", type=common.whole(1), metavar="N", help="threads (default: one for each core)")


def run(args: argparse.Namespace) -> int:
    """Read, quantise, write beside OUT, and rename."""
    source, target = Path(args.source), Path(args.target)
    if target.exists() and not args.force:
        raise BadRequest(f"{target} is there already; --force replaces it", param="OUT")
    if target.exists() and source.exists() and target.samefile(source):
        raise BadRequest("OUT is IN", param="OUT")
    part = target.with_name(target.name + ".part")
    with open_gguf(source) as file:
        types = {info.name: type_of(file, info, args.type, args.allow_requantize) for info in file.tensors.values()}
        try:
            before, after = _write(file, part, types, args.type, args.threads or os.cpu_count() or 1)
            os.replace(part, target)
        except OSError as fault:
            raise BadRequest(f"{target}: {fault.strerror}", param="OUT") from None
        finally:
            part.unlink(missing_ok=True)
    common.note(f"{target}: {after / 1e6:.1f} MB of tensors, from {before / 1e6:.1f} MB")
    return 0


def type_of(file: GGUFFile, info: TensorInfo, wanted: str, requantize: bool) -> str:
    """The type that a tensor gets.  Raises ModelFileError for one that is quantised already."""
    has = info.type.name
    name = info.name
    if len(info.shape) < 2 or not name.endswith("weight") or name.endswith(_KEPT) or "norm" in name:
        return has
    if has not in _FLOATS and not requantize:
        raise ModelFileError(
            file.path, f"tensor {name} is {has} already; --allow-requantize takes it, at a loss", param=name
        )
    tied = "output.weight" not in file.tensors
    if wanted in ("Q4_0", "Q4_K") and (name == "output.weight" or (tied and name == "token_embd.weight")):
        wanted = "Q6_K"
    for choice in (wanted, "Q8_0", "F16"):
        if info.shape[-1] % quant.by_name(choice).block_values == 0:
            return choice
    return has


def _write(file: GGUFFile, path: Path, types: dict[str, str], label: str, threads: int) -> tuple[int, int]:
    """Write header and tensors, some rows at a time; (bytes of tensors before, after)."""
    import gguf

    writer = gguf.GGUFWriter(path, str(file.metadata["general.architecture"]))
    _copy_metadata(file, writer, label)
    sizes = {}
    for name, info in file.tensors.items():
        kind = quant.by_name(types[name])
        sizes[name] = int(np.prod(info.shape[:-1])) * quant.row_bytes(kind, info.shape[-1])
        # the writer takes the shape of the bytes and finds the one of the values by itself
        shape = [*info.shape[:-1], quant.row_bytes(kind, info.shape[-1])] if kind.block_values > 1 else list(info.shape)
        dtype = np.dtype(np.uint8 if kind.block_values > 1 else np.float32)
        writer.add_tensor_info(name, shape, dtype, sizes[name], raw_dtype=gguf.GGMLQuantizationType(kind.id))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    progress = Progress()
    with ThreadPoolExecutor(threads, "pantheon-quantize") as pool:
        for done, (name, info) in enumerate(file.tensors.items()):
            progress.update("quantise", done, len(file.tensors))
            writer.write_tensor_data(_converted(file, info, types[name], pool))
            file.release(name)
    writer.close()
    progress.close()
    return sum(info.nbytes for info in file.tensors.values()), sum(sizes.values())


#: keys that the new file gets anew
_WRITTEN = (
    "general.architecture", "general.file_type", "general.quantization_version", "pantheon.quantized_by",
)  # fmt: skip


def _copy_metadata(file: GGUFFile, writer: Any, label: str) -> None:
    """Every key as it is, but for those of a split and of the writer itself."""
    import gguf

    for field in gguf.GGUFReader(file.path).fields.values():
        if field.name.startswith(("GGUF.", "split.")) or field.name in _WRITTEN:
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
    writer.add_uint32("general.file_type", _LABELS[label])
    writer.add_uint32("general.quantization_version", 2)
    writer.add_string("pantheon.quantized_by", f"pantheon {__version__}")


def _converted(file: GGUFFile, info: TensorInfo, type_name: str, pool: ThreadPoolExecutor) -> NDArray[np.uint8]:
    """The blocks of a tensor in a type, uint8 1-D."""
    raw = file.data(info.name)
    if type_name == info.type.name:
        return raw
    cols = info.shape[-1]
    row = quant.row_bytes(info.type, cols)
    step = max(1, _PART // cols)

    def convert(first: int) -> NDArray[np.uint8]:
        part = raw[first * row : (first + step) * row]
        values = quant.dequantize(info.type.name, part, part.size // row * cols)
        return quantize(type_name, values.reshape(-1, cols))

    return np.concatenate(list(pool.map(convert, range(0, raw.size // row, step))))
