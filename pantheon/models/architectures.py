"""`general.architecture` -> the module that writes its plan, imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

from pantheon.models.config import Metadata, ModelConfigError, Shapes
from pantheon.plan.builder import Plan

_MODULES = {
    "gemma3": "pantheon.models.gemma3",
    "llama": "pantheon.models.llama",
    "phi3": "pantheon.models.phi3",
    "qwen2": "pantheon.models.qwen2",
    "qwen3": "pantheon.models.qwen3",
    "qwen35": "pantheon.models.qwen35",
    "qwen35moe": "pantheon.models.qwen35",
    "qwen3moe": "pantheon.models.qwen3moe",
}


def supported() -> tuple[str, ...]:
    """The architectures that a plan can be made for."""
    return tuple(sorted(_MODULES))


def make_plan(metadata: Mapping[str, Any], shapes: Shapes) -> Plan:
    """The plan of a model file; raises ModelConfigError naming the architecture, key or tensor at fault."""
    meta = Metadata(metadata)
    module = _MODULES.get(meta.arch)
    if module is None:
        raise ModelConfigError(
            f"unknown architecture {meta.arch!r}; supported: {', '.join(supported())}",
            code="unknown_architecture",
            param="general.architecture",
        )
    write = cast("Callable[[Metadata, Shapes], Plan]", import_module(module).plan)
    plan = write(meta, shapes)
    _refuse_strangers(meta, plan, shapes)
    return plan


def _refuse_strangers(meta: Metadata, plan: Plan, shapes: Shapes) -> None:
    """A block's tensor that the plan does not read would be left out of the answers: raise ModelConfigError."""
    used = {m.tensor for m in plan.matrices()} | {v.tensor for v in plan.vectors()}
    blocks = meta.integer("block_count")
    drafting = range(blocks - meta.integer("nextn_predict_layers", 0, low=0), blocks)
    for name in shapes:
        block = name.split(".")[1] if name.startswith("blk.") else ""
        if not block.isdecimal() or name in used or int(block) in drafting:
            continue
        beyond = f"{meta.arch}.block_count is {blocks}" if int(block) >= blocks else "with this metadata"
        raise ModelConfigError(f"tensor {name} is no part of a {meta.arch} model: {beyond}", param=name)
