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

    def leave_out(folder):
        raise load("checks").NotApplicable("there is none")

    cell = load("child").cell
    assert cell(make_check(lambda folder: 1e-5), Path("a")) == 1e-5
    assert cell(make_check(lambda folder: 1e-3), Path("a")) == "failed: 1.0e-03"
    assert cell(make_check(lambda folder: float("nan")), Path("a")) == "failed: nan"
    assert cell(make_check(refuse), Path("a")) == "ValueError: bad a"
    assert cell(make_check(leave_out), Path("a")) == "there is none"


@pytest.mark.parametrize(
    "script, minutes, cell",
    [("exit 3", 1.0, "the process ended with 3"), ("sleep 60", 0.001, "not finished after 0.001 minutes")],
    ids=["a crash", "a hang"],
)
def test_every_model_has_a_cell(script, minutes, cell, load, make_check, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    cells = load("__main__").run_check(make_check(None, minutes), [Path("a"), Path("b")], tmp_path / "log")
    assert cells == {"a": cell, "b": cell}


def test_a_word_that_chooses_a_check_chooses_what_it_needs(load):
    checks = load("__main__").CHECKS.values()
    lines = Path(load("checks").ROOT / "scripts" / "clients.txt").read_text().lower().splitlines()
    for check in checks:
        for line in lines:
            if line.removeprefix("# ").startswith(check.package.lower()) and check.package not in (
                "torch",
                "transformers",
            ):
                for part in (*check.name.lower().split(", "), check.package.lower()):
                    assert part in line, f"{check.name} needs {line}, which {part!r} does not choose"
