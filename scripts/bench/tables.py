"""Write the benchmarks' tables into README files, from the JSON that each place names.

    python -m scripts.bench.tables [README ...]

A place is everything from a line `<!-- bench.generate: results/generate.json -->`, which names a module of scripts and
a JSON, relative to the README, to the next line `<!-- end -->`. tests/test_figures.py checks that the tables are
those of the JSON.
"""

import importlib
import json
import re
import sys
from pathlib import Path

from scripts.bench import common


PLACE = re.compile(r"(<!-- ([\w.]+): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text, folder):
    """The text of a README in `folder`, with its tables."""

    def place(match):
        begin, module, name, end = match.groups()
        file = folder / name
        if not file.exists():
            return f"{begin}Not measured yet.\n{end}"
        result = json.loads(file.read_text())
        table = importlib.import_module(f"scripts.{module}").table(result)
        return f"{begin}[{file.name}]({name}), from {common.caption(result)}.\n\n{table}\n{end}"

    return PLACE.sub(place, text)


def main():
    for file in map(Path, sys.argv[1:] or [common.ROOT / "scripts" / "README.md"]):
        file.write_text(fill(file.read_text(), file.parent))


if __name__ == "__main__":
    main()
