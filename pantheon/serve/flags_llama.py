"""llama-server's spellings of flags, so that a command line of its is understood: as ours, or refused by name.

Three kinds: other names of our flags (added where those are, in flags.py), flags that change nothing here because it is
so anyway or does not exist, and flags that ask for what Pantheon does not do.  Knows words, starts nothing.
Source: `llama-server --help` of llama.cpp, as of its tools/server/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

#: flags without a value that change nothing here, and why
_SWITCHES: dict[str, tuple[str, ...]] = {
    "it is always so": (
        "--jinja", "--metrics", "--slots", "-cb", "--cont-batching", "--cache-prompt", "--warmup", "--escape", "-e",
        "--mmap", "--webui", "--ui", "--no-context-shift", "--offline", "--prefill-assistant", "-kvo", "--kv-offload",
        "--repack", "--cache-idle-slots", "--log-timestamps", "--log-prefix", "--models-autoload", "--props",
        "--embedding", "--embeddings", "--cors-credentials",
    ),
    "nothing here depends on it": (
        "--mlock", "--no-mmap", "--no-warmup", "--no-webui", "--no-ui", "--swa-full", "--perf", "--no-perf",
        "-nkvo", "--no-kv-offload", "-nr", "--no-repack", "--no-host", "--log-disable", "--no-log-prefix",
        "--no-log-timestamps", "--check-tensors", "--op-offload", "--no-op-offload", "--no-cache-idle-slots",
        "--no-kv-unified", "-no-kvu", "--context-shift", "--special", "-sp", "--spm-infill", "--reuse-port",
        "--no-models-autoload", "--ui-mcp-proxy", "--no-ui-mcp-proxy", "--reasoning-preserve", "--no-mmproj",
        "--no-cors-credentials", "--no-jinja", "--backend-sampling", "--backend_sampling",
    ),
}  # fmt: skip
#: the same with a value
_VALUES = (
    "-b", "--batch-size", "-ub", "--ubatch-size", "-tb", "--threads-batch", "-ngl", "--gpu-layers", "--n-gpu-layers",
    "-sm", "--split-mode", "-mg", "--main-gpu", "--numa", "--prio", "--prio-batch", "--poll", "--poll-batch", "--keep",
    "-cram", "--cache-ram", "--cache-reuse", "-ctxcp", "--ctx-checkpoints", "-sps", "--slot-prompt-similarity",
    "--tags", "--log-colors", "-lv", "--verbosity", "--log-verbosity", "--sse-ping-interval", "-fit", "--fit",
    "--slot-save-path", "--models-max", "--load-mode", "--embd-normalize", "--cors-methods",
    "--cors-headers", "--reasoning-budget",
)  # fmt: skip
#: with a value that may be left out
_MAYBE = ("-fa", "--flash-attn")

#: what Pantheon does not do, and what to do instead where there is something
_REFUSED = {
    "adapters are not supported": ("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"),
    "there is no speculative decoding": (
        "-md", "--model-draft", "--spec-draft-model", "--spec-type", "--spec-draft-n-max", "--spec-draft-n-min",
        "--draft", "--draft-max", "--draft-min",
    ),
    "nothing is downloaded; give a file to --model": (
        "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-mu", "--model-url", "-dr", "--docker-repo",
    ),
    "there is no vision model": ("-mm", "--mmproj", "-mmu", "--mmproj-url", "--media-path"),
    "it belongs to a request": (
        "--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file", "--ignore-eos", "-l",
        "--logit-bias", "-r", "--reverse-prompt",
    ),
    "name the models with --model": ("--models-dir", "--models-preset"),
    "there are no remote devices": ("--rpc",),
    "place models with --dies": ("-dev", "--device", "-ts", "--tensor-split", "-ot", "--override-tensor"),
    "there is no reranking": ("--rerank", "--reranking"),
    "there are no built-in tools": ("--tools", "--tools-runtime", "--mcp-servers-config", "--mcp-servers-json"),
    "the path is fixed; put a proxy in front": ("--api-prefix", "--path"),
    "the sampler is not there": (
        "--mirostat", "--typical", "--typical-p", "--xtc-probability", "--dry-multiplier", "--dynatemp-range",
        "--top-nsigma", "--top-n-sigma", "--samplers",
    ),
    "metadata is taken as it is": ("--override-kv",),
    "rope is taken from the model": ("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"),
}  # fmt: skip


class _Without(argparse.Action):
    """Notes a flag that changes nothing, to be told once at the start."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        namespace.without_effect = (*namespace.without_effect, flag)


class _Refuse(argparse.Action):
    """Ends with usage and the reason."""

    def __init__(self, *args: Any, why: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self._why = why

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        parser.error(f"{flag} is llama-server's, and not here: {self._why}")


def add_llama_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of llama-server's that is not one of ours, hidden from --help."""
    parser.set_defaults(without_effect=())

    def add(flags: Sequence[str], action: type[argparse.Action], **more: Any) -> None:
        for flag in flags:
            parser.add_argument(
                flag, action=action, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **more
            )

    for flags in _SWITCHES.values():
        add(flags, _Without, nargs=0)
    add(_VALUES, _Without)
    add(_MAYBE, _Without, nargs="?")
    for why, flags in _REFUSED.items():
        # whatever stands behind it is not looked at any more
        add(flags, _Refuse, nargs="*", why=why)
