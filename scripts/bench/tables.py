"""Write scripts/results/README.md from the JSON files beside it and the words in sections.toml.

    python -m scripts.bench.tables

tests/test_figures.py checks that the page is the one that this prints.
"""

import importlib
import json
import tomllib

from scripts.bench import common


RESULTS = common.ROOT / "scripts" / "results"
PAGE = RESULTS / "README.md"
HEAD = """# Results

Written by `python -m scripts.bench.tables` from the JSON files of this folder and from `sections.toml`: change those. Each JSON \
has the machine, the versions, the commit, the settings and all rows; the tables leave rows and columns out. \
[How to run the scripts](../README.md).

The small experiments are sized for minutes of one CPU core. They show effects, and not how large these are at scale. Contenders \
take turns in rounds, times are medians over rounds, and ratios are medians of the ratio within a round.
"""


def section(
    title: str, text: str, module: str, results: list[str], more: tuple = (), picture: str | None = None
) -> str:
    """Return one section of the page as Markdown; the arguments are the fields of sections.toml."""
    parts = [f"## {title}", text]
    if picture:
        parts.append(f"![{title}](../../model_cards/evidence/{picture})")
    measured = [name for name in results if (RESULTS / name).exists()]
    for name in measured:
        result = json.loads((RESULTS / name).read_text())
        table = importlib.import_module(f"scripts.{module}").table(result)
        parts.append(f"[{name}]({name}), from {common.caption(result)}.\n\n{table}")
    missing = [name for name in results if name not in measured]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    if more:
        others = ", ".join(f"[{name}]({name})" for name in more)
        parts.append(f"Also measured: {others}; `python -m scripts.{module} --table FILE` prints its table.")
    return "\n\n".join(parts)


def page() -> str:
    """Return the whole page as Markdown."""
    sections = tomllib.loads((RESULTS / "sections.toml").read_text())["section"]
    return "\n".join([HEAD, *(f"{section(**fields)}\n" for fields in sections)])


if __name__ == "__main__":
    PAGE.write_text(page())
