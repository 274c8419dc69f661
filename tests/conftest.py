"""Shared fixtures: the golden data, which lives beside the repository and not in it."""

import os
from pathlib import Path

import pytest
import torch


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
