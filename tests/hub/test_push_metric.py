"""Metrics as Spaces: files that evaluate finds, scoring without the package."""

from pathlib import Path

import pytest

from hf_longctx import cli
from hf_longctx.hub import build_space, check, missing_fields
from hf_longctx.metrics.evaluate_modules import NAMES


ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_a_space_is_python_and_versions_are_pinned_to_those_that_are_tested():
    assert "forgetting_curve.py" in compile(build_space("forgetting_curve").text("app.py"), "app.py", "exec").co_consts
    constraints = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    lines = build_space("forgetting_curve").text("requirements.txt").splitlines()
    assert all(line.removesuffix("+cpu") in constraints for line in lines if "==" in line)


def test_a_dry_run_needs_no_hub(capsys):
    assert cli.main(["push", "forgetting_curve", "alice/forgetting_curve", "--dry-run"]) == 0
    assert "longctx_tasks_curve.py" in capsys.readouterr().out


def test_a_line_that_would_not_load_is_not_printed(capsys):
    """evaluate looks for the script NAME.py in a repository called NAME."""
    assert cli.main(["push", "forgetting_curve", "alice/my-curve", "--dry-run"]) == 2
    assert "Push to alice/forgetting_curve" in capsys.readouterr().err


def test_spaces(run_client, publish):
    pytest.importorskip("evaluate")
    for name in NAMES:
        bundle = build_space(name)
        check(bundle)
        assert not missing_fields(bundle)
        publish(bundle.files, f"alice/{name}", type="space")
    for package in (False, True):
        run_client("metrics.py", package=package)
