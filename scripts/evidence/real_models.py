"""Evaluate pretrained models with hf-longctx, alongside the 14 models of the forgetting-curve paper.

    for name in smollm2-135m gemma3-270m qwen2.5-coder-0.5b; do python -m scripts.fetch_model $name; done
    python -m scripts.evidence.real_models [--models "Gemma 3 270M" "fox-demo 5M"]
    python -m scripts.evidence.real_models --models "Qwen1.5 (7B)" --device cuda

Each model of real_models.toml gets a row: its forgetting curve, position loss, needle, line retrieval and RoPE bound,
measured by `hf-longctx` with the manifest's options, and the lengths reported by Liu et al. 2024 (Table 3). Only
--models are measured; other rows of --output are retained. The same command resumes a stopped run. A failed
measurement reports its error and does not stop the run: the row lists it as missing.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np

from hf_longctx.metrics import ForgettingCurve, LineRetrieval, NeedleGrid, PositionLoss
from scripts.bench import common
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import make_parser, run
from scripts.fetch_model import MODELS


MANIFEST = Path(__file__).with_suffix(".toml")
RESULTS = {"curve": ForgettingCurve, "loss": PositionLoss, "needle": NeedleGrid, "lines": LineRetrieval}
PARTS = 8  # parts of the context; the loss is averaged in each part
TABLE = """
| model | claimed context | fine length | 95 % CI | coarse length | 95 % CI | copied of 1,000 tokens | of 4,000 | of 8,000 |\
 in the paper: fine | coarse | loss in the first half | in the second half | needle | lines | RoPE base | RoPE bound |\
 CPU minutes | missing |
| {model} | {claimed} | {fine} | {fine_interval} | {coarse} | {coarse_interval} | {copied[1000]:.1%} | {copied[4000]:.1%} | {copied[8000]:.1%} |\
 {paper_fine} | {paper_coarse} | {loss[0]:.3f} | {loss[1]:.3f} | {needle:.0%} | {lines:.0%} | {bases} | {bounds} |\
 {minutes:.0f} | {missing} |
"""


def commands(group, model):
    """Return a model's commands by the name of the measurement."""
    source, options = model["source"], model.get("options", "").split()
    lengths = model.get("lengths", group.get("lengths"))
    words = {name: group[name].format(lengths=lengths).split() for name in RESULTS}
    words |= {"rope": ["--json"]} if model.get("has_rope", True) else {}
    return {name: ["hf-longctx", name, source, *several, *options] for name, several in words.items()}


def measured(name, command, folder, device):
    """Return the JSON document of a command, which runs unless it has run to its end before; None if it wrote none."""
    file = folder / f"{name}.json"
    read = lambda: json.loads(file.read_text()) if file.exists() else None  # noqa: E731
    if (document := read()) is not None and not document.get("missing"):
        return document
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "hf_longctx", *(word.format(models=MODELS) for word in command[1:])]
    if name != "rope":
        words += ["--device", device, "--journal", folder / f"{name}.jsonl", "--output", folder / name]
    before = cpu_seconds()
    done = subprocess.run([*map(str, words)], cwd=common.ROOT, stdout=subprocess.PIPE, text=True, check=False)
    with open(folder / "cpu_seconds", "a") as log:
        print(f"{cpu_seconds() - before:.1f}", file=log)
    if name == "rope" and done.returncode == 0:
        file.write_text(done.stdout)
    return read()


def cpu_seconds():
    """Return the CPU seconds of all commands that ended."""
    times = os.times()
    return times.children_user + times.children_system


def row_of(group, model, args):
    """Return a model's results and the commands that produced them."""
    folder, several = args.work / "real_models" / Path(model["source"]).name, commands(group, model)
    row = {name: measured(name, command, folder, args.device) for name, command in several.items()}
    missing = [name for name, document in row.items() if document is None or document.get("missing")]
    row = {name: document for name, document in row.items() if document is not None}
    if "loss" in row:  # the mean of each of PARTS parts of the context
        row["loss"] = [float(part.mean()) for part in np.array_split(read(row, "loss").loss, PARTS)]
    if "rope" in row:
        fields = ("layer_type", "layers", "base", "context_bound", "max_distance", "negative_distances")
        row["rope"] = [{field: layers.get(field) for field in fields} for layers in row["rope"]["groups"]]
    seconds = folder / "cpu_seconds"
    row["cpu_seconds"] = sum(map(float, seconds.read_text().split())) if seconds.exists() else None
    shown = [" ".join(command).format(models="~/.cache/hf_longctx") for command in several.values()]
    return row | {"commands": shown, "missing": ", ".join(missing)}


def measure(args):
    before = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    before, rows = {row["model"]: row for row in before}, []
    for group in tomllib.loads(MANIFEST.read_text())["group"]:
        for model in group["models"]:
            found = row_of(group, model, args) if model["model"] in args.models else {}
            rows.append(before.get(model["model"], {}) | model | found)
    yield from rows  # all at the end, because --output is replaced row by row


def read(row, name):
    return RESULTS[name].from_json(json.dumps(row[name]))


def describe(row):
    """Return the cells of a table row."""
    names = {
        "model": "model",
        "claimed": "claimed",
        "missing": "missing",
        "fine": "paper_fine",
        "coarse": "paper_coarse",
    }
    cells = {cell: row[name] for name, cell in names.items() if name in row}
    if "curve" in row:
        curve = read(row, "curve")
        cells |= {"fine": curve.fine_length, "coarse": curve.coarse_length}
        for method in ("fine", "coarse"):
            low, high = curve.interval(method)[:2]
            cells[f"{method}_interval"] = f"{low} or more" if high is None else f"{low} to {high}"
        cells["copied"] = {point.length: point.copy_mean for point in curve.points}
    if "loss" in row:
        cells["loss"] = [np.mean(part) for part in np.split(np.array(row["loss"]), 2)]
    for name in ("needle", "lines"):
        if name in row:
            cells[name] = np.mean(list(read(row, name).rates().values()))
    if "rope" in row:
        cells["bases"] = ", ".join(f"{layers['base']:g}" for layers in row["rope"])
        cells["bounds"] = ", ".join(map(verdict, row["rope"]))
    if row.get("cpu_seconds") is not None:
        cells["minutes"] = row["cpu_seconds"] / 60
    return cells


def verdict(layers):
    """Return whether the base supports the claimed context, of the layers with one base."""
    if not (negative := layers["negative_distances"]):
        return "holds"
    share = negative / (layers["max_distance"] + 1)
    return f"violated at {share:.1%} of the distances, from {layers['context_bound'] + 1:,} tokens on"


def table(result):
    return common.markdown(list(map(describe, result["rows"])), TABLE)


def draw(result, path):
    """Draw the forgetting curves that were measured, over the LM accuracy, which is a mean of all models."""
    curves = {row["model"]: read(row, "curve") for row in result["rows"] if "curve" in row}
    lines, guesses = [], {}
    for name, curve in curves.items():
        shares = [[count / point.scored_tokens for count in point.copy_correct] for point in curve.points]
        lines.append(Line(name, [point.length for point in curve.points], shares))
        for point in curve.points:
            guesses.setdefault(point.length, []).append(point.lm_mean)
    lines.append(Line("copied by chance (LM accuracy)", *zip(*((n, [np.mean(x)]) for n, x in guesses.items())), True))
    draw_panels(
        path,
        "Tokens that small models copy",
        {"": lines},
        across="length of the passage to copy, tokens",
        up="copied correctly",
        notes=f"lines: mean of {len(next(iter(curves.values())).points[0].copy_correct)} passages; areas: range",
        percent=True,
        log=True,
        ticks={2**i: str(2**i) for i in range(3, 14) if 2**i <= max(guesses) * 1.1},
    )


def main(arguments=None):
    manifest = tomllib.loads(MANIFEST.read_text())["group"]
    small = [model["model"] for model in manifest[0]["models"]]
    run(
        make_parser(__spec__.name, __doc__, "real_models", models=small, device="cpu"), measure, table, draw, arguments
    )


if __name__ == "__main__":
    main()
