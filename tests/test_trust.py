"""The tests that pages name as the proof of a sentence exist."""

import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("hf_longctx/**/*.md"), *ROOT.glob("model_cards/*-demo/README.md")]
NAME = re.compile(r"(?<![\w/])(?:test|check)_\w+\b(?!\.py)")  # the name of a file does not count
DEFINITION = re.compile(r"^def ((?:test|check)_\w+)", re.MULTILINE)


def test_named_tests_exist():
    tests = {name for path in ROOT.glob("tests/**/*.py") for name in DEFINITION.findall(path.read_text())}
    named = {name for page in PAGES for name in NAME.findall(page.read_text())}
    assert len(named) > 20 and not named - tests
