"""The adapter that runs llama-server's own tests on Pantheon."""

from __future__ import annotations

import json

import pytest

from tools.llama_suite import __main__ as runner
from tools.llama_suite.suite_plugin import command


def test_the_suites_command_gets_our_server_and_our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUITE_SERVER", json.dumps(["python", "-m", "pantheon", "serve"]))
    monkeypatch.setenv("SUITE_MODEL", "/m.gguf")
    monkeypatch.setenv("SUITE_OURS", "false")
    ours = ["python", "-m", "pantheon", "serve"]
    theirs = ["build/llama-server", "--port", "8080", "--offline", "--hf-repo", "a/b", "--hf-file", "c", "--jinja"]
    assert command(theirs) == [*ours, "--model", "/m.gguf", "--port", "8080", "--jinja"]
    # a router has no model of its own, and one that is given stays
    assert command(["x", "--port", "1"]) == [*ours, "--port", "1"]
    assert command(["x", "--model", "z", "--offline"]) == [*ours, "--model", "z"]
    # views and pages that are off there by default, and on, are on and off here
    monkeypatch.setenv("SUITE_OURS", "true")
    assert command(["x"]) == [*ours, "--no-metrics", "--cors-origins", "*"]
    assert command(["x", "--metrics", "--cors-origins", "a"]) == [*ours, "--metrics", "--cors-origins", "a"]


def test_the_list_of_cases_belongs_to_the_files_that_are_run() -> None:
    cases = runner.passing()
    assert len(cases) == len(set(cases)) > 171
    assert {case.partition("::")[0].removeprefix("unit/") for case in cases} <= set(runner.FILES)


def test_a_folder_that_is_no_suite_is_refused(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["llama_suite", str(tmp_path)])
    with pytest.raises(SystemExit):
        runner.main()
    assert "there is no utils.py" in capsys.readouterr().err
