"""The server on simulated CUDA dies: the real executor and its kernels behind HTTP, without a GPU.  Two replicas on two
dies, several answers in one forward, warm prefixes, unloading [M004, M058, M141-M143, M195, M222, M240].

The model is as small as models get: a forward takes tenths of a second here.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pantheon.engine.footprint import footprint
from pantheon.engine.load import load_model
from tests.serve.process import Served, get
from tools.make_tiny_gguf import LlamaShape, write_tiny_llama

LOAD_S, ANSWER_S, CTX, DIE = 400.0, 300.0, 64, 64 << 20
PROMPTS = ("on the one", "there was a word", "an answer", "all the others were in here")
pytestmark = pytest.mark.timeout(900)


def post(url: str, **fields: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as fault:
        return fault.code, json.load(fault)


class Server:
    """The process, and what is asked of it."""

    def __init__(self, url: str, model: Path) -> None:
        self.url, self.model = url, model

    def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        """An answer of four tokens; greedy when nothing else is said."""
        fields = {"model": "t", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        status, body = post(f"{self.url}/v1/completions", **fields)
        assert status == 200, body
        found: dict[str, Any] = body["choices"][0]
        return {**found, "usage": body["usage"]}

    def dies(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = get(f"{self.url}/admin/dies")[1]["dies"]
        return found

    def totals(self) -> list[dict[str, int]]:
        """What the scheduler of each replica has done."""
        return [entry["scheduler"]["totals"] for entry in get(f"{self.url}/admin/sched")[1]["entries"]]

    def unload(self, **fields: Any) -> None:
        status, body = post(f"{self.url}/admin/models/unload", name="t", **fields)
        assert status == 200, body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # a seed whose answers differ, with a clear favourite at each token
    shape = LlamaShape(layers=1, width=32, heads=2, kv_heads=1, ff=64, type_name="Q8_0", seed=8, tied=False)
    model = write_tiny_llama(tmp_path_factory.mktemp("models") / "t.gguf", shape)
    words = [part for die in "01" for part in ("--model", str(model), "--name", "t", "--dies", die)]
    dies = {"NUMBA_ENABLE_CUDASIM": "1", "PN_VIRTUAL_DIES": f"2x{DIE}", "PN_DIE_RESERVE_BYTES": ""}
    with Served(*words, "--ctx", str(CTX), "--parallel", "4", **dies) as served:
        url = served.url
        for _ in "01":
            served.wait_line("ready model=t", LOAD_S)
        yield Server(url, model)
        served.process.send_signal(signal.SIGTERM)
        assert served.end(30) == 0


def test_two_replicas_are_on_two_simulated_dies_M004_M143_M240(server: Server) -> None:
    need = footprint(str(server.model), ctx=CTX, executor="cuda", users=4)
    slots = 4 - 1 + 8
    for index, die in enumerate(server.dies()):
        assert (die["kind"], die["name"], die["model"]) == ("cuda", f"simulated CUDA die {index}", "t")
        assert die["used_bytes"] == need.total_bytes + (slots - 1) * need.parts["kv"] < DIE
    ids = [model["id"] for model in get(f"{server.url}/v1/models")[1]["data"]]
    assert ids == ["t"]


def test_answers_are_the_same_together_and_alone_and_those_of_the_cpu(server: Server) -> None:
    """Eight at a time on two dies: four of them share each forward of a replica."""
    found: dict[str, list[str]] = {prompt: [] for prompt in PROMPTS}
    threads = [
        threading.Thread(target=lambda prompt=prompt: found[prompt].append(server.complete(prompt)["text"]))
        for prompt in PROMPTS * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_S)
    totals = server.totals()
    assert all(done["steps"] > 0 for done in totals), "both dies have worked"
    assert sum(done["busy_slots"] for done in totals) > sum(done["steps"] for done in totals), "forwards were shared"
    alone = {prompt: server.complete(prompt)["text"] for prompt in PROMPTS}
    assert found == {prompt: [text] * 2 for prompt, text in alone.items()}
    with load_model(server.model, ctx=CTX, threads=1) as cpu:
        for prompt in PROMPTS:
            pieces = cpu.generate(prompt, max_tokens=4, temperature=0)
            assert "".join(piece.text for piece in pieces) == alone[prompt]
    assert len(set(alone.values())) == len(PROMPTS)


def test_what_was_read_stays_warm_on_its_die(server: Server) -> None:
    prompt = " ".join(PROMPTS)
    first = server.complete(prompt, max_tokens=1, session_id="s")
    again = server.complete(prompt, max_tokens=1, session_id="s")
    read = first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == read - 1 and again["text"] == first["text"]


def test_draws_are_made_from_rows_on_the_die(server: Server) -> None:
    """A seed repeats itself, a bias rules, and the likelihoods are those of the CPU."""
    drawn = {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 11}
    assert server.complete("the", **drawn)["text"] == server.complete("the", **drawn)["text"]
    with load_model(server.model, ctx=CTX, threads=1) as cpu:
        x = cpu.tokenize("x")[0]
        logits = cpu.logits(cpu.tokenize("the"))[-1].astype(float)
    assert server.complete("the", logit_bias={str(x): 100}, **drawn)["text"] == "xxxx"
    said = server.complete("the", max_tokens=1, logprobs=3)["logprobs"]
    normaliser = math.log(sum(math.exp(logit) for logit in logits))
    assert said["token_logprobs"][0] == pytest.approx(max(logits) - normaliser, abs=0.05)


def test_unloading_gives_the_bytes_of_a_die_back_M142(server: Server) -> None:
    server.unload(dies=[1])
    first, second = server.dies()
    assert first["model"] == "t" and (second["model"], second["used_bytes"], second["free_bytes"]) == (None, 0, DIE)
    assert server.complete(PROMPTS[0])["text"], "the other one serves on"
    server.unload()
    assert [(die["used_bytes"], die["free_bytes"]) for die in server.dies()] == [(0, DIE)] * 2


def test_one_model_on_two_dies_answers_as_on_one_M197_M226(server: Server) -> None:
    for name, dies in (("one", [0]), ("both", [0, 1])):
        status, body = post(f"{server.url}/admin/models/load", path=str(server.model), name=name, dies=dies)
        assert (status, body.get("dies")) == (200, dies), body
        found = server.complete(PROMPTS[0], model=name)
        assert [die["model"] for die in server.dies()][: len(dies)] == [name] * len(dies)
        if name == "one":
            alone = found["text"]
            assert post(f"{server.url}/admin/models/unload", name=name)[0] == 200
    assert found["text"] == alone and len(alone) == 4
    assert all(die["used_bytes"] > 0 for die in server.dies())
