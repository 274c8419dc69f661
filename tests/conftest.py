"""Shared fixtures: the golden data, which is next to the repository and not in it."""

import gc
import json
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean

import pytest


ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT.parent / "shared" / "golden"
DURATIONS = ROOT / "scripts" / "results" / "durations.json"
SLOW = 0.3  # seconds of one case of a test, with its fixtures


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the golden vectors; tests that need it are skipped where it is not mounted."""
    if not GOLDEN.is_dir():
        pytest.skip(f"golden data not found at {GOLDEN}")
    return GOLDEN


@pytest.fixture(scope="session")
def two_processes():
    """Run a function in two processes at the same time; see processes.py."""
    from processes import TwoProcesses

    processes = TwoProcesses()
    yield processes
    processes.stop()


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Let no collection search what imports and tests have left: each training and each manager collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_replies(monkeypatch):
    """Let models respond with one token, for tests that do not need the response."""
    from hf_longctx.metrics.run.reader import LocalReader

    reply = LocalReader.reply
    monkeypatch.setattr(
        LocalReader, "reply", lambda self, prompt, tokens, tokenizer: reply(self, prompt, 1, tokenizer)
    )


@pytest.fixture
def undrawn(monkeypatch):
    """Write only the first bytes of figures, for tests that do not look at them, because drawing is slow."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")
    content = b"\x89PNG"
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **_: Path(path).write_bytes(content))


# Marks that transformers' own tests carry (transformers_sdist.py).
UPSTREAM_MARKS = """
    accelerate_tests executorch_export_test flash_attn_3_test flash_attn_4_test flash_attn_test generate
    is_expert_parallel_test is_fsdp_test is_tensor_parallel_test is_training_test onnx_export_test openvino_export_test
    timeout torch_compile_test torch_export_test
"""


def runs_tests(options):
    """Return whether this process does; otherwise it hands them to others, and need not import torch."""
    return "PYTEST_XDIST_WORKER" in os.environ or not getattr(options, "numprocesses", None)


def pytest_addoption(parser, pluginmanager):
    if runs_tests(pluginmanager.get_plugin("pytestconfig").known_args_namespace):
        gc.disable()  # until tests are collected: to search what is imported again and again takes a fifth of the time
        import commands  # before a conftest below imports Triton and the package

        commands.prepare(tempfile.mkdtemp())
    parser.addoption(
        "--durations-json", metavar="PATH", help="write the seconds of the files and the slow tests to a JSON"
    )


def pytest_configure(config):
    if runs_tests(config.option):
        import commands

        config.add_cleanup(lambda: shutil.rmtree(Path(commands.HUB["HF_HOME"]).parent))
        config.add_cleanup(commands.ADDRESS.close)
        config.add_cleanup(gc.unfreeze)  # undoes `quick_collections`
    for mark in UPSTREAM_MARKS.split():
        config.addinivalue_line("markers", f"{mark}: set by transformers' own tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests as slow that were slow when all were measured last, or start processes."""
    slow = {
        f"{file}::{test}"
        for file, found in json.loads(DURATIONS.read_text())["files"].items()
        for test in found["slow"]
    }
    for item in items:
        if item.nodeid.partition("[")[0] in slow or "two_processes" in item.fixturenames:
            item.add_marker("slow")


def pytest_collection_finish():
    import commands

    gc.enable()
    commands.draw_coarsely()


def pytest_terminal_summary(terminalreporter, config):
    if path := config.getoption("durations_json"):
        reports = [x for reports in terminalreporter.stats.values() for x in reports if hasattr(x, "when")]
        write_durations(Path(path), reports, config.getoption("numprocesses", None) or 1)


def write_durations(path, reports, processes):
    """Write the seconds of each file, its fixtures included, and its slow tests; the slowest file first."""
    from scripts.bench.common import machine

    cases, files, tests = Counter(), Counter(), defaultdict(list)
    for report in reports:
        if report.outcome != "skipped":
            cases[report.nodeid] += report.duration
    for node, seconds in cases.items():
        file, _, test = node.partition("[")[0].partition("::")
        files[file] += seconds
        tests[file, test].append(seconds)
    slow = {test for test, seconds in tests.items() if mean(seconds) > SLOW}
    result = {"machine": machine(), "processes": processes, "seconds": round(files.total(), 1), "files": {}}
    for file, seconds in files.most_common():
        found = sorted(test for other, test in slow if other == file)
        result["files"][file] = {"seconds": round(seconds, 1), "slow": found}
    path.write_text(json.dumps(result, indent=1) + "\n")
