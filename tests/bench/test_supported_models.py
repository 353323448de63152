"""docs/reference/supported-models.md: its table of what is verified is that of the tests, both ways [M249]."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pantheon.accel.cpu.carried import is_carried
from pantheon.engine.load import load_model
from pantheon.formats import quant
from pantheon.models import architectures
from tests.engine.test_families import STEMS as FAMILY_STEMS
from tests.engine.test_golden import STEMS as LLAMA_STEMS
from tests.golden_data import load_golden
from tools import supported_models as page

TESTED = (*LLAMA_STEMS, *FAMILY_STEMS)


def rows() -> Iterator[list[str]]:
    block = page.PAGE.read_text().split("<!-- verified -->")[1].split("<!-- verified end -->")[0]
    lines = [line for line in block.splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines)
    assert tuple(head) == page.VERIFIED_HEAD
    yield from body


def test_each_tested_file_has_a_row_and_each_row_a_test_M249() -> None:
    listed = [row[2] for row in rows()]
    assert sorted(listed) == sorted(TESTED) == page.stems()


def test_every_architecture_is_verified_and_every_kind_of_weights() -> None:
    assert {row[0].split(" ")[0] for row in rows()} == set(architectures.supported())
    assert "llama with experts" in {row[0] for row in rows()}
    plain = {t.name for t in quant.all_types() if quant.can_dequantize(t.name) and not is_carried(t.name)}
    named = {row[1].removesuffix("_M") for row in rows()} | {"Q5_K", "Q6_K"}  # these two: within Q4_K_M files
    assert plain <= named, plain - named
    assert any(is_carried(row[1]) for row in rows())


def test_the_figures_are_within_what_the_page_promises() -> None:
    for architecture, weights, stem, logits, nll, top in rows():
        loose = "experts" in architecture or "moe" in architecture or "qwen35" in architecture
        assert float(logits) <= 5e-3, stem
        assert abs(float(nll)) <= 0.05, stem
        assert float(top.removesuffix(" %")) >= (75 if loose else 90), stem
        assert stem.partition("@")[0].endswith(weights), stem


def test_a_row_is_what_the_tool_finds() -> None:
    """Figures of int8 activations may differ a little between kinds of CPUs."""
    found = page.verify("tiny-qwen2.Q5_1")
    listed = next(row for row in rows() if row[2] == found.stem)
    mine = [cell.strip("`") for cell in found.cells()]
    assert mine[:3] == listed[:3]
    assert found.logits <= 2e-3
    assert abs(found.nll - float(listed[4])) <= 0.005
    assert abs(100 * found.top - float(listed[5].removesuffix(" %"))) <= 1


def test_a_comparison_sees_what_differs() -> None:
    """Against another file's golden."""
    other = load_golden("tiny-llama.Q4_0")
    with load_model(page.DATA / "models" / "tiny-llama.F32.gguf", ctx=1024, executor="cpu") as model:
        worst, nll, top = page.compare(model, other)
    assert worst > 0.05 and abs(nll) > 1e-3 and top < 1


def test_tables_go_between_their_marks() -> None:
    text = page.PAGE.read_text()
    for name in ("verified", "measured"):
        put = page.put(text, name, "| here |")
        assert f"<!-- {name} -->\n\n| here |\n\n<!-- {name} end -->" in put
        assert page.put(put, name, "| here |") == put
    with pytest.raises(ValueError, match="verified"):
        page.put("nothing", "verified", "x")


def test_every_real_model_has_a_command() -> None:
    block = page.PAGE.read_text().split("<!-- measured -->")[1].split("<!-- measured end -->")[0]
    body = [line for line in block.splitlines() if line.startswith("|")][2:]
    assert len(body) >= 2
    for line in body:
        assert re.search(r"`pantheon serve --model \S+\.gguf` *\|$", line), line
        assert line.count("|") == len(page.MEASURED_HEAD) + 1
