"""Run the GPU tests and all GPU benchmarks within a time limit, in order of importance.

    python -m scripts.bench.gpu.all [--minutes 25] [--output FOLDER/gpu_all_cuda.json] [--parts tests gpu_step ...]

Each part is a process with a time limit: its share of the remaining time. It writes PART_cuda.json next to --output,
row by row, the cheapest row first, so that a killed part retains its rows. The last two parts choose their rows by
their limits, so they come after the others. At --minutes 11, each of the others has at least 75 seconds. This script's
JSON records each part's exit status, its number of rows, the seconds from its start to its first row, and the last
lines of failed parts. `python -m scripts.bench.tables` adds all of them to the results page. `--device cpu` is a dry
run with tiny sizes.
"""

import collections
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from scripts.bench import common


TABLE = """
| part | seconds | limit | rows | first row, s | exit status | tests passed | failed | skipped | last lines |
| `{command}` | {seconds:.0f} | {limit:.0f} | {rows} | {first_row_seconds:.0f} | {status} | {passed} | {failed} |\
 {skipped} | {tail} |
"""
TESTS = ("tests/fox/test_triton_fox_gpu.py", "tests/hmt/test_hmt_cuda_graphs_gpu.py")
KILLED = -signal.SIGKILL  # exit status of a part that reached its limit
SUCCESS = {"cuda": (0,), "cpu": (0, 5)}  # exit statuses; pytest exits with 5 if all files are skipped, without a GPU


class Part(NamedTuple):
    """A part: its share of the time, its module, and its options on a GPU and in a dry run on a CPU."""

    share: float  # minutes of 25, if all parts run
    module: str
    cuda: str
    cpu: str
    takes_minutes: bool = False


DECODING = ("--dtype bfloat16 --hidden 2048 --layers 4 16 --head-dim 128 --vocab 32000 --context 1024 --tokens 64 "
            "--rounds 2", "--context 16 --tokens 2 --rounds 1 --hidden 128 --layers 1 --vocab 64")  # fmt: skip
PARTS = {
    "tests": Part(4, "pytest", "", ""),
    "generate": Part(3, "bench.generate", *DECODING),
    "generate_static": Part(6, "bench.generate --cache static", *DECODING),
    "hmt_speed": Part(
        4,
        "bench.hmt speed",
        "--size 1b --dtype bfloat16 --segment-lengths 512 --tokens 8192 --rounds 2",
        "--size tiny --tokens 32 --segment-lengths 16 --sensory-tokens 4 --rounds 1",
    ),
    "pruned": Part(
        3,
        "bench.pruned",
        "--dtype bfloat16 --contexts 16384 65536 --tolerances 1e-4",
        "--contexts 64 --tolerances 1e-2 --tokens 2 --layers 1 --heads 2",
    ),
    "gpu_step": Part(3, "bench.gpu.step", "", "--rounds 1", takes_minutes=True),
    "gpu_check": Part(2, "bench.gpu.check", "", "--minutes 0", takes_minutes=True),
}


def make_command(name, device, limit, folder):
    """Return the command of a part; `limit` is in seconds."""
    part, python = PARTS[name], [sys.executable, "-m"]
    if name == "tests":
        in_parallel = device == "cuda" and importlib.util.find_spec("xdist")
        workers = ["-n", str(max(1, (os.cpu_count() or 1) // 2))] if in_parallel else []
        return [*python, "pytest", "-q", "-p", "no:cacheprovider", *workers, *TESTS, f"--junitxml={folder}/tests.xml"]
    options = (part.cuda if device == "cuda" else part.cpu).split()
    if part.takes_minutes and device == "cuda":
        options += ["--minutes", f"{limit * 0.9 / 60:.2f}"]
    file = folder / f"{name}{'_cuda' if device == 'cuda' else ''}.json"
    return [*python, *f"scripts.{part.module}".split(), "--device", device, *options, "--output", str(file)]


def run_command(command, limit):
    """Run a command, and return its exit status, or KILLED at the time limit, and the last lines of its output."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    lines = collections.deque(maxlen=5)
    with subprocess.Popen(command, cwd=common.ROOT, **options) as process:
        timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))  # kills its workers, too
        timer.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        status = process.wait()
        timer.cancel()
    return status, " ".join(" ".join(lines).split())[-500:]


def count_tests(file):
    """Return the numbers of tests that passed, failed and were skipped from a JUnit file, which may be missing."""
    if not file.exists():
        return {}
    suite = next(ElementTree.parse(file).getroot().iter("testsuite"))
    total, failures, errors, skipped = (int(suite.get(x, 0)) for x in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def changed_at(file):
    return file.stat().st_mtime_ns if file.is_file() else None


def count_rows(file, earlier):
    """Return the number of rows of a part's JSON, and the seconds from the part's start to the first row.

    If the part has not changed the file since `earlier`, it has not written any row.
    """
    if changed_at(file) == earlier:
        return {"rows": 0}
    result = json.loads(file.read_text())
    return {"rows": len(result["rows"]), "first_row_seconds": result["first_row_seconds"]}


def measure(args):
    until, folder = time.monotonic() + 60 * args.minutes, args.output.parent.resolve()
    for place, name in enumerate(args.parts):
        shares = [PARTS[part].share for part in args.parts[place:]]
        limit = (until - time.monotonic()) * shares[0] / sum(shares)
        with tempfile.TemporaryDirectory() as scratch:
            command = make_command(name, args.device, limit, Path(scratch) if name == "tests" else folder)
            file = Path(command[-1])
            earlier = changed_at(file)
            begin = time.monotonic()
            status, tail = run_command(command, limit)
            shown = " ".join(["python", *command[1:]]).replace(f"{scratch}/", "").replace(f"{folder}/", "")
            row = {
                "part": name,
                "command": shown,
                "seconds": time.monotonic() - begin,
                "limit": limit,
                "status": status,
            }
            row |= count_tests(Path(scratch) / "tests.xml") if name == "tests" else count_rows(file, earlier)
        yield row | ({} if status in SUCCESS[args.device] else {"tail": tail})


def table(result):
    ended = [row | {"tail": "(limit reached)"} if row["status"] == KILLED else row for row in result["rows"]]
    return common.markdown(ended, TABLE)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, device="cuda", minutes=25.0)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all, in this order)"
    )
    result = common.run(parser, measure, table, arguments)
    return int(any("tail" in row for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
