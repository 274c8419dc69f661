"""Plant bugs, one at a time, in a copy of the repository, and run the tests that should fail.

    python scripts/planted_bugs.py                           # all bugs of planted_bugs.toml
    python scripts/planted_bugs.py --check                   # only check that the code of each bug is still there
    python scripts/planted_bugs.py --only fold-sign journal-flush

`planted_bugs.toml` defines the code that each bug replaces and the tests that run first. If these pass, all tests in
the same files run. Finally the failed tests are rerun on the unchanged copy, where they must pass.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
BUGS = ROOT / "scripts" / "planted_bugs.toml"
TIERS = {"fast": "not slow", "slow": "slow"}  # pytest marks of the tests
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache")
NO_TESTS = 5  # pytest's exit status where nothing was selected
LIBRARIES = (
    "matplotlib.figure",
    "scipy.stats",
    "transformers.generation",
    "transformers.masking_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "triton.language",
)


def find_place(bug: dict) -> dict:
    """Return a bug with the `path` of its file, its `selection` of tests for pytest, and the tests' `files`.

    Raises:
        ValueError: the code to replace does not occur exactly once, or the tests do not exist.
    """
    places = [path for path in ROOT.glob(bug["file"]) for _ in range(path.read_text().count(bug["old"]))]
    selection = expand_tests(bug["tests"])
    files = [part for part in selection if part.startswith("tests/")]
    if len(places) != 1 or not files:
        raise ValueError(f"{bug['name']}: {bug['file']} has the code {len(places)} times, {len(files)} test files")
    return {**bug, "path": places[0].relative_to(ROOT), "selection": selection, "files": files}


def expand_tests(tests: str) -> list[str]:
    """Expand globs of test files in pytest arguments; options are unchanged."""
    arguments = []
    for part in shlex.split(tests):
        is_glob = part.startswith("tests/")
        arguments += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(part)) if is_glob else [part]
    return arguments


def import_libraries() -> None:
    """Import slow libraries once; each test run is a fork of this process."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # like tests/interpreter.py, before transformers imports it
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # the extra is not installed
            importlib.import_module(name)


def run_tests(tree: Path, selection: list[str], *options: str) -> tuple[int, list[str], str]:
    """Run pytest, and return its exit status, the failed tests and its output."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            status = -1
            try:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                os.chdir(tree)
                sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
                status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *options, *selection])
                sys.stdout.flush()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        printed = output.read()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", printed, re.MULTILINE)
    return os.waitstatus_to_exitcode(status), failed, printed


def copy_tree(folder: Path) -> Path:
    """Copy the repository into a folder, with the golden data next to it, where the tests expect them."""
    copy = shutil.copytree(ROOT, folder / "tree", ignore=NOT_COPIED)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return copy


def take_copy(copies) -> None:
    """Assign a copy of the repository to a pool process."""
    global tree
    tree = copies.get()


def plant(bug: dict) -> dict:
    """Run the tests with the bug in this process's copy, then restore it. Return the bug's entry in the JSON."""
    entry = {"name": bug["name"], "file": str(bug["path"]), "test": None, "tier": None}
    path, begin = tree / bug["path"], time.perf_counter()
    sound = path.read_text()
    path.write_text(sound.replace(bug["old"], bug["new"]))
    try:
        attempts = [(tests, tier) for tests in (bug["selection"], bug["files"]) for tier in TIERS]
        for tests, tier in list(dict.fromkeys((tuple(tests), tier) for tests, tier in attempts)):
            status, failed, output = run_tests(tree, list(tests), "-x", "-m", TIERS[tier])
            if status == 1 and failed:
                entry |= {"test": failed[0], "tier": tier}
                break
            if status not in (0, NO_TESTS):  # for example an import failed, so no test ran
                entry["trouble"] = output[-2000:]
                break
    finally:
        path.write_text(sound)
    return entry | {"seconds": round(time.perf_counter() - begin, 1)}


def confirm(tree: Path, entries: list[dict]) -> None:
    """Discard verdicts of tests that also fail without the bug."""
    tests = sorted({entry["test"] for entry in entries if entry["test"]})
    _, failed, output = run_tests(tree, tests) if tests else (0, [], "")
    if tests and not failed and " passed" not in output:
        raise RuntimeError(f"the unchanged tree could not be tested:\n{output[-2000:]}")
    for entry in entries:
        if entry["test"] in failed:
            entry |= {"trouble": f"{entry['test']} fails without the bug, too", "test": None, "tier": None}


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def write_results(output: Path, entries: list[dict], names: list[str]) -> dict:
    """Replace older entries of the same bugs in the JSON, and return its content."""
    older = json.loads(output.read_text())["bugs"] if output.exists() else []
    bugs = {entry["name"]: entry for entry in [*older, *entries]}
    bugs = [bugs[name] for name in names if name in bugs]
    result = {
        "planted": len(bugs),
        "caught": sum(entry["test"] is not None for entry in bugs),
        "caught_by_the_fast_tier": sum(entry["tier"] == "fast" for entry in bugs),
        "seconds": round(sum(entry["seconds"] for entry in bugs), 1),
        "bugs": bugs,
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of bugs to plant (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="number of copies tested in parallel (default: 2)")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "scripts" / "results" / "planted_bugs.json", help="JSON file"
    )
    parser.add_argument("--check", action="store_true", help="only check that the code of each bug is still there")
    args = parser.parse_args()

    bugs = {bug["name"]: bug for bug in tomllib.loads(BUGS.read_text())["bug"]}
    if unknown := set(args.only or ()) - bugs.keys():
        raise SystemExit(f"--only must name bugs of planted_bugs.toml, got {', '.join(sorted(unknown))}")
    chosen, problems = [], []
    for name in args.only or bugs:
        try:
            chosen.append(find_place(bugs[name]))
        except ValueError as problem:
            problems.append(str(problem))
    print(f"The code of {len(chosen)} bugs is there.")
    if problems:
        raise SystemExit("The code of these is not:\n  " + "\n  ".join(problems))
    if args.check:
        return

    planted_in, entries = commit(), []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ["HF_HOME"] = temporary  # ensures that the cache of a run with a bug is deleted
        sys.dont_write_bytecode = True  # a bug added and removed within a second would share its bytecode
        import_libraries()
        fork = multiprocessing.get_context("fork")
        copies = fork.SimpleQueue()
        for job in range(args.jobs):
            copies.put(copy_tree(Path(temporary) / str(job)))
        with fork.Pool(args.jobs, initializer=take_copy, initargs=(copies,)) as pool:
            for entry in pool.imap(plant, chosen):
                entries.append(entry | {"commit": planted_in})
                verdict = f"{entry['tier']}: {entry['test']}" if entry["test"] else entry.get("trouble", "NOT CAUGHT")
                print(f"{entry['name']} ({entry['seconds']} s): {verdict}", flush=True)
                write_results(args.output, entries, list(bugs))
        confirm(Path(temporary) / "0" / "tree", entries)
    result = write_results(args.output, entries, list(bugs))
    print(f"caught {result['caught']} of {result['planted']}, {result['caught_by_the_fast_tier']} by the fast tier")
    for entry in result["bugs"]:
        if not entry["test"]:
            print(f"NOT CAUGHT: {entry['name']}: {bugs[entry['name']]['breaks']} ({entry['file']})")


if __name__ == "__main__":
    main()
