"""A client that fails, crashes or hangs becomes a cell of the table, and does not stop the others."""

from pathlib import Path

import pytest


@pytest.fixture
def load(load_script):
    return lambda name: load_script(f"client_checks.{name}")


@pytest.fixture
def make_check(load):
    def make(measure, minutes=1.0):
        return load("checks").Check("name", "torch", "difference", 1e-4, minutes, measure)

    return make


def test_outcomes_of_a_check(load, make_check):
    def refuse(folder):
        raise ValueError(f"bad {folder.name}\nand more")

    cell = load("child").cell
    assert cell(make_check(lambda folder: 1e-5), Path("a")) == 1e-5
    assert cell(make_check(lambda folder: 1e-3), Path("a")) == "failed: 1.0e-03"
    assert cell(make_check(lambda folder: float("nan")), Path("a")) == "failed: nan"
    assert cell(make_check(refuse), Path("a")) == "ValueError: bad a"
