"""Run one check in this process: python -m scripts.client_checks.child CHECK OUTPUT FOLDER ...

Each model adds a line to OUTPUT as soon as it was checked: its name, and the figure or what failed.
"""

import json
import sys
import traceback
from pathlib import Path

from scripts.client_checks.__main__ import CHECKS


def cell(check, folder):
    try:
        figure = check.measure(folder)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:160]
    return figure if figure <= check.limit else f"failed: {figure:.1e}"


def main():
    name, output, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        line = json.dumps([folder.name, cell(CHECKS[name], folder)])
        with open(output, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
