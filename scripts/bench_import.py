"""What `import hf_longctx` adds to `import transformers`, in milliseconds: medians over fresh interpreters.

python scripts/bench_import.py [--repeats N]
"""

import argparse
import re
import statistics
import subprocess
import sys


def cumulative_ms(code, module):
    """Time of importing `module`, with all that it imports, as `python -X importtime` tells it."""
    run = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    line = next(line for line in run.stderr.splitlines() if re.search(rf"\| {module}$", line))
    return int(line.split("|")[1]) / 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="interpreters (default: %(default)s)")
    args = parser.parse_args()
    for code, module in (
        ("import transformers", "transformers"),
        ("import transformers, hf_longctx", "hf_longctx"),
    ):
        times = [cumulative_ms(code, module) for _ in range(args.repeats)]
        print(f"{statistics.median(times):8.1f} ms   {module:<15} in: {code}")


if __name__ == "__main__":
    main()
