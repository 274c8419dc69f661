"""Run unmodified clients on a small FoX (LLaMA), FoX (Pro), HMT and Llama, each check in a process of its own.

    scripts/clients [WORD ...]

Words select the checks whose name or package contains one of them; their JSON goes to build/clients.json. The output
of the clients goes to build/clients. --jobs checks run at a time.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.bench import common
from scripts.client_checks import exporting, quantizing, scoring, training  # noqa: F401 (register checks)
from scripts.client_checks.checks import CHECKS, MODELS, make_model


BUILD = common.ROOT / "build"
TABLE = """
| client | FoX (LLaMA) | FoX (Pro) | HMT | Llama |
| {name} | {fox_llama} | {fox_pro} | {hmt} | {llama} |
"""


def run_check(check, folders, log):
    """Return {model: figure, or a line that says what failed}. A process that dies or hangs costs one cell."""
    log.write_text("")
    cells, output = {}, log.with_suffix(".jsonl")
    while rest := [folder for folder in folders if folder.name not in cells]:
        output.write_text("")
        command = [sys.executable, "-m", "scripts.client_checks.child", check.name, output, *rest]
        with log.open("a") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=common.ROOT, start_new_session=True
            )
            try:
                end = f"the process ended with {process.wait(60 * check.minutes)}"
            except subprocess.TimeoutExpired:
                end = f"not finished after {check.minutes:g} minutes"
            with contextlib.suppress(ProcessLookupError):  # servers and workers that the check left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        cells |= dict(map(json.loads, output.read_text().splitlines()))
        missing = [folder.name for folder in rest if folder.name not in cells]
        cells |= dict.fromkeys(missing[:1], end)
    return cells


def measure(args):
    words = [word.lower() for word in args.words]
    checks = [x for x in CHECKS.values() if not words or any(w in f"{x.name} {x.package}".lower() for w in words)]
    logs = BUILD / "clients"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        models = Path(temporary, "models")
        for name in MODELS:
            make_model(name, models / name)

        def run(check):
            name = check.name.replace(" ", "_")
            copy = shutil.copytree(models, Path(temporary, name))  # a check may change the models
            return run_check(check, [copy / name for name in MODELS], logs / f"{name}.log")

        for check, cells in zip(checks, pool.map(run, checks)):
            yield check.row() | cells


def table(result):
    def text(cell):  # a figure, or what failed: the class of an exception
        return f"{cell:.1e}" if isinstance(cell, float) else cell.partition(":")[0]

    rows = [row | {name: text(row[name]) for name in MODELS if name in row} for row in result["rows"]]
    return common.markdown(rows, TABLE)


def main(arguments=None):
    parser = common.make_parser("scripts.client_checks", __doc__, name="clients", jobs=2)
    parser.prog = "scripts/clients"
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="part of the name or package of a check (default: all)"
    )
    if parser.parse_args(arguments).words:
        parser.set_defaults(output=BUILD / "clients.json")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
