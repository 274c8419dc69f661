"""What the README shows is what happens: its Python is run and its output compared, its commands are run."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_longctx import cli


ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]


@pytest.mark.slow
def test_python_prints_what_the_readme_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    examples = [
        (code, BLOCKS[i + 1][1])
        for i, (language, code) in enumerate(BLOCKS)
        if language == "python" and i + 1 < len(BLOCKS) and BLOCKS[i + 1][0] == "text"
    ]
    assert len(examples) == sum(language == "python" for language, _ in BLOCKS), "a Python block shows no output"
    names = {}
    for code, output in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == output


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("hf-longctx ")])
def test_commands_work(command, tmp_path, monkeypatch):
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command, comments=True)[1:]) == 0


@pytest.mark.slow
def test_demo(tmp_path):
    """scripts/demo without its environment, which the one that runs this test replaces."""
    assert "scripts/demo" in COMMANDS and "scripts/test" in COMMANDS
    text = tmp_path / "text.txt"
    text.write_text("".join(f"In line {i} the {i * i % 97} foxes of {i % 13} villages met. " for i in range(900)))
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py", text, "--max-length", "60", "--output", tmp_path / "out"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    assert "same logits" in run.stdout
    shown = dict(re.findall(r"^(Picture|Numbers): +(.+)$", run.stdout, re.MULTILINE))
    assert all(Path(path).is_file() for path in shown.values()) and len(shown) == 2
    assert re.search(r"^Fine length: +>?\d+ tokens", run.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "link", re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", README), ids=lambda link: "".join(link)
)
def test_links_lead_somewhere(link):
    target = "".join(link)
    assert target.startswith("http") or (ROOT / target).exists()
