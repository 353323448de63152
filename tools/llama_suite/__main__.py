"""Run llama-server's own black-box tests with Pantheon in its place, and SmolLM2 in the place of its models.

    python -m tools.llama_suite SUITE                      the cases that llama.cpp's own server passes this way
    python -m tools.llama_suite SUITE test_completion.py   those of one file
    python -m tools.llama_suite SUITE --server llama-server --all     a reference run, which found them

SUITE is llama.cpp's tools/server/tests (also in the source distribution of llama-cpp-python, under vendor/), and the
Python that runs it needs the suite's requirements.txt (--python).  The list of cases is passing.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: what the issue calls structural; the other files need GPUs, images, the network or the original models' words
FILES = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_compat_anthropic.py",
    "test_compat_oai_responses.py",
    "test_completion.py",
    "test_ctx_shift.py",
    "test_embedding.py",
    "test_ignore_eos.py",
    "test_infill.py",
    "test_kv_keep_only_active.py",
    "test_metrics.py",
    "test_security.py",
    "test_slot_save.py",
    "test_template.py",
    "test_tokenize.py",
    "test_tool_call.py",
)


def passing() -> list[str]:
    """Ids of the cases that llama.cpp's own server passes with SmolLM2."""
    lines = (HERE / "passing.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main() -> int:
    """Run pytest on the suite; returns its exit code."""
    parser = argparse.ArgumentParser(prog="llama_suite", description=__doc__.split("\n", 1)[0])
    parser.add_argument("suite", type=Path, help="llama.cpp's tools/server/tests")
    parser.add_argument("files", nargs="*", help="names of files, or parts of ids, to run (default: all listed)")
    parser.add_argument("--server", help="another server's binary (default: this Pantheon)")
    parser.add_argument("--model", type=Path, help="GGUF file (default: the installed SmolLM2)")
    parser.add_argument("--python", default=sys.executable, help="a Python with the suite's requirements")
    parser.add_argument("--all", action="store_true", help="every case of these files, not only the listed ones")
    parser.add_argument("--junit", type=Path, help="write the outcomes here as well")
    args, more = parser.parse_known_args()
    if not (args.suite / "utils.py").is_file():
        parser.error(f"{args.suite}: there is no utils.py; is it llama.cpp's tools/server/tests?")
    command = [args.python, "-m", "pytest", "-q", "-p", "suite_plugin", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--junit-xml", str(args.junit.resolve())] if args.junit else []
    return subprocess.call([*command, *more, *_cases(args)], cwd=args.suite, env=_environment(args))


def _cases(args: argparse.Namespace) -> list[str]:
    known = [f"unit/{name}" for name in FILES] if args.all else passing()
    wanted = [case for case in known if not args.files or any(part in case for part in args.files)]
    if not wanted:
        raise SystemExit("no such case")
    return wanted


def _environment(args: argparse.Namespace) -> dict[str, str]:
    model = args.model
    if model is None:
        sys.path.insert(0, str(ROOT))
        from pantheon.engine.default_model import need_default_model

        model = need_default_model()
    own = [sys.executable, "-m", "pantheon", "serve"]
    server = [str(Path(args.server).resolve())] if args.server else own
    paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SUITE_SERVER": json.dumps(server),
        "SUITE_OURS": json.dumps(not args.server),
        "SUITE_MODEL": str(Path(model).resolve()),
    }


if __name__ == "__main__":
    sys.exit(main())
