"""A command line of llama-server: other names of our flags, flags without effect, refusals by name [issue 6]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from pantheon.engine.load import load_model
from pantheon.errors import PantheonError
from pantheon.serve import flags, flags_llama
from pantheon.serve.context import App
from pantheon.serve.defaults import Defaults
from tests.serve.api_server import serving

TINY = Path(__file__).parents[1] / "data" / "models" / "tiny-llama.Q4_0.gguf"


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pantheon")
    flags.add_serve_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["serve", *words])


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        parse(*words)
    assert left.value.code == 2
    return capsys.readouterr().err


def test_a_whole_command_line_of_llama_server_is_understood() -> None:
    args = parse(
        *"--port 9 --temp 0.8 --seed 42 --host 127.0.0.1 --offline --model X.gguf --batch-size 32".split(),
        *"--ubatch-size 32 --threads 2 --n-gpu-layers 99 --cont-batching --metrics --slots --alias tiny".split(),
        *"-c 512 -ctk f16 -ctv f16 -fa on --n-predict 8 --verbose --api-key a,b --jinja --timeout 60".split(),
        *"--no-webui --top-k 1 --threads-http -1".split(),
    )  # fmt: skip
    assert args.models == [{"path": "X.gguf", "name": "tiny"}]
    assert (args.port, args.threads, args.threads_http, args.request_timeout) == (9, 2, None, 60)
    assert args.log_level == "debug" and flags.kv_type(args) == "f16" and flags.context(args) == 512
    assert flags.api_keys(args) == ("a", "b")
    assert flags.defaults(args) == Defaults(temperature=0.8, seed=42, n_predict=8, top_k=1, verbose=True)
    assert set(args.without_effect) == {
        "--offline", "--batch-size", "--ubatch-size", "--n-gpu-layers", "--cont-batching", "--metrics", "--slots",
        "-fa", "--jinja", "--no-webui",
    }  # fmt: skip


def test_short_spellings() -> None:
    args = parse(*"-m X -a n -t 3 -s 1 -n 4 -to 5 -v --log-jsonl".split())
    assert args.models == [{"path": "X", "name": "n"}]
    assert (args.threads, args.seed, args.n_predict, args.request_timeout) == (3, 1, 4, 5)
    assert flags.log_format(args) == "json" and parse("-t", "-1").threads is None
    assert parse("-n", "-1").n_predict is None and parse("-s", "-1").seed is None


def test_an_alias_may_stand_in_front_of_the_one_model() -> None:
    assert parse("-a", "x", "-m", "X").models == [{"path": "X", "name": "x"}]
    assert parse("-m", "X", "--alias", "x,y").models == [{"path": "X", "name": "x"}]
    assert parse("-m", "X", "--name", "x,y").models == [{"path": "X", "name": "x,y"}]
    assert parse("--alias", "x", "--dies", "0", "-m", "X").models == [{"path": "X", "name": "x", "dies": (0,)}]


def test_what_pantheon_does_not_do_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words, part in (
        (["--lora", "x.gguf"], "--lora is llama-server's, and not here: adapters are not supported"),
        (["-m", "X", "-hf", "org/model", "--port", "1"], "-hf is llama-server's, and not here: nothing is downloaded"),
        (["--rerank"], "--rerank is llama-server's, and not here: there is no reranking"),
        (["-ctk", "q5_1"], "-ctk/--cache-type-k: invalid choice: 'q5_1'"),
    ):
        assert part in refused(capsys, *words)
    # no flag is a short form of another one
    with pytest.raises(SystemExit):
        parse("--cache-type", "f16")


def test_each_spelling_stands_in_one_list_only() -> None:
    lists = [*flags_llama._SWITCHES.values(), flags_llama._VALUES, flags_llama._MAYBE, *flags_llama._REFUSED.values()]
    words = [word for one in lists for word in one]
    assert len(words) == len(set(words)) > 100 and all(word.startswith("-") for word in words)


def test_the_context_of_all_users_is_divided_among_them() -> None:
    assert flags.context(parse("-c", "512"), 4) == 128
    assert flags.context(parse("-c", "512", "--kv-unified"), 4) == 512
    assert flags.context(parse("-c", "0"), 4) is None and flags.context(parse("--ctx", "512"), 4) == 512
    for words in (["-c", "512", "--ctx", "512"], ["-c", "7"]):
        with pytest.raises(PantheonError, match="--ctx-size"):
            flags.context(parse(*words), 4)


def test_keys_and_values_have_one_format() -> None:
    assert flags.kv_type(parse()) is None and flags.kv_type(parse("--kv-type", "f32")) == "f32"
    for words in ("-ctk f16", "-ctv f16", "-ctk f16 -ctv q8_0", "--kv-type f32 -ctk f16"):
        with pytest.raises(PantheonError, match="cache-type"):
            flags.kv_type(parse(*words.split()))


@pytest.mark.parametrize(
    "words",
    [["--temp", "3"], ["--temp", "nan"], ["--top-k", "x"], ["--top-p", "1.1"], ["--n-predict", "0"], ["--seed", "-2"],
     ["--chat-template-kwargs", "[1]"], ["--reasoning", "maybe"]],
    ids=" ".join,
)
def test_bad_values_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert words[0] in refused(capsys, *words)


def test_a_chat_template_of_the_operators(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert flags.chat_template(parse()) is None
    assert "messages" in (flags.chat_template(parse("--chat-template", "chatml")) or "")
    assert flags.chat_template(parse("--chat-template-file", str(file))) == file.read_text()
    for words in (
        ["--chat-template", "llama9"], ["--chat-template", "{% nope %}"], ["--chat-template-file", "/nope"],
        ["--chat-template", "chatml", "--chat-template-file", str(file)],
    ):  # fmt: skip
        with pytest.raises(PantheonError, match="--chat-template"):
            flags.chat_template(parse(*words))
    model = load_model(TINY, ctx=64, executor="reference", template=file.read_text())
    assert model.template.source == file.read_text()
    model.close()


def test_template_variables_of_the_server_give_way_to_those_of_a_request() -> None:
    fill = flags.defaults(parse("--reasoning", "off", "--chat-template-kwargs", '{"a": 1}')).fill
    assert fill({})["chat_template_kwargs"] == {"enable_thinking": False, "a": 1}
    assert fill({"chat_template_kwargs": {"a": 2}})["chat_template_kwargs"] == {"enable_thinking": False, "a": 2}
    assert fill({"enable_thinking": True})["chat_template_kwargs"] == {"a": 1}
    assert fill({"reasoning_effort": "low"})["chat_template_kwargs"] == {"a": 1}
    assert fill({"chat_template_kwargs": 3})["chat_template_kwargs"] == 3, "the parser's to refuse"
    assert "chat_template_kwargs" not in flags.defaults(parse("--reasoning", "auto")).fill({})


# ---- defaults of the server -----------------------------------------------------------------------------------------

PIECES = [f"t{i}" for i in range(20)]
DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": "x"}),
]


@pytest.mark.parametrize(("path", "body"), DOORS, ids=[path for path, _ in DOORS])
def test_what_a_request_leaves_open_comes_from_the_flags(path: str, body: dict[str, Any]) -> None:
    with serving(App(defaults=Defaults(n_predict=3, temperature=0.0))) as api:
        api.add(pieces=PIECES)

        def made(**more: Any) -> int:
            answer = api.post(path, {**body, **more})
            assert answer.status == 200, answer.body
            return int(json.loads(answer.body)["usage"]["completion_tokens"])

        assert made() == made(max_tokens=None) == 3
        assert made(max_tokens=5) == 5
