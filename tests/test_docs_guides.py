"""The configurations in docs/guides/ are well formed: JSON, TOML and YAML parse, Python compiles, shell is shell.

What can run does, in test_docs_run.py; nothing is installed here, since tests have no network.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "guides"
BLOCKS = [
    pytest.param(page, match[1], match[2], id=f"{page.name}:{page.read_text().count(chr(10), 0, match.start()) + 1}")
    for page in sorted(GUIDES.glob("*.md"))
    for match in re.finditer(r"^```(\w+)(?: run)?\n(.*?)^```$", page.read_text(), re.M | re.S)
]


@pytest.mark.parametrize(("page", "language", "text"), BLOCKS)
def test_the_block_is_well_formed(page: Path, language: str, text: str) -> None:
    if language == "json":
        assert isinstance(json.loads(text), dict)
    elif language == "toml":
        assert tomllib.loads(text)
    elif language == "yaml":
        assert isinstance(yaml.safe_load(text), (dict, list))
    elif language == "python":
        compile(text, page.name, "exec")
    elif language == "sh":
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    else:
        assert language == "js", f"{page.name}: {language} is not checked"


def test_every_guide_is_in_the_index() -> None:
    index = (GUIDES / "README.md").read_text()
    assert [page.name for page in GUIDES.glob("*.md") if f"({page.name})" not in index] == ["README.md"]


def test_guides_name_the_address_that_a_server_has() -> None:
    """A reader copies them: no other port, and every page but the index says where the server is."""
    for page in GUIDES.glob("*.md"):
        ports = set(re.findall(r"127\.0\.0\.1:(\d+)", page.read_text()))
        assert ports <= {"8201", "30000"} and (ports or page.name == "README.md"), page.name
