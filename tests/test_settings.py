"""Floor 0: every environment flag once; what it can not parse stops the start [X09, M011, M170]."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pantheon import settings
from pantheon.settings import SETTINGS, SettingError

PACKAGE = Path(settings.__file__).parent


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


def test_unset_and_empty_mean_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.check_all() == {}
    for name, setting in SETTINGS.items():
        assert settings.get(name) == setting.default
        monkeypatch.setenv(name, "")
        assert settings.get(name) == setting.default


def test_check_all_lists_what_differs_from_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_SLOW_DECODE_MS", "25")
    monkeypatch.setenv("PN_HOST_ROOT", "/")
    assert settings.check_all() == {"PN_SLOW_DECODE_MS": 25}


@pytest.mark.parametrize("value", ["abc", "-1", "60001", "1.5", "0x10", "1e3"])
def test_x09_a_value_that_does_not_parse_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PN_SLOW_DECODE_MS", value)
    with pytest.raises(SettingError) as caught:
        settings.check_all()
    assert caught.value.param == "PN_SLOW_DECODE_MS"
    assert str(caught.value) == f"PN_SLOW_DECODE_MS={value}: expects a whole number from 0 to 60000"


def test_m011_full_logits_is_refused_whatever_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "0", "off"):
        monkeypatch.setenv("QWEN35_GPU_FULL_LOGITS", value)
        with pytest.raises(SettingError, match="QWEN35_GPU_FULL_LOGITS=.*not supported: it would copy the logits"):
            settings.check_all()


def test_whole_numbers_have_both_ends_in_range() -> None:
    parse = settings.integer(1, 8)
    assert [parse("1"), parse("8"), parse(" 4 ")] == [1, 8, 4]
    for bad in ("0", "9", ""):
        with pytest.raises(ValueError, match="from 1 to 8"):
            parse(bad)


def test_every_row_says_what_the_flag_does_and_defaults_are_what_they_parse_to() -> None:
    for name, setting in SETTINGS.items():
        assert name == setting.name and setting.effect and setting.unit
        if isinstance(setting.default, int | str) and setting.default != "":
            assert setting.parse(str(setting.default)) == setting.default


def test_m170_only_settings_reads_our_flags_and_every_name_read_is_in_the_table() -> None:
    """No module reads an environment flag of ours on its own, and `settings.get` is called with known names."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if path.name != "settings.py" and isinstance(node, ast.Attribute | ast.Call):
                text = ast.unparse(node)
                ours = any(word in text for word in ("PN_", "QWEN35_", "PANTHEON_", "BS_"))
                assert not (text.startswith(("os.environ", "os.getenv")) and ours), f"{path}: {text}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "settings.get":
                (name,) = node.args
                assert isinstance(name, ast.Constant) and name.value in SETTINGS, f"{path}: {ast.unparse(node)}"
