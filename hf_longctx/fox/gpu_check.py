"""Judge and time FoX's attention on this machine: what `hf-longctx gpu-check` measures, prints and draws.

Which implementations are right, and how fast, is found as `attn_implementation="auto"` finds it (selection_fox.py).
Beside them run what else is installed (peers.py), pruning, and whole training steps. Rows come in order of importance,
and no part begins after the deadline.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from . import peers
from .backend_fox import NAME
from .configuration_fox import FoxConfig
from .modeling_fox import FoxAttention, FoxForCausalLM
from .selection_fox import TIMED, Case, describe, draw_timed, examine, make_case, seconds, timed_heads


# All that differs on a CPU, where Triton's interpreter shows that the command works, and nothing about speed.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": dict(
        width=2048, head_dims=(64, 128), prefill=16384, training=16384, decoding=65536, matmul=8192, copy=2**30
    ),
    "cpu": dict(width=32, head_dims=(16,), prefill=32, training=32, decoding=32, matmul=128, copy=2**20),
}
STEP = {  # the 125M model of the paper's sizes
    "cuda": dict(vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    "cpu": dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
}
ROWS = {"cuda": (8, 2048), "cpu": (1, 16)}  # of a training step: rows, tokens of each
# Tokens times key heads that are timed. Keys that are decoded must not fit a GPU's cache, nor be read before Python
# has launched what comes next.
MOST = {"training": TIMED, "prefill": TIMED, "decoding": 2**20}
BLUE, GREY, RED = "#2f6fab", "#a9b2ba", "#c0392b"


def check_gpu(device: torch.device, minutes: float = 2.0) -> Iterator[dict[str, Any]]:
    """Yield the rows of a check, each as soon as it is measured.

    Args:
        device: a CUDA device, or the CPU for a dry run in Triton's interpreter.
        minutes: no part begins later.

    Yields:
        dictionaries of plain JSON values. `section` says what a row is: "machine", "attention" (one implementation,
        kind of work and size of heads), "step" (a training step of a whole model), or "late" (parts without time).
    """
    until = time.monotonic() + 60 * minutes
    sizes = SIZES[device.type]
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    yield {"section": "machine", "name": describe(device), **hardware(device), **ceilings(device, half)}
    parts: list[tuple[str, Any]] = []
    for D in sizes["head_dims"]:
        parts += [(f"{work}, heads of {D}", (check_attention, D, work, half, device)) for work in MOST]
    parts.append(("training step", (check_steps, device)))
    if device.type == "cuda":
        others = [(torch.float16, work) for work in MOST] + [(torch.float32, work) for work in MOST]
        parts += [(f"{work}, {dtype}", (check_attention, 64, work, dtype, device)) for dtype, work in others]
    late = []
    for name, (measure, *arguments) in parts:
        if time.monotonic() > until:
            late.append(name)
        else:
            yield from measure(*arguments)
    if late:
        yield {"section": "late", "parts": late}


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the size of a GPU."""
    if device.type != "cuda":
        return {}
    gpu = torch.cuda.get_device_properties(device)
    return {
        "capability": f"{gpu.major}.{gpu.minor}",
        "memory_gb": round(gpu.total_memory / 1e9, 1),
        "processors": gpu.multi_processor_count,
    }


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return the rates of a large matrix product, and of a large copy, which nothing exceeds by much."""
    sizes = SIZES[device.type]
    a, b = torch.randn(2, sizes["matmul"], sizes["matmul"], device=device, dtype=dtype)
    x = torch.empty(sizes["copy"], dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return {
        "matmul_tflops": 2 * sizes["matmul"] ** 3 / seconds(lambda: a @ b) / 1e12,
        "copy_tb_per_s": 2 * x.nbytes / seconds(lambda: y.copy_(x)) / 1e12,
    }


def check_attention(D: int, work: str, dtype: torch.dtype, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for each implementation that is installed, and for each peer.

    Rates count the products of causal attention over all keys, also where some are pruned, and in decoding the bytes
    of keys and values.
    """
    sizes = SIZES[device.type]
    heads = sizes["width"] // D
    grouped = {"num_key_value_heads": max(1, heads // 4)} if work == "decoding" else {}
    config = FoxConfig.pro(hidden_size=sizes["width"], num_attention_heads=heads, **grouped)
    case = make_case(config, dtype, work)._replace(length=sizes[work])
    row = {"section": "attention", "work": work, "dtype": str(dtype)[6:], "head_dim": D, "length": case.length}
    found = examine(case, config, FoxAttention, device, most=MOST[work])
    if NAME in found:
        all_keys = examine(case._replace(pruned=False), config, FoxAttention, device, [NAME], MOST[work])
        found[f"{NAME}, all keys"] = all_keys[NAME]
    for name, x in found.items():
        judged = {"name": name, "errors": x.errors, "mistake": x.mistake(), "failure": x.failure}
        yield row | judged | rates(case, config, x.milliseconds)
    for name in peers.COMPETITORS if work != "decoding" else ():
        if name.startswith(("ours", "folded")) or name == "FlexAttention":  # measured above; compiled for too long
            continue
        milliseconds = failure = None
        try:
            milliseconds = time_peer(peers.competitor(name), case, config, device)
        except ImportError:
            continue
        except Exception as error:  # it has no kernel for this GPU or dtype
            failure = f"{type(error).__name__}: {error}"
        yield row | {"name": name, "peer": True, "failure": failure} | rates(case, config, milliseconds)


def time_peer(attention, case: Case, config, device: torch.device) -> float:
    """Return the milliseconds of a call, in training with gradients of what it uses."""
    *inputs, do = draw_timed(case, config, device, MOST[case.work])
    if case.work != "training":
        with torch.no_grad():
            return 1e3 * seconds(lambda: attention(*inputs))
    inputs = [x.requires_grad_() for x in inputs]
    return 1e3 * seconds(lambda: torch.autograd.grad(attention(*inputs), inputs, do, allow_unused=True))


def rates(case: Case, config, milliseconds: float | None) -> dict[str, float]:
    """Return the time of a call, and its rate in TFLOP/s, or TB/s of decoding."""
    if milliseconds is None:
        return {}
    heads, D = timed_heads(case, config, MOST[case.work]), case.head_dim
    if case.work == "decoding":
        return {"ms": milliseconds, "tb_per_s": 2 * heads * case.length * D * case.dtype.itemsize / milliseconds / 1e9}
    work = 2 * heads * case.group * case.length**2 * D * (3.5 if case.work == "training" else 1)
    return {"ms": milliseconds, "tflops": work / milliseconds / 1e9}


def check_steps(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for a training step of each model: AdamW, float32 weights, bfloat16 autocast on a GPU."""
    shape = ROWS[device.type]
    sizes: dict[str, Any] = STEP[device.type] | {"tie_word_embeddings": True}
    models = {
        "Llama, sdpa": lambda: LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=sizes["hidden_size"] * 8 // 3)),
        "FoX (Pro), sdpa": lambda: FoxForCausalLM(FoxConfig.pro(**sizes)),
        "FoX (Pro), auto": lambda: FoxForCausalLM(FoxConfig.pro(**sizes)),
    }
    for name, make in models.items():
        row = {"section": "step", "name": name, "rows": shape[0], "length": shape[1]}
        try:
            yield row | time_step(make, name.split(", ")[1], shape, device)
        except Exception as error:
            yield row | {"failure": f"{type(error).__name__}: {error}"}


def time_step(make, attention: str, shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Return how long a training step of a model takes, and how much memory."""
    with device:
        model = make().train()
        ids = torch.randint(0, model.config.vocab_size, shape)
    model.set_attn_implementation(attention)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # compiles, and "auto" measures
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken, parameters, layers = seconds(step), model.num_parameters(), model.config.num_hidden_layers
    tokens = shape[0] * shape[1]
    work = 6 * tokens * (parameters + layers * model.config.hidden_size * shape[1])
    memory = {"peak_gb": torch.cuda.max_memory_allocated(device) / 1e9} if device.type == "cuda" else {}
    speed = {"ms": 1e3 * taken, "tokens_per_s": tokens / taken, "tflops": work / taken / 1e12}
    return {"parameters": parameters, **speed, **memory}


def mistakes(rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each implementation that computes FoX wrongly, for one kind of work and size of heads."""
    return [
        f"{row['name']} ({row['work']}, {row['dtype']}, heads of {row['head_dim']}): {row['mistake']}"
        for row in rows
        if row.get("mistake")
    ]


def share(row: dict[str, Any], machine: dict[str, Any]) -> float | None:
    """Return the rate of a row as a share of what the machine was measured to do, None if it has none."""
    for rate, ceiling in (("tflops", "matmul_tflops"), ("tb_per_s", "copy_tb_per_s")):
        if rate in row:
            return row[rate] / machine[ceiling]
    return None


def verdict(row: dict[str, Any]) -> str:
    """Return "right" with the share of the error budget that is used, or what is the matter, in a few words."""
    if row.get("mistake"):
        return f"WRONG: {row['mistake']}"
    if row.get("failure"):
        return f"cannot run: {' '.join(row['failure'].split())[:80]}"
    if row.get("peer"):
        return "not judged"
    return f"right ({max(error / allowed for error, allowed in row['errors'].values()):.0%} of the budget)"


def report(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    machine, *rest = rows
    lines = [
        f"{machine['name']}: {machine['matmul_tflops']:.3g} TFLOP/s in a matrix product, "
        f"{machine['copy_tb_per_s']:.3g} TB/s in a copy."
    ]
    for key, part in parts_of(rest).items():
        lines += [
            "",
            f"{key}",
            "",
            "| implementation | result | ms | rate | of the machine's |",
            "|---|---|---|---|---|",
        ]
        for row in part:
            unit = "TB/s" if "tb_per_s" in row else "TFLOP/s"
            speed = row.get("tb_per_s", row.get("tflops"))
            cells = ["", "", ""]
            if speed is not None:
                cells = [f"{row['ms']:.3g}", f"{speed:.3g} {unit}", f"{share(row, machine):.0%}"]
            lines.append(f"| {' | '.join([row['name'], verdict(row), *cells])} |")
        right = [row for row in part if "errors" in row and "ms" in row and "all keys" not in row["name"]]
        lines += ["", f'"auto" takes {min(right, key=lambda row: row["ms"])["name"]}.' if right else "None is right."]
    steps = [row for row in rest if row["section"] == "step"]
    if steps:
        title = f"A training step of {steps[0]['rows']} rows of {steps[0]['length']} tokens"
        lines += [
            "",
            title,
            "",
            "| model | parameters | ms | tokens/s | of the machine's rate | GB |",
            "|---|---|---|---|---|---|",
        ]
        for row in steps:
            if "failure" in row:
                lines.append(f"| {row['name']} | {verdict(row)} | | | | |")
                continue
            speed = f"{row['ms']:.3g} | {row['tokens_per_s']:,.0f} | {share(row, machine):.0%} | {row.get('peak_gb', 0):.3g}"
            lines.append(f"| {row['name']} | {row['parameters'] / 1e6:.0f} M | {speed} |")
    lines += [f"\nNo time was left for: {', '.join(row['parts'])}." for row in rest if row["section"] == "late"]
    return "\n".join(lines)


def parts_of(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the section "attention" by kind of work, dtype and size of heads, in words."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["section"] == "attention":
            key = f"{row['work']}, {row['dtype']}, heads of {row['head_dim']}, {row['length']} tokens"
            parts.setdefault(key.capitalize(), []).append(row)
    return parts


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the speeds as shares of what the machine was measured to do, wrong implementations in red.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'hf-longctx[plot]'") from error

    machine, *rest = rows
    parts = parts_of(rest)
    columns = min(3, len(parts))
    lines = -(-len(parts) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines + 0.5), dpi=140, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flat
    for (title, part), axes in zip(parts.items(), grid):  # in this order, no axes are lost to the end of the parts
        colours = [RED if row.get("mistake") else GREY if row.get("peer") else BLUE for row in part]
        axes.barh([row["name"] for row in part], [100 * (share(row, machine) or 0) for row in part], color=colours)
        for i, row in enumerate(part):
            if "ms" not in row:
                axes.text(
                    0, i, " wrong" if row.get("mistake") else " cannot run", va="center", fontsize=8, color=colours[i]
                )
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("% of a copy" if "tb_per_s" in str(part) else "% of a matrix product", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid):
        axes.set_visible(False)
    figure.suptitle(machine["name"].partition(",")[0], fontsize=11)
    figure.savefig(path)
