"""What the flags of `serve` take: words in, values out, ArgumentTypeError with what is accepted.  Knows no flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from pantheon.serve.admin import MR_MAX_NAME


def whole(low: int, high: int, none: str = "", also: str = "") -> Callable[[str], int | None]:
    """Whole numbers.  `none`, `also`: what stands for the default, in llama-server's way."""

    def parse(text: str) -> int | None:
        if text and text in (none, also):
            return None
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def real(low: float, high: float) -> Callable[[str], float]:
    """Decimal numbers."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a JSON object")
    return value


def not_empty(text: str) -> str:
    """Anything but nothing."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def model_name(text: str) -> str:
    """The id of a model."""
    if not text or len(text) > MR_MAX_NAME or not text.isprintable():
        raise argparse.ArgumentTypeError(f"a name has 1 to {MR_MAX_NAME} printable characters")
    return text


def die_numbers(text: str) -> tuple[int, ...]:
    """A list such as 0,1."""
    try:
        dies = tuple(int(part) for part in text.split(","))
    except ValueError:
        dies = (-1,)
    if min(dies) < 0 or len(set(dies)) < len(dies):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different die numbers such as 0,1")
    return dies
