"""Shared fixtures: the golden data, which lives beside the repository and not in it."""

from pathlib import Path

import pytest


GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the golden vectors; tests that need it are skipped where it is not mounted."""
    if not GOLDEN.is_dir():
        pytest.skip(f"golden data not found at {GOLDEN}")
    return GOLDEN
