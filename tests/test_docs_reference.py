"""The references say what the code does, no less and no more [M170, M171, M247, M248, M249]."""

from __future__ import annotations

import argparse
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pantheon import seams
from pantheon.accel.cpu.layouts import FLOATS, KINDS
from pantheon.cli import COMMANDS, build_parser
from pantheon.engine import scripted
from pantheon.formats import quant
from pantheon.models import architectures
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REFERENCE = ROOT / "docs" / "reference"


def sections(path: Path, level: str = "##") -> dict[str, str]:
    """Heading -> the text below it, for headings of one level."""
    parts = re.split(rf"^{level} (.*)$", path.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def first_cells(text: str) -> list[str]:
    """The first cell of every table row but the head, without backticks."""
    rows = re.findall(r"^\|(.*)\|\n", text, re.M)
    return [re.split(r"(?<!\\)\|", row)[0].strip().replace("`", "").replace("\\|", "|") for row in rows]


# ---- flags ----------------------------------------------------------------------------------------------------------


def test_m170_environment_flags_are_those_of_the_settings_table() -> None:
    """Both ways: names, defaults and units."""
    page = sections(REFERENCE / "env-flags.md")
    text = "".join(body for head, body in page.items() if not head.startswith("Not ours"))
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| (.*?) \| (.*?) \| (.*?) \|$", text, re.M)
    assert sorted(name for name, *_ in rows) == sorted(SETTINGS)
    for name, default, unit, _ in rows:
        real = SETTINGS[name]
        assert default == {"": "empty", None: "unset"}.get(real.default, f"`{real.default}`"), name
        assert unit == real.unit, name


def test_m171_cuda_visible_devices_is_explained() -> None:
    assert "CUDA_VISIBLE_DEVICES" in (REFERENCE / "env-flags.md").read_text()


def command_flags() -> Iterator[tuple[str, argparse.Action]]:
    """(command, option) for every option of the command line; "" for those in front of a command."""
    parser = build_parser(with_serve=True)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from ((name, a) for a in sub._actions if a.option_strings)
        elif action.option_strings:
            yield "", action


def test_m248_the_command_line_reference_lists_every_flag_of_every_command() -> None:
    pages = {re.sub(r"[`]|pantheon ?", "", head): text for head, text in sections(REFERENCE / "cli.md").items()}
    flags: dict[str, set[str]] = {}
    for command, action in command_flags():
        if not isinstance(action, argparse._HelpAction):
            flags.setdefault(command, set()).update(action.option_strings)
    assert set(flags) - {""} <= set(pages), "a command has no section"
    for command, real in flags.items():
        text = pages[command or "Everywhere"]
        listed = {word for cell in first_cells(text) for word in re.findall(r"(?<![\w-])--?[a-z][a-z_-]*", cell)}
        assert listed == real, f"{command}: only in the page {listed - real}, only in the code {real - listed}"


# ---- routes ---------------------------------------------------------------------------------------------------------


def test_m247_every_route_is_documented_and_every_documented_route_exists() -> None:
    router = build_router(App())
    pairs = [*router._exact, *((method, f"{prefix}{{id}}") for method, prefix in router._prefixes)]
    listed = re.findall(r"^### `([A-Z]+ /\S*)`$", (REFERENCE / "http-api.md").read_text(), re.M)
    assert sorted(listed) == sorted(f"{method} {path}" for method, path in pairs)


def test_every_error_code_is_documented_and_every_documented_code_exists() -> None:
    sources = {path: path.read_text() for path in (ROOT / "pantheon").rglob("*.py")}
    #: faults of the start, which no HTTP client meets
    at_start = {"bad_setting", "bind_failed", "bad_certificate", "no_host_signals"}
    real = {code for text in sources.values() for code in re.findall(r"\bcode = ?\"(\w+)\"|\bcode=\"(\w+)\"", text)}
    codes = {one or other for one, other in real} - at_start
    table = (REFERENCE / "http-api.md").read_text().split("## Errors")[1]
    rows = re.findall(r"^\| [\d, ]+ \| (.*?) \|", table, re.M)
    listed = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    assert codes <= listed, codes - listed
    assert [code for code in listed if not any(f'"{code}"' in text for text in sources.values())] == []


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_m249_architectures_and_weight_types_are_those_that_load() -> None:
    page = sections(REFERENCE / "supported-models.md")
    assert set(first_cells(page["Architectures"])[2:]) == set(architectures.supported())
    fast, slow = page["Weight types"].split("### Carried as Q8_0")
    quick = {*KINDS, *FLOATS}
    loadable = {t.name for t in quant.all_types() if quant.can_dequantize(t.name)}
    assert set(re.findall(r"`([A-Z][A-Z0-9_]+)`", fast)) == quick
    assert set(re.findall(r"`([A-Z][A-Z0-9_]+)`", slow)) == loadable - quick


def test_every_dependency_has_its_reason() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = "\n".join(config["options.extras_require"].values())
    page = sections(ROOT / "docs" / "dependencies.md")
    for title, wanted in (("At run time", config["options"]["install_requires"]), ("For tests and checks", extras)):
        names = {re.split(r"[<>=!~;\[ ]", line)[0] for line in wanted.splitlines() if line}
        assert set(first_cells(page[title])[2:]) == names, title


def test_the_seams_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    points = text.split("Failure points:")[1].split("###")[0]
    assert tuple(first_cells(points)[2:]) == seams.POINTS
    keys = text.split("### Scripted model")[1].split("A piece is")[0]
    listed = {name for cell in first_cells(keys)[2:] for name in cell.split(", ")}
    assert listed == set(scripted._CHECKS)


def test_the_python_api_page_names_what_the_package_exports() -> None:
    import pantheon

    text = (REFERENCE / "python-api.md").read_text()
    for name in pantheon.__all__:
        assert f"pantheon.{name}" in text, name


# ---- links and commands ---------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_are_reached_from_the_readme_and_name_targets_that_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= targets
    for command in re.findall(r"(?:^|`)pantheon ([a-z]+)", text, re.M):
        assert command in ("serve", *COMMANDS), command
    if page.name != "README.md":
        assert str(page.relative_to(ROOT)) in (ROOT / "README.md").read_text()
