"""Shared fixtures: the golden data, which lives beside the repository and not in it."""

import os
from pathlib import Path

import commands
import mistakes
import pytest
import torch
from processes import TwoProcesses


if not torch.cuda.is_available():
    # Triton decides at its import whether to interpret, and transformers imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")


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


# Marks that transformers' own tests carry (transformers_sdist.py).
UPSTREAM_MARKS = """
    accelerate_tests executorch_export_test flash_attn_3_test flash_attn_4_test flash_attn_test generate
    is_expert_parallel_test is_fsdp_test is_tensor_parallel_test is_training_test onnx_export_test openvino_export_test
    timeout torch_compile_test torch_export_test
"""


def pytest_configure(config):
    commands.ENVIRONMENT.update(os.environ)
    for mark in UPSTREAM_MARKS.split():
        config.addinivalue_line("markers", f"{mark}: set by transformers' own tests")


def pytest_terminal_summary(terminalreporter):
    counts = mistakes.count(terminalreporter.stats.get("passed", []))
    if counts:
        terminalreporter.write_line(
            f"bad input: {counts.total()} mistakes, {counts['refused']} refused with one clear error, "
            f"{counts['harmless']} harmless"
        )
