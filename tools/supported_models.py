"""The tables of docs/reference/supported-models.md: what is verified, from the test data, and what was measured here.

    python -m tools.supported_models [--write] [MODEL.gguf …]

Every tiny model of tests/data is run on both executors and compared with its golden; each MODEL is timed with `pantheon
bench`.  Prints both tables; --write puts them into the page, the second one only when there is a MODEL.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gzip
import io
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.cli import main as pantheon
from pantheon.commands.bench import markdown
from pantheon.engine.load import load_model
from pantheon.engine.model import Model

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
PAGE = ROOT / "docs" / "reference" / "supported-models.md"
VERIFIED_HEAD = ("architecture", "weights", "file", "reference: logits", "cpu: NLL", "cpu: top token")
MEASURED_HEAD = ("model", "weights", "scratch", "KV of 4096", "read 512", "write 128", "run it")
#: context of the memory figures
CTX = 4096


@dataclass(frozen=True)
class Verified:
    """One golden: largest difference of logits on the reference executor; on the cpu executor the difference of the
    mean negative log likelihood and the share of positions with the same likeliest token."""

    architecture: str
    weights: str
    stem: str
    logits: float
    nll: float
    top: float

    def cells(self) -> tuple[str, ...]:
        """As the page has them."""
        figures = f"{self.logits:.0e}", f"{self.nll:+.3f}", f"{100 * self.top:.1f} %"
        return f"`{self.architecture}`", f"`{self.weights}`", f"`{self.stem}`", *figures


def stems() -> list[str]:
    """The goldens of tiny models: FILE, or FILE@ctxN for a context that longrope chooses its factors by."""
    return sorted(path.name.removesuffix(".json.gz") for path in (DATA / "golden").glob("tiny-*.json.gz"))


def verify(stem: str) -> Verified:
    """Run one golden on both executors."""
    golden = json.loads(gzip.decompress((DATA / "golden" / f"{stem}.json.gz").read_bytes()))
    name, _, ctx = stem.partition("@ctx")
    found = {}
    for executor in ("reference", "cpu"):
        with load_model(DATA / "models" / f"{name}.gguf", ctx=int(ctx or 1024), executor=executor) as model:
            architecture = model.architecture + (" with experts" if "mixtral" in stem else "")
            found[executor] = compare(model, golden)
    weights = name.split(".")[1]
    return Verified(architecture, weights, stem, found["reference"][0], found["cpu"][1], found["cpu"][2])


def compare(model: Model, golden: dict[str, Any]) -> tuple[float, float, float]:
    """(largest difference of logits, difference of the mean NLL, share of equal likeliest tokens) from the float32
    run of a golden."""
    exact = golden.get("exact") or golden.get("exact_hf") or golden["native"]
    worst, same = 0.0, []
    for prompt, run in zip(golden["prompts"], exact["runs"], strict=True):
        logits = model.logits(prompt["ids"])
        for position, expected in run.get("positions", {}).items():
            ids, values = zip(*expected["top"], strict=True)
            worst = max(worst, float(np.abs(logits[int(position), list(ids)] - np.array(values)).max()))
        same.append(logits.argmax(-1) == np.array(run["argmax_all"]))
    ids = exact["nll"].get("ids") or golden["native"]["nll"]["ids"]
    return worst, mean_nll(model.logits(ids), ids) - exact["nll"]["mean_nll"], float(np.concatenate(same).mean())


def mean_nll(logits: NDArray[np.float32], ids: Sequence[int]) -> float:
    """The mean negative log likelihood of each id after those before it."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    rows = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return float(-rows[np.arange(len(ids) - 1), list(ids[1:])].mean())


def verified_table(rows: Sequence[Verified]) -> str:
    """By architecture, then by file."""
    ordered = sorted(rows, key=lambda row: (row.architecture, row.stem))
    return "\n".join(markdown(VERIFIED_HEAD, [row.cells() for row in ordered], right={3, 4, 5}))


def measured_table(paths: Sequence[Path]) -> str:
    """Speeds and memory of real models on this machine."""
    rows = []
    for path in paths:
        bench = told("bench", str(path), "-p", "512", "-n", "128", "-r", "5", "--json")
        memory = told("inspect", str(path), "--ctx", str(CTX), "--json")["memory"]
        sizes = [f"{memory[f'{part}_bytes'] / 1e6:.0f} MB" for part in ("weights", "scratch", "kv")]
        speeds = [f"{result['median']:.0f}" for result in bench["results"]]
        rows.append((path.stem, *sizes, *speeds, f"`pantheon serve --model {path.name}`"))
    table = markdown(MEASURED_HEAD, rows, right={1, 2, 3, 4, 5})
    machine = f"{cpu_name()}, {bench['threads']} threads; {platform.system()}, Python {platform.python_version()}"
    return "\n".join([*table, "", f"{datetime.date.today()}; {machine}; tokens per second, median of 5."])


def told(*words: str) -> Any:
    """What a command prints as JSON.  Raises RuntimeError when it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = pantheon(list(words))
    if code:
        raise RuntimeError(f"pantheon {' '.join(words)}: exit {code}")
    return json.loads(out.getvalue())


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def put(page: str, name: str, table: str) -> str:
    """The page with what stands between `<!-- NAME -->` and `<!-- NAME end -->` replaced.  ValueError without."""
    start, end = f"<!-- {name} -->", f"<!-- {name} end -->"
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has no {start} … {end}")
    return f"{page.partition(start)[0]}{start}\n\n{table}\n\n{end}{page.partition(end)[2]}"


def main() -> int:
    """Verify, measure, print or write."""
    flags = argparse.ArgumentParser(prog="supported_models", description=__doc__.split("\n")[0])
    flags.add_argument("models", nargs="*", type=Path, metavar="MODEL.gguf", help="real models to measure")
    flags.add_argument("--write", action="store_true", help="put the tables into the page")
    flags.add_argument("--only-measure", action="store_true", help="leave the test data alone")
    args = flags.parse_args()
    tables = {} if args.only_measure else {"verified": verified_table([verify(stem) for stem in stems()])}
    if args.models:
        tables["measured"] = measured_table(args.models)
    for name, table in tables.items():
        print(f"<!-- {name} -->\n{table}\n")
        if args.write:
            PAGE.write_text(put(PAGE.read_text(), name, table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
