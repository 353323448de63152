"""A pytest plugin that puts another server and another model into llama-server's own tests.

Nothing of the suite is changed on disk: it starts each server with `utils.subprocess.Popen([path, *flags])`, and that
name is replaced by one that rewrites the command.  Runs in the suite's environment: must not import pantheon.

SUITE_SERVER: the command that stands in for llama-server, as JSON.  SUITE_MODEL: the model for every server.
SUITE_OURS: `false` for a server that needs no flags of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

#: flags that name a model on the network, and how many words follow them
_MODEL_FLAGS = {"--hf-repo": 1, "--hf-file": 1, "--model-url": 1, "--offline": 0}


def command(args: Sequence[str]) -> list[str]:
    """The suite's command with our server and our model in it."""
    words, kept, asks_model = list(args[1:]), [], False
    while words:
        word = words.pop(0)
        if word in _MODEL_FLAGS:
            asks_model = True
            del words[: _MODEL_FLAGS[word]]
        else:
            kept.append(word)
    model = ["--model", os.environ["SUITE_MODEL"]] if asks_model and "--model" not in kept else []
    return [*json.loads(os.environ["SUITE_SERVER"]), *model, *kept, *_defaults(kept)]


def _defaults(flags: Sequence[str]) -> list[str]:
    """What llama-server does when a flag is missing and Pantheon, on purpose, does not."""
    if not json.loads(os.environ.get("SUITE_OURS", "true")):
        return []
    metrics = [] if "--metrics" in flags else ["--no-metrics"]
    origins = [] if "--cors-origins" in flags else ["--cors-origins", "*"]
    return metrics + origins


def _popen(args: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(args), **more)


def pytest_configure(config: Any) -> None:
    """Patch the suite's `utils` before its tests import it."""
    sys.path.insert(0, str(config.rootpath))
    import utils  # type: ignore[import-not-found]

    utils.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
    utils.ServerPreset.load_all = staticmethod(lambda: None)
