"""A client that fails becomes a cell of the table, and does not stop the others."""

from pathlib import Path


def test_outcomes_of_a_check(load_script):
    def cell(measure):
        check = load_script("client_checks.checks").Check("name", "torch", "difference", 1e-4, 1.0, measure)
        return load_script("client_checks.child").cell(check, Path("a"))

    def refuse(folder):
        raise ValueError(f"bad {folder.name}\nand more")

    assert cell(lambda folder: 1e-5) == 1e-5
    assert cell(lambda folder: 1e-3) == "failed: 1.0e-03"
    assert cell(lambda folder: float("nan")) == "failed: nan"
    assert cell(refuse) == "ValueError: bad a"
