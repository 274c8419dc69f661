"""Judge and time FoX's attention on this GPU: what attn_implementation="auto" would take, and how fast it is.

Compares each attention implementation that is installed with the definition in float64, in training, prefill and
decoding, and times it beside other kernels, a matrix product and a copy; then a training step of 125 million
parameters. Prints tables, and writes them as JSON, to attach to an issue, and as a picture. Exits with 1 if an
implementation computes FoX wrongly; "auto" never takes one that does. With --full in a checkout, the tests of the
kernels and the benchmark of the results follow.

Examples:
  hf-longctx gpu-check
  hf-longctx gpu-check --minutes 5 --output my-gpu.json
  hf-longctx gpu-check --full
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from . import measuring


ROOT = Path(__file__).resolve().parents[2]
FULL = {
    "tests": "pytest -q tests/fox/test_triton_fox_gpu.py tests/fox/test_triton_backend_gpu.py",
    "benchmark": "scripts.bench.gpu.bench",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="cuda",
        help="cuda, cuda:1, ...; cpu: a dry run in Triton's interpreter, without meaning for speed (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes", type=float, default=2.0, metavar="N", help="begin nothing later (default: %(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="also run the tests and the benchmark of a checkout")
    parser.add_argument(
        "--output",
        default="gpu-check.json",
        metavar="PATH",
        help="of the JSON; beside it a PNG (default: %(default)s)",
    )


def run(args: Namespace) -> None:
    output = Path(args.output).with_suffix(".json")
    measuring.check_writable("--output", str(output))
    if args.full and not (ROOT / "scripts" / "bench").is_dir():
        raise ValueError("--full needs a checkout of the repository, with its tests and scripts.")
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # which triton reads as it is imported
    import torch

    device = torch.device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {args.device} is not a CUDA device; it may be cuda, cuda:1, ..., or cpu.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"PyTorch {torch.__version__} sees no CUDA GPU here. --device cpu is a dry run in Triton's interpreter."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    from ..fox import gpu_check

    output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in gpu_check.check_gpu(device, args.minutes):
        rows.append(row)
        output.write_text(json.dumps(rows, indent=1) + "\n")  # nothing is lost if a kernel takes the process down
        measuring.log(" ".join(str(row[key]) for key in ("work", "head_dim", "dtype", "name") if key in row))
    print(gpu_check.report(rows))
    for name, command in FULL.items() if args.full else ():
        words = [sys.executable, "-m", *command.split()]
        code = subprocess.run(words, cwd=ROOT).returncode
        rows.append({"section": "full", "name": name, "command": f"python -m {command}", "exit_code": code})
        output.write_text(json.dumps(rows, indent=1) + "\n")
    try:
        gpu_check.plot(rows, output.with_suffix(".png"))
    except ImportError as error:
        measuring.log(f"no picture: {error}")
    measuring.log(f"wrote {output}")
    failed = [f"the {row['name']} ended with {row['exit_code']}" for row in rows if row.get("exit_code")]
    if found := gpu_check.mistakes(rows) + failed:
        raise RuntimeError(f"{'; '.join(found)}. Please attach {output} to an issue.")
