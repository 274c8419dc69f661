"""The time that `import hf_longctx` adds to `import torch, transformers`, in milliseconds: medians over interpreters.

What it adds is the import of transformers' Auto classes, into which our models are entered by name.

python -m scripts.bench.import_time [--rounds N]
"""

import re
import statistics
import subprocess
import sys

from scripts.bench import common


STATEMENTS = {
    "transformers": "import torch, transformers",
    "hf_longctx": "import torch, transformers, hf_longctx",
}
TABLE = """
| import of | in | median ms |
| {module} | `{statement}` | {median_ms:.1f} |
"""


def import_seconds(module):
    """Time of importing a module, with all that it imports, from `python -X importtime`."""
    command = [sys.executable, "-X", "importtime", "-c", STATEMENTS[module]]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    line = next(line for line in lines if re.search(rf"\| {module}$", line))
    return int(line.split("|")[1]) / 1e6


def measure(args):
    turns = {module: lambda module=module: import_seconds(module) for module in STATEMENTS}
    for module, seconds in common.alternate(turns, args.rounds).items():
        yield {"module": module, "statement": STATEMENTS[module], "median_ms": 1e3 * statistics.median(seconds)}


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    common.run(common.make_parser(__spec__.name, __doc__, rounds=5), measure, table, arguments)


if __name__ == "__main__":
    main()
