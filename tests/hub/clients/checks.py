"""Runs the functions of a client whose names begin with `check_`, in their order, and says how each went."""

import sys
import time
import traceback


def run(functions):
    failed = 0
    for name, function in functions.items():
        if name.startswith("check_"):
            start = time.process_time()
            try:
                function()
                print(f"ok    {name} ({time.process_time() - start:.1f} s)", flush=True)
            except Exception:
                failed += 1
                print(f"FAILS {name}\n{traceback.format_exc()}", flush=True)
    sys.exit(failed)
