"""A soak: one server, up to forty clients with every habit, and each answer held against the one it gave alone.

    python -m tools.soak [MINUTES] [--seconds N] [--model FILE.gguf] [--parallel 8] [--clients 40]

First every ask of the catalogue is answered alone.  Then 8 to 40 clients draw from it: streamed or not, slow, stalled,
hanging up in every phase, coming back when Retry-After says; beside them a second, tiny model is loaded and unloaded.
At the end nothing may be left: no slot, no ref, no wrong answer, no undocumented status, no traceback, and the memory
is what it was.  Prints what happened; exits with 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

from tools.bench_driver import ROOT
from tools.bench_http import free_port
from tools.make_tiny_gguf import write_tiny_llama
from tools.soak_client import TEXT, Ask, Given, Left, Manner, Refused, ask_once, catalogue

TINY = "tiny"
#: refusals that are no fault here: (status, code); those of the tiny model come from its unloads
EXPECTED = {(429, "queue_full"), (429, "queue_timeout"), (503, "memory_critical")}
OF_TINY = {(404, "model_not_found"), (503, "model_unloading"), (503, "model_loading"), (503, "model_closed")}
OF_CHAOS = {(409, "still_busy"), (404, "model_not_found"), (507, "insufficient_memory")}
#: pages that a conversation wrote come back late, and threads' stacks stay: this much more is no leak
SLACK_MIB = 48


@dataclass
class Tally:
    """What all clients have seen.  Guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def count(self, *names: str) -> None:
        """One more of each."""
        with self.lock:
            self.counts.update(names)

    def fault(self, text: str) -> None:
        """Something that must not happen."""
        with self.lock:
            self.wrong.append(text)
            if len(self.wrong) <= 20:
                print(f"soak: WRONG: {text}", file=sys.stderr, flush=True)


class Subject:
    """The server under test: a process, its log, its views."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.port, self.log = free_port(), folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*words, "--port", str(self.port)], stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + 300
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"soak: the server does not get ready:\n{self.log.read_text('utf-8')[-2000:]}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            return bool(self.get("/health"))
        except (OSError, ValueError):
            return False

    def get(self, path: str) -> Any:
        """A view."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return json.loads(reply.read())

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """An admin request.  Raises Refused."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as fault:
            text = fault.read().decode("utf-8", "replace")
            raise Refused(fault.code, str(json.loads(text)["error"]["code"]), None, text) from None

    def rss_mib(self) -> float:
        """What the process holds."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    def kept_mib(self) -> float:
        """The rows of conversations, which are kept on purpose."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return (
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("pantheon_kv_used_bytes{")) / 2**20
        )

    def leftovers(self) -> list[str]:
        """What is still in use."""
        found = []
        for entry in self.get("/admin/sched")["entries"]:
            found += [f"{entry['name']} {key} {entry[key]}" for key in ("refs", "active", "waiting") if entry[key]]
            found += [f"{entry['name']} request {row['id']}" for row in entry["requests"]]
            slots = entry.get("scheduler", {}).get("slots", [])
            found += [f"{entry['name']} slot {slot['id']} {slot['state']}" for slot in slots if slot["state"] != "idle"]
        found += [f"/slots {row['id']} is processing" for row in self.get("/slots") if row["is_processing"]]
        found += [f"{one['name']} refs {one['refs']}" for one in self.get("/admin/models")["models"] if one["refs"]]
        return found

    def settle(self, seconds: float = 15.0) -> list[str]:
        """Leftovers, once there are none or the time is over."""
        deadline = time.monotonic() + seconds
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def close(self) -> int:
        """SIGTERM; its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Soak:
    """Clients and chaos around one subject."""

    def __init__(self, subject: Subject, tiny: Path, args: argparse.Namespace) -> None:
        self.subject, self.tiny, self.args = subject, tiny, args
        self.asks, self.tally = catalogue(), Tally()
        self.tiny_asks = [
            Ask(f"tiny {i}", TEXT, {"prompt": "a b c d"[: 1 + 2 * i], "max_tokens": 24, "temperature": 0})
            for i in range(3)
        ]
        self.solo: dict[str, Given] = {}
        self.until = self.began = 0.0

    def learn(self) -> None:
        """The answers as one client alone gets them, twice: the second time out of the prefix cache."""
        for _ in range(2):
            for ask in self.asks:
                self._hold(ask, ask_once(self.subject.port, ask, Manner(), self.args.name))
        self.load()
        for ask in self.tiny_asks:
            self._hold(ask, ask_once(self.subject.port, ask, Manner(), TINY))

    def _hold(self, ask: Ask, given: Given) -> None:
        if self.solo.setdefault(ask.name, given) != given:
            self.tally.count("wrong answers")
            self.tally.fault(f"{ask.name}: {given} instead of {self.solo[ask.name]}")

    def run(self) -> None:
        """Until the time is over and everybody has gone."""
        self.began = time.monotonic()
        self.until = self.began + self.args.seconds
        threads = [threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(self.args.clients)]
        threads.append(threading.Thread(target=self._chaos, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.until - time.monotonic()) + 200)
        if any(thread.is_alive() for thread in threads):
            self.tally.fault("a client got no answer within 200 s of the end")

    def rush(self) -> None:
        """All clients ask once, at once, and obey Retry-After until they are served [X08]."""
        self.until = math.inf
        chance = random.Random(self.args.seed)
        picked = [chance.choice(self.asks) for _ in range(self.args.clients)]
        threads = [threading.Thread(target=self._obey, args=(ask,), daemon=True) for ask in picked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)

    def _obey(self, ask: Ask) -> None:
        for attempt in range(20):
            try:
                self._hold(ask, ask_once(self.subject.port, ask, Manner(), self.args.name))
            except Refused as refused:
                self._refused(ask, refused, False, "in the rush")
                time.sleep(refused.after_s or 1)
            except (OSError, HTTPException) as fault:
                return self.tally.fault(f"{ask.name}: {type(fault).__name__}: {fault}")
            else:
                return self.tally.count(f"rush: served on try {attempt + 1}")
        return self.tally.fault(f"{ask.name}: refused 20 times")

    def crowd(self) -> int:
        """How many clients are active now: 8 to all of them, in waves of a minute."""
        wave = 0.5 - 0.5 * math.cos((time.monotonic() - self.began) * 2 * math.pi / 60)
        return round(8 + (self.args.clients - 8) * wave)

    def _client(self, number: int) -> None:
        chance = random.Random(1000 * self.args.seed + number)
        while time.monotonic() < self.until:
            if number >= self.crowd():
                time.sleep(0.5)
                continue
            try:
                self._one(chance)
            except Exception as fault:
                self.tally.fault(f"{type(fault).__name__}: {fault}")
                time.sleep(1)

    def _one(self, chance: random.Random) -> None:
        tiny = chance.random() < 0.08
        ask, manner = chance.choice(self.tiny_asks if tiny else self.asks), Manner.drawn(chance)
        for _ in range(8):
            self.tally.count("requests")
            try:
                given = ask_once(self.subject.port, ask, manner, TINY if tiny else self.args.name)
            except Left:
                return self.tally.count("left", f"left {manner.seen}")
            except Refused as refused:
                self._refused(ask, refused, tiny)
                if tiny or refused.after_s is None or time.monotonic() > self.until:
                    return None
                time.sleep(refused.after_s)
            except (OSError, HTTPException) as fault:
                return self.tally.fault(f"{ask.name} {manner}: {type(fault).__name__}: {fault}")
            else:
                self._hold(ask, given)
                kind = (
                    "stalled"
                    if manner.stall_s
                    else "slow"
                    if manner.pause_s
                    else "streamed"
                    if manner.stream
                    else "plain"
                )
                return self.tally.count("answers", f"answers {kind}")
        return self.tally.count("gave up after 8 tries")

    def _refused(self, ask: Ask, refused: Refused, tiny: bool, when: str = "") -> None:
        which = refused.code if refused.status else f"{refused.code} in a stream"
        self.tally.count(f"refused {which} {when}".rstrip())
        known = {code for _, code in EXPECTED | (OF_TINY if tiny else set())}
        expected = EXPECTED | (OF_TINY if tiny else set())
        if (refused.status, refused.code) not in expected and not (refused.status == 0 and refused.code in known):
            self.tally.fault(f"{ask.name}: {refused}")
        if refused.status in (429, 503) and refused.after_s is None:
            self.tally.fault(f"{ask.name}: no Retry-After: {refused}")

    # ---- the operator -----------------------------------------------------------------------------------------------

    def load(self) -> None:
        """The tiny model comes."""
        self.subject.post("/admin/models/load", {"path": str(self.tiny), "name": TINY, "ctx": 64})
        self.tally.count("loads")

    def _chaos(self) -> None:
        chance = random.Random(self.args.seed)
        while time.monotonic() < self.until:
            time.sleep(chance.uniform(0.5, 4))
            self._admin(
                lambda: self.subject.post(
                    "/admin/models/unload", {"name": TINY, "timeout_s": 5, "force": chance.random() < 0.5}
                )
            )
            time.sleep(chance.uniform(0.1, 1))
            self._admin(self.load)

    def _admin(self, act: Callable[[], Any]) -> None:
        try:
            act()
            self.tally.count("admin requests")
        except Refused as refused:
            self.tally.count(f"admin {refused.code}")
            if (refused.status, refused.code) not in OF_CHAOS | {(409, "duplicate_model")}:
                self.tally.fault(f"admin: {refused}")
        except OSError as fault:
            self.tally.fault(f"admin: {fault}")


class Watch(threading.Thread):
    """The memory of the subject, every second."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(daemon=True)
        self._subject, self._ended = subject, threading.Event()
        self.seen: list[tuple[float, float]] = []

    def run(self) -> None:
        """(RSS, of which rows of conversations), MiB."""
        while not self._ended.wait(1.0):
            with suppress(OSError, psutil.Error):
                self.seen.append((self._subject.rss_mib(), self._subject.kept_mib()))

    def end(self) -> None:
        """No more."""
        self._ended.set()
        self.join()

    def around(self, first: int, last: int) -> float:
        """The median of what is held beside conversations, from a second to another."""
        rows = sorted(rss - kept for rss, kept in self.seen[first:last])
        return rows[len(rows) // 2] if rows else 0.0


def judge(soak: Soak, watch: Watch, left: Sequence[str], status: int) -> list[str]:
    """The lines of the report; faults are noted in the tally."""
    counts, tally = soak.tally.counts, soak.tally
    for one in left:
        tally.fault(f"left over: {one}")
    log = soak.subject.log.read_text("utf-8", "replace")
    for sign in ("Traceback", " ERROR ", "AssertionError"):
        if sign in log:
            at = log.index(sign)
            tally.fault(f"{log.count(sign)} x {sign.strip()} in the log: {log[max(0, at - 300) : at + 900]}")
    if status:
        tally.fault(f"the server ended with {status}")
    n = len(watch.seen)
    early, late = watch.around(min(55, n // 4), min(65, n // 4 + 10)), watch.around(n - 10, n)
    if late > early * 1.03 + SLACK_MIB:
        tally.fault(f"memory beside conversations grew from {early:.0f} to {late:.0f} MiB")
    served = counts["rush: served on try 2"]
    came_back = soak.args.clients - counts["rush: served on try 1"]
    if served < 0.8 * came_back:
        tally.fault(f"only {served} of {came_back} were served when they came back at Retry-After")
    lines = [f"{counts[name]:>8}  {name}" for name in sorted(counts)]
    if watch.seen:
        end = watch.seen[-1]
        lines.append(
            f"RSS without conversations: {early:.0f} MiB after a minute, {late:.0f} at the end; with: {end[0]:.0f}"
        )
    if came_back:
        lines.append(
            f"refused in a rush and served on the first retry: {served} of {came_back} ({served / came_back:.0%})"
        )
    return [*lines, f"wrong: {len(tally.wrong)}", *tally.wrong[:20]]


def _command(args: argparse.Namespace, model: str, folder: Path) -> list[str]:
    words: list[Any] = [sys.executable, "-m", "pantheon", "serve", "--model", model, "--name", args.name]
    words += ["--strict-model", "--ctx", 4096, "--parallel", args.parallel, "--queue-depth", args.queue_depth]
    return [str(word) for word in (*words, "--model-root", folder, *args.flags)]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("minutes", nargs="?", type=float, default=10)
    flags.add_argument("--seconds", type=float, help="instead of minutes")
    flags.add_argument("--model", help="a GGUF file (default: SmolLM2)")
    flags.add_argument("--name", default="soaked", help=argparse.SUPPRESS)
    flags.add_argument("--parallel", type=int, default=8)
    flags.add_argument("--queue-depth", type=int, default=16, help="less than the clients, so that some are refused")
    flags.add_argument("--clients", type=int, default=40)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--keep", metavar="DIR", help="where the server's log goes, and stays")
    flags.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="the rest is given to the server")
    args = flags.parse_args(words)
    args.seconds = args.seconds or 60 * args.minutes
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Soak and report."""
    from pantheon.engine.default_model import need_default_model

    args = parse(words)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(args.keep or made)
        subject = Subject(_command(args, args.model or str(need_default_model()), folder), folder)
        status = 0
        try:
            soak = Soak(subject, write_tiny_llama(folder / "tiny.gguf"), args)
            soak.learn()
            watch = Watch(subject)
            watch.start()
            soak.run()
            left = subject.settle()
            soak.rush()
            left += subject.settle()
            time.sleep(2)
            watch.end()
        finally:
            status = subject.close()
        print("\n".join(judge(soak, watch, left, status)))
        return 1 if soak.tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
