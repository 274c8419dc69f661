"""Write scripts/results/README.md from the JSON files and sections.toml in its folder.

    python -m scripts.bench.tables

tests/test_figures.py checks that the page is up to date.
"""

import importlib
import json
import tomllib

from scripts.bench import common


RESULTS = common.ROOT / "scripts" / "results"
PAGE = RESULTS / "README.md"
HEAD = """# Results

`python -m scripts.bench.tables` writes this page from `sections.toml` and the JSON files of this folder. A JSON contains the machine, the \
versions, the commit, the settings and all rows. Some tables here are shortened: the command above a table prints all rows if you add \
`--table FILE`. The scripts of some experiments were removed: their tables do not change any more. The docstring of [each script](../README.md) says what it measures, and how.

Machine, unless noted otherwise: {where}. Small experiments take minutes of one CPU core, so they show effects, but not their size at scale. \
Models and implementations that are compared take turns in rounds. Times are medians over rounds, and ratios are medians of the ratio within \
a round.

Not measured yet on a GPU: {missing}.
"""


def section(
    title: str,
    text: str,
    results: dict,
    module: str,
    tables: dict,
    more: tuple,
    figure: str | None,
    only: dict,
    where: str,
) -> str:
    """Return one section of the page as Markdown; the arguments are the fields of sections.toml.

    `results` are the measured ones, by the name of their file, and `where` is the machine of the page.
    """
    parts = [f"## {title}", text]
    if figure:
        parts.append(f"![plot](../../model_cards/evidence/{figure})")
    for name, result in results.items():
        if name in tables:
            table = tables[name]
        else:
            rows = [row for row in result["rows"] if all(row.get(field) == value for field, value in only.items())]
            table = importlib.import_module(f"scripts.{module}").table(result | {"rows": rows})
        own = common.place(result)
        notes = [f", on {own}"] * (own != where) + [" (the script was removed later)"] * (name in tables)
        parts.append(f"`{result['command']}`: [{name}]({name}){''.join(notes)}.\n\n{table}")
    if more:
        parts.append(f"Without a table: {', '.join(f'[{name}]({name})' for name in more)}.")
    return "\n\n".join(parts)


def page() -> str:
    """Return the whole page as Markdown."""
    sections = tomllib.loads((RESULTS / "sections.toml").read_text())["section"]
    for fields in sections:
        files = {name: RESULTS / name for name in fields["results"]}
        fields["results"] = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        fields["missing"] = [name for name, file in files.items() if not file.exists()]
    places = [common.place(result) for fields in sections for result in fields["results"].values()]
    where = max(places, key=places.count)
    missing = ", ".join(name for fields in sections for name in fields.pop("missing"))
    optional = {"module": "", "tables": {}, "more": (), "figure": None, "only": {}, "where": where}
    parts = [section(**optional | fields) for fields in sections if fields["results"]]
    return "\n".join([HEAD.format(where=where, missing=missing), *(f"{part}\n" for part in parts)])


if __name__ == "__main__":
    PAGE.write_text(page())
