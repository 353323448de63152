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


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("PN_HOST_RESERVE_BYTES", "1.5GiB", 1_610_612_736),  # M165
        ("PN_HOST_RESERVE_BYTES", "0", 0),
        ("PN_PSI_FULL_REJECT", "20", 20.0),  # M166
        ("PN_PSI_SOME_TIGHT", "12.5", 12.5),
        ("PN_DIE_RESERVE_BYTES", "512M", 1 << 29),  # M167
        ("PN_LOAD_SPIKE_BYTES", "1k", 1024),  # M168
        ("PN_LADDER_DISABLE", "on", 1),  # M169
        ("PN_LADDER_DISABLE", "No", 0),
        ("PN_VIRTUAL_DIES", "4x2GiB", (2 << 30,) * 4),
        ("PN_VIRTUAL_DIES", "1GiB, 2x512MiB", (1 << 30, 1 << 29, 1 << 29)),
        ("PANTHEON_REGISTRY_URL", "http://127.0.0.1:9000/", "http://127.0.0.1:9000"),  # M164
        ("PANTHEON_REGISTRY_TRANSPORT", "smg", "smg"),
        ("PANTHEON_NODE_ID", "rack 2", "rack 2"),
        ("QWEN35_BS_PREFILL_CHUNK", "128", 128),  # M158
        ("PN_ASYNC_POLL_US", "500", 500),  # M163
    ],
)
def test_values_that_flags_take(monkeypatch: pytest.MonkeyPatch, name: str, value: str, parsed: object) -> None:
    monkeypatch.setenv(name, value)
    assert settings.get(name) == parsed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PN_HOST_RESERVE_BYTES", "-1"), ("PN_HOST_RESERVE_BYTES", "1 gigabyte"), ("PN_HOST_RESERVE_BYTES", "1e9"),
        ("PN_PSI_FULL_REJECT", "0"), ("PN_PSI_FULL_REJECT", "101"), ("PN_PSI_FULL_REJECT", "nan"),
        ("PN_LADDER_DISABLE", "2"), ("PN_LADDER_DISABLE", "maybe"), ("PN_MEMWATCH_POLL_MS", "0"),
        ("PN_VIRTUAL_DIES", "4"), ("PN_VIRTUAL_DIES", "0x2GiB"), ("PN_VIRTUAL_DIES", "17x1GiB"),
        ("PN_VIRTUAL_DIES", "-1x1GiB"), ("PN_VIRTUAL_DIES", "2x"), ("PN_VIRTUAL_DIES", "2x0"),
        ("PN_VIRTUAL_DIES", "2xx1GiB"), ("PN_VIRTUAL_DIES", ",") , ("PN_VIRTUAL_DIES", "axb"),
        ("PANTHEON_REGISTRY_URL", "127.0.0.1:9000"), ("PANTHEON_REGISTRY_URL", "ftp://x"),
        ("PANTHEON_REGISTRY_URL", "http://user:pw@x"), ("PANTHEON_REGISTRY_URL", "http://x/?a"),
        ("PANTHEON_REGISTRY_URL", "http://x:0"), ("PANTHEON_ENDPOINT", "http://x:65536"),
        ("PANTHEON_REGISTRY_TRANSPORT", "carrier-pigeon"), ("PANTHEON_NODE_ID", "a\nb"), ("PANTHEON_DRAIN_S", "inf"),
        ("PANTHEON_ADMIN_KEY", "a b\n"), ("QWEN35_BATCH_SLOTS", "abc"), ("QWEN35_BATCH_SLOTS", "65"),
        ("QWEN35_BATCH_SLOTS", "-1"), ("QWEN35_BS_DRIVER_SAMPLE", "2"), ("QWEN35_BS_PREFILL_BATCH", "x"),
        ("QWEN35_BS_PREFILL_CHUNK", "0"), ("BS_QUEUE_DEPTH", "-1"), ("QWEN35_BS_STATS", "?"), ("QWEN35_KV_Q4", "q4"),
        ("PN_ASYNC_POLL_US", "1"),
    ],
)  # fmt: skip
def test_values_that_flags_refuse_X09(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match="expects") as caught:
        settings.check_all()
    assert caught.value.param == name and name in caught.value.message


def test_batch_slots_means_a_number_of_slots_M083_M084_X09_X30() -> None:
    """`=8` is eight slots, not a silent off."""
    assert [settings.slots(word) for word in ("0", "off", "1", "on", "8", "4", "16")] == [0, 0, 8, 8, 8, 4, 16]


def test_a_secret_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PANTHEON_ADMIN_KEY", "PANTHEON_REGISTRY_KEY"):
        monkeypatch.setenv(name, "hush")
        assert settings.get(name) == "hush"
        assert settings.check_all() == {name: "set"}
        assert (name, "set", "env") in settings.origins()
        monkeypatch.setenv(name, "hush hush ")
        with pytest.raises(SettingError) as caught:
            settings.get(name)
        assert "hush" not in caught.value.message
        monkeypatch.delenv(name)


def test_every_value_has_an_origin_X09(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_MEMWATCH_POLL_MS", "250")
    monkeypatch.setenv("PN_SLOW_DECODE_MS", "")
    rows = {name: (value, origin) for name, value, origin in settings.origins()}
    assert set(rows) == set(SETTINGS)
    assert rows["PN_MEMWATCH_POLL_MS"] == (250, "env") and rows["PN_SLOW_DECODE_MS"] == (0, "default")


def test_whether_a_flag_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PN_DIE_RESERVE_BYTES", "1GiB")
    monkeypatch.setenv("PN_LOAD_SPIKE_BYTES", "")
    assert settings.given("PN_DIE_RESERVE_BYTES") and not settings.given("PN_LOAD_SPIKE_BYTES")


def test_a_name_that_is_not_ours_gets_a_suggestion() -> None:
    environ = {
        "PN_LADER_DISABLE": "1", "QWEN35_BATCH_SLOT": "8", "QWEN35_NOPE": "", "BS_QUEUE_DEPHT": "3",
        "pn_slow_decode_ms": "", "PANTHEON_REGISTRY_URI": "", "PATH": "/bin", "PNPM_HOME": "/x", "BS_TOKEN": "x",
        "PN_FAIL_AT": "load",
    }  # fmt: skip
    assert settings.unknown_names(environ) == [
        ("BS_QUEUE_DEPHT", "BS_QUEUE_DEPTH"),
        ("PANTHEON_REGISTRY_URI", "PANTHEON_REGISTRY_URL"),
        ("PN_LADER_DISABLE", "PN_LADDER_DISABLE"),
        ("QWEN35_BATCH_SLOT", "QWEN35_BATCH_SLOTS"),
        ("QWEN35_NOPE", None),
        ("pn_slow_decode_ms", "PN_SLOW_DECODE_MS"),
    ]


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
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("settings.get", "settings.given"):
                (name,) = node.args
                assert isinstance(name, ast.Constant) and name.value in SETTINGS, f"{path}: {ast.unparse(node)}"
