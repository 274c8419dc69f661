"""Every figure in a table of a README comes from a JSON that is in the repository."""

import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
READMES = sorted([ROOT / "README.md", ROOT / "scripts" / "README.md", *ROOT.glob("hf_longctx/**/README.md")])
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LETTER = re.compile(r"[^\W\d]")  # a code span with letters is code; one without is a figure
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
SCALES = (1, 100, 1000, 1e-3, 1e-6)  # a ratio in per cent, seconds in ms, bytes in k or M

readmes = pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))


def test_the_page_of_results_is_the_one_of_the_json(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from scripts.bench import tables

    assert tables.page() == tables.PAGE.read_text(), "run: python -m scripts.bench.tables"
    shown = set(re.findall(r"\]\(([\w.-]+\.json)\)", tables.page()))
    measured = {path.name for path in tables.RESULTS.glob("*.json")} - {"planted_bugs.json", "durations.json"}
    assert shown == measured


def numbers(value):
    """Return all numbers in the JSON of a result, including numbers in strings."""
    if isinstance(value, dict):
        return {x for part in value.values() for x in numbers(part)}
    if isinstance(value, list):
        return {x for part in value for x in numbers(part)}
    return {float(x) for x in NUMBER.findall(str(value))} if not isinstance(value, bool) else set()


def untraced_figures(text, folder):
    """Return the figures in a README's tables that are not in a JSON linked in the row or in the paragraph above."""
    blocks = ["", *re.split(r"\n\n+", CODE.sub("", text))]
    for paragraph, block in itertools.pairwise(blocks):
        for row in [line for line in block.splitlines() if line.startswith("|")][2:]:
            files = re.findall(r"\]\(([^)]+\.json)\)", paragraph + block.partition("|")[0] + row)
            values = {x for file in files for x in numbers(json.loads((folder / file).read_text()))}
            text = re.sub(r"\[[^]]*\]\([^)]*\)", "", row)
            text = re.sub(r"`[^`]*`", lambda span: "" if LETTER.search(span[0]) else span[0].strip("`"), text)
            for figure in NUMBER.findall(text):
                decimals = len(figure.partition(".")[2])
                if not any(round(x * scale, decimals) == float(figure) for x in values for scale in SCALES):
                    yield f"{figure} in {row}"


@readmes
def test_tables_link_the_json_of_their_figures(readme):
    assert not list(untraced_figures(readme.read_text(), readme.parent))


@readmes
def test_scripts_that_are_named_exist(readme, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    text = readme.read_text().replace("bench.NAME", "bench.common")
    assert all(importlib.util.find_spec(module) for module in re.findall(r"python -m (scripts\.[\w.]*\w)", text))
    assert all((ROOT / path).exists() for path in re.findall(r"python (scripts/\S+\.py)", text))
