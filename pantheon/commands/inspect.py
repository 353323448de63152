"""`pantheon inspect`: what a model file holds, what it would run as and what that costs, without loading weights."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pantheon.commands import common
from pantheon.errors import PantheonError

if TYPE_CHECKING:
    from pantheon.formats.gguf import GGUFFile
    from pantheon.plan.builder import Plan
    from pantheon.text.tokenizer import Tokenizer

#: Arrays and texts longer than this are summarised.
LONG = 8
LONG_TEXT = 200


def add_parser(subparsers: Any) -> None:
    """`pantheon inspect [MODEL] …`."""
    parser = subparsers.add_parser(
        "inspect",
        usage="pantheon inspect [MODEL] [flags]",
        help="show metadata, tensors, plan and memory of a model file",
        description="Show what a model file holds, what it would run as and what that costs. Loads no weights.",
    )
    parser.add_argument("words", nargs="*", metavar="MODEL", help=common.MODEL_HELP)
    parser.add_argument("--ctx", type=common.whole(2), metavar="N", help="context length for the memory figures")
    parser.add_argument(
        "--kv-type", choices=("f32", "f16", "q8_0", "q4_0"), help="number format of the KV cache for these figures"
    )
    parser.add_argument(
        "--executor", choices=("cpu", "cuda"), default="cpu", help="who would compute, for these figures (default: cpu)"
    )
    parser.add_argument("--plan", action="store_true", help="print every op of the plan")
    parser.add_argument("--tensors", action="store_true", help="print every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what can be read; 1 when the file would not run."""
    path = common.pick_model(args.words)
    report = inspect_script(path) if path.startswith("script:") else inspect_file(path, args)
    print(json.dumps(report, ensure_ascii=False) if args.json else "\n".join(as_text(report)))
    for fault in report["faults"]:
        common.say_error(f"will not run: {fault}")
    return 1 if report["faults"] else 0


# ---- reading --------------------------------------------------------------------------------------------------------


def inspect_file(path: str, args: argparse.Namespace) -> dict[str, Any]:
    """The report on a GGUF file; `faults` lists why it would not run.  Raises ModelFileError when it can't be read."""
    from pantheon.engine import load
    from pantheon.formats.gguf import open_gguf
    from pantheon.text.tokenizer import load_tokenizer

    faults: list[str] = []

    def attempt(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except PantheonError as fault:
            faults.append(fault.message)
            return None

    with open_gguf(path) as file:
        plan = attempt(lambda: load.plan_of(file))
        tokenizer = attempt(lambda: load.tokenizer_of(file, plan) if plan else load_tokenizer(file.metadata))
        report: dict[str, Any] = {
            "file": str(file.path),
            "gguf_version": file.version,
            "alignment": file.alignment,
            "metadata": {key: summarise(value) for key, value in file.metadata.items()},
            "tensors": tensor_types(file),
        }
        if args.tensors:
            report["tensor_list"] = [[t.name, t.type.name, list(t.shape), t.nbytes] for t in file.tensors.values()]
        if plan:
            report["plan"] = plan_summary(plan, args.plan)
            report["memory"] = attempt(lambda: memory(file, plan, args.ctx, args.kv_type, args.executor))
            attempt(lambda: check(file, plan, args.ctx, args.kv_type, args.executor))
        if tokenizer:
            report["tokenizer"] = tokenizer_summary(tokenizer, file.metadata)
            report["template"] = attempt(lambda: template_summary(file, tokenizer))
    return {**report, "runs": not faults, "faults": faults}


def inspect_script(path: str) -> dict[str, Any]:
    """The report on a scripted model."""
    from pantheon.engine.scripted import load_script

    model = load_script(path)
    return {
        "file": path,
        "plan": plan_summary(model.plan, False),
        "tokenizer": tokenizer_summary(model.tokenizer, {"tokenizer.ggml.model": "gpt2"}),
        "template": {"family": model.template.name, "characters": len(model.template.source)},
        "faults": [],
    }


def summarise(value: Any) -> Any:
    """JSON-ready metadata: long arrays become `{"length", "of", "first"}`, long texts are cut."""
    if isinstance(value, np.ndarray):
        kind, items = str(value.dtype), value[:LONG].tolist()
    elif isinstance(value, list):
        kind, items = type(value[0]).__name__ if value else "nothing", [summarise(v) for v in value[:LONG]]
    elif isinstance(value, str) and len(value) > LONG_TEXT:
        return f"{value[:LONG_TEXT]}… ({len(value)} characters)"
    else:
        return value.item() if isinstance(value, np.generic) else value
    return items if len(value) <= LONG else {"length": len(value), "of": kind, "first": items}


def tensor_types(file: GGUFFile) -> dict[str, dict[str, int]]:
    """Count, values and bytes by tensor type, the most bytes first."""
    found: dict[str, dict[str, int]] = {}
    for info in file.tensors.values():
        entry = found.setdefault(info.type.name, {"count": 0, "values": 0, "bytes": 0})
        entry["count"] += 1
        entry["values"] += int(np.prod(info.shape, dtype=np.int64))
        entry["bytes"] += info.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def plan_summary(plan: Plan, with_ops: bool) -> dict[str, Any]:
    """Op counts and sizes; every op in order when asked for."""
    report: dict[str, Any] = {
        "architecture": plan.name,
        "n_vocab": plan.n_vocab,
        "n_ctx_train": plan.n_ctx_train,
        "kv_layers": len(plan.state.kv),
        "ops": dict(Counter(type(op).__name__ for op in plan.ops())),
    }
    if with_ops:
        report["op_list"] = [describe_op(op) for op in plan.ops()]
    return report


def describe_op(op: Any) -> str:
    """`MatMul weight=blk.0.attn_q.weight[576x576] x=norm out=q`."""
    return " ".join([type(op).__name__, *(f"{key}={_word(value)}" for key, value in vars(op).items())])


def _word(value: Any) -> str:
    if hasattr(value, "tensor"):
        size = f"{value.rows}x{value.cols}" if hasattr(value, "rows") else str(value.size)
        return f"{value.tensor}[{size}]"
    return str(getattr(value, "name", value))


def memory(file: GGUFFile, plan: Plan, ctx: int | None, kv_type: str | None, executor: str) -> dict[str, Any]:
    """Bytes by part for one conversation at the context that a load would pick."""
    from pantheon.engine import load

    n_ctx, kv = load.pick_ctx(ctx, plan), load.pick_kv_type(kv_type, executor, file, plan)
    types = {name: info.type.name for name, info in file.tensors.items()}
    runs: Any = load.pick_executor(executor, None)
    try:
        # what a load takes, to the byte
        bytes_of = runs.predict(plan, types, n_ctx=n_ctx, kv_type=kv)
    except KeyError:  # a weight type that nothing here can run
        bytes_of = {"weights": sum(i.nbytes for i in file.tensors.values()), "kv": plan.state.slot_bytes(kv, n_ctx)}
    parts = {f"{part}_bytes": size for part, size in bytes_of.items()}
    per_token = plan.state.bytes_per_token(kv)
    total = {"total_bytes": sum(parts.values())}
    return {"n_ctx": n_ctx, "kv_type": kv.value, "kv_per_token_bytes": per_token, **parts, **total}


def check(file: GGUFFile, plan: Plan, ctx: int | None, kv_type: str | None, executor: str) -> None:
    """Raise what a load would: types and shapes that no kernel takes, more memory than the machine has; what a die has
    is not asked."""
    from pantheon.engine import load

    n_ctx, kv = load.pick_ctx(ctx, plan), load.pick_kv_type(kv_type, executor, file, plan)
    load.check_runs(plan, file, kv, executor)
    if executor == "cpu":
        weights = load.packed_bytes(load.pick_executor(executor, None), file, plan, n_ctx, kv)
        load.check_memory(plan, n_ctx, kv, weights=weights)


def tokenizer_summary(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Model, sizes and special ids."""

    def shown(token: int | None) -> list[Any] | None:
        return None if token is None else [token, tokenizer.token_text(token)]

    return {
        "model": metadata.get("tokenizer.ggml.model"),
        "pre": metadata.get("tokenizer.ggml.pre"),
        "n_vocab": tokenizer.n_vocab,
        "bos": shown(tokenizer.bos_id),
        "eos": shown(tokenizer.eos_id),
        "adds_bos": tokenizer.add_bos,
        "adds_eos": tokenizer.add_eos,
        "end_of_generation": [shown(token) for token in sorted(tokenizer.eog_ids)],
        "control_tokens": len(tokenizer.control_texts),
    }


def template_summary(file: GGUFFile, tokenizer: Tokenizer) -> dict[str, Any]:
    """The family of the chat template.  A file without one chats with ChatML."""
    from pantheon.engine import load

    template = load.template_of(file, tokenizer)
    report = {"family": template.name, "characters": len(template.source)}
    if "tokenizer.chat_template" not in file.metadata:
        report["note"] = "the file has none; ChatML is used"
    fault = getattr(template, "fault", None)
    if fault is not None:
        report["note"] = f"does not compile: {fault.message}"
    return report


# ---- printing -------------------------------------------------------------------------------------------------------


def as_text(report: Mapping[str, Any]) -> list[str]:
    """The report for people."""
    lines = [f"file       {report['file']}"]
    if "runs" in report:
        lines.append(f"will run   {'yes' if report['runs'] else 'no'}")
    if "gguf_version" in report:
        lines.append(f"format     GGUF version {report['gguf_version']}, alignment {report['alignment']}")
    if report.get("metadata"):
        lines += ["", "metadata", *common.columns([(k, _shown(v)) for k, v in report["metadata"].items()])]
    if report.get("tensors"):
        lines += ["", "tensors", *_tensor_lines(report["tensors"])]
    if report.get("tensor_list"):
        rows = [(n, t, "x".join(map(str, s)), common.human_bytes(b)) for n, t, s, b in report["tensor_list"]]
        lines += ["", *common.columns(rows)]
    for part in ("plan", "memory", "tokenizer", "template"):
        if report.get(part):
            lines += ["", part, *_part_lines(report[part])]
    return [common.printable(line) for line in lines]


def _tensor_lines(types: Mapping[str, Mapping[str, int]]) -> list[str]:
    rows: list[tuple[Any, ...]] = [
        (name, t["count"], "tensors", t["values"], "values", common.human_bytes(t["bytes"]))
        for name, t in types.items()
    ]
    total = sum(t["bytes"] for t in types.values())
    count, values = sum(t["count"] for t in types.values()), sum(t["values"] for t in types.values())
    return common.columns([*rows, ("all", count, "tensors", values, "values", common.human_bytes(total))])


def _part_lines(part: Mapping[str, Any]) -> list[str]:
    rows = []
    for key, value in part.items():
        if key == "op_list":
            continue
        if key.endswith("_bytes"):
            rows.append((key.removesuffix("_bytes"), common.human_bytes(value)))
        else:
            rows.append((key, _shown(value)))
    return [*common.columns(rows), *(f"    {op}" for op in part.get("op_list", ()))]


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "length" in value:
        first = ", ".join(_shown(v) for v in value["first"][:4])
        return f"{value['length']} {value['of']}: {first}, …"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_shown(v) for v in value)
    if isinstance(value, float):
        return f"{value:g}"
    return value.replace("\n", "\\n") if isinstance(value, str) else json.dumps(value)
