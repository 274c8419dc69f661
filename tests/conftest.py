"""Shared fixtures: the golden data, which lives beside the repository and not in it."""

import gc
import json
import tempfile
from collections import Counter
from pathlib import Path

import commands
import mistakes
import pytest
from processes import TwoProcesses


GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the golden vectors; tests that need it are skipped where it is not mounted."""
    if not GOLDEN.is_dir():
        pytest.skip(f"golden data not found at {GOLDEN}")
    return GOLDEN


@pytest.fixture(scope="session")
def two_processes():
    """Runs a function in two processes at once, see processes.py."""
    processes = TwoProcesses()
    yield processes
    processes.stop()


@pytest.fixture
def short_replies(monkeypatch):
    """Let models reply with one token, where it does not matter what they answer."""
    from hf_longctx.metrics.run.reader import LocalReader

    reply = LocalReader.reply
    monkeypatch.setattr(
        LocalReader, "reply", lambda self, prompt, tokens, tokenizer: reply(self, prompt, 1, tokenizer)
    )


# Marks that transformers' own tests carry (transformers_sdist.py).
UPSTREAM_MARKS = """
    accelerate_tests executorch_export_test flash_attn_3_test flash_attn_4_test flash_attn_test generate
    is_expert_parallel_test is_fsdp_test is_tensor_parallel_test is_training_test onnx_export_test openvino_export_test
    timeout torch_compile_test torch_export_test
"""


def pytest_addoption(parser):
    parser.addoption("--durations-json", metavar="PATH", help="write the seconds of each test file to this JSON")


def pytest_configure(config):
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    commands.prepare(folder.name)
    for mark in UPSTREAM_MARKS.split():
        config.addinivalue_line("markers", f"{mark}: set by transformers' own tests")


def pytest_collection_finish():
    gc.freeze()  # what is imported by now is searched by no collection


def pytest_terminal_summary(terminalreporter, config):
    reports = [report for reports in terminalreporter.stats.values() for report in reports if hasattr(report, "when")]
    counts = mistakes.count(report for report in reports if report.outcome == "passed" and report.when == "call")
    if counts:
        terminalreporter.write_line(
            f"bad input: {counts.total()} mistakes, {counts['refused']} refused with one clear error, "
            f"{counts['harmless']} harmless"
        )
    for report in reports:
        if report.when == "call" and (hops := dict(report.user_properties).get("hops")):
            terminalreporter.write_line("{}: {} functions, {} changes of file".format(report.nodeid, *hops))
    if path := config.getoption("durations_json"):
        write_durations(Path(path), reports, config.getoption("numprocesses", None) or 1)


def write_durations(path, reports, processes):
    """Write the seconds of each file, its fixtures included, the slowest file first."""
    from scripts.bench.common import machine

    seconds = Counter()
    for report in reports:
        seconds[report.nodeid.partition("::")[0]] += getattr(report, "duration", 0)  # a file that is skipped has none
    files = {name: round(total, 1) for name, total in seconds.most_common()}
    result = {"machine": machine(), "processes": processes}
    path.write_text(json.dumps(result | {"seconds": round(seconds.total(), 1), "files": files}, indent=1) + "\n")
