"""Metrics as Spaces: files that evaluate finds, scoring without the package."""

import ast
import re
from pathlib import Path

import pytest

from hf_longctx import cli
from hf_longctx.hub import build_space, check, missing_fields
from hf_longctx.metrics.evaluate_modules import NAMES


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_a_space_is_closed(name):
    """Every file that is imported while the script is imported is there, and the script itself names it."""
    bundle = build_space(name)
    check(bundle)
    assert not missing_fields(bundle)
    files = bundle.files
    code = {path: files[path] for path in files if path.endswith(".py") and "/" not in path and path != "app.py"}
    text = {
        path: content.decode() if isinstance(content, bytes) else content.read_text() for path, content in code.items()
    }
    fetched = set(re.findall(r"^from \.(\w+) import \w+$", text[f"{name}.py"], re.MULTILINE))
    assert {f"{module}.py" for module in fetched} | {f"{name}.py"} == set(code)
    assert "evaluate_modules.py" not in files, "in the folder of the app, it would hide a package of evaluate"
    for source in text.values():
        ast.parse(source)
        assert not re.search(r"^(from|import) hf_longctx", source, re.MULTILINE)
        assert set(re.findall(r"^\s*from \.(\w+)", source, re.MULTILINE)) <= fetched
        assert "from .." not in source


def test_versions_are_pinned_to_those_that_are_tested():
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
        publish(build_space(name).files, f"alice/{name}", type="space")
    for package in (False, True):
        run_client("metrics.py", package=package)
