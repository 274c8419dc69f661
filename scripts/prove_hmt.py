"""Does HMT remember? A recall task over segments, on one CPU core in minutes.

    python -m scripts.prove_hmt [--out FOLDER] [--seeds 0 1]

A tiny Llama learns `RecallTask` (facts, one to a segment, then questions about them) from scratch in two stages, as
in the paper: without recall on one fact and one question, then with recall on two or four facts and two questions. It
is then evaluated on texts of 2, 4, 8 or 16 facts. Compared are HMT in both recall modes, RMT (one and four memory
tokens, no recall) and a sliding attention window of as many positions as HMT sees at a time. On the *leak* task the
answer comes before the question: accuracy above 1 / W there means that the model has read ahead.

The trained causal model is also evaluated with room for four memories only, and with pages for the others.

Results are hmt_recall.json and hmt_recall.png. Every finished run is kept in a journal in --work and not repeated, so
that the same command continues after an interruption.
"""

import argparse
import json
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.utils import logging

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.hmt.pictures import draw_recall_distance
from hf_longctx.metrics import Journal
from hf_longctx.training.recall_task import RecallTask


ROOT = Path(__file__).resolve().parents[1]
TASKS = {"recall": RecallTask(answer_at=13), "leak": RecallTask(answer_at=2)}
METHODS = {  # arguments of HMTConfig in stage 2; None is the window
    "window": None,
    "RMT": {"recall": False},
    "RMT, 4 tokens": {"recall": False, "memory_tokens": 4},
    "HMT, paper": {"recall_mode": "paper"},
    "HMT, causal": {"recall_mode": "causal"},
}
RUNS = [("recall", method) for method in METHODS] + [("leak", "HMT, paper"), ("leak", "HMT, causal")]
SMALL_MEMORY = {  # changes to the trained causal model, whose memory then holds less than the text
    "N = 4": {"memory_size": 4},
    "N = 4 and pages": {"memory_size": 4, "recalled_pages": 4, "page_size": 1},
}
DISTANCES = (2, 4, 8, 16)
READS = 2  # questions per text from stage 2 on


@dataclass(frozen=True)
class Recipe:
    """Sizes and steps, on which all results depend."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    sensory_tokens: int = 2
    stage_1_steps: int = 200
    stage_2_steps: int = 350
    stage_2_writes: tuple[int, ...] = (2, 4)  # in turns
    batch: int = 32
    learning_rate: float = 2e-3
    evaluated: int = 256


def train(model, task, writes, reads, steps, recipe, generator):
    """Train on the answers, with each number of facts in `writes` in turn.

    AdamW, 50 steps of warm-up, then linear decay of the learning rate to a tenth; gradients are clipped at 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1 - 0.9 * max(0, step - 50) / max(1, steps - 50))
    )
    model.train()
    for step in range(steps):
        ids, labels, _ = task.sample(writes[step % len(writes)], reads, recipe.batch, generator)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracies(model, task, recipe, seed):
    """Number of facts to the share of answers that are the arg-max over the whole vocabulary."""
    shares = {}
    for writes in DISTANCES:
        generator = torch.Generator().manual_seed(1000 + seed)
        ids, labels, _ = task.sample(writes, READS, recipe.evaluated, generator)
        answers = labels[:, 1:] != -100
        predicted = model(input_ids=ids).logits[:, :-1].argmax(-1)
        shares[str(writes)] = (predicted == labels[:, 1:])[answers].float().mean().item()
    return shares


@torch.no_grad()
def distances(model, task, writes, recipe, seed):
    """Segments from the question of each text back to the segment with the largest recall weight, and to its fact."""
    generator = torch.Generator().manual_seed(2000 + seed)
    ids, _, facts = task.sample(writes, 1, recipe.evaluated, generator)
    recalled = model(input_ids=ids, output_recall=True).recall_distance[-1]
    return recalled.tolist(), (writes - facts[:, 0]).tolist()


def build(method, task, recipe):
    """The untrained model of stage 1."""
    settings = METHODS[method]
    sizes = dict(
        vocab_size=task.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        initializer_range=0.1,
    )
    hmt = dict(segment_length=task.segment_length, sensory_tokens=recipe.sensory_tokens, summary_batch=1024)
    if settings is None:
        window = HMTConfig(**hmt).positions_per_segment
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    config = HMTConfig(**hmt, **{**settings, "recall": False})
    return HMTWrapper.from_backbone(LlamaForCausalLM(LlamaConfig(**sizes)), config)


def run(task_name, method, seed, recipe):
    """Train in two stages and measure; one entry of the results."""
    task, settings = TASKS[task_name], METHODS[method]
    start = time.process_time()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = train(build(method, task, recipe), task, (1,), 1, recipe.stage_1_steps, recipe, generator)
    if settings is not None and settings.get("recall", True):
        with tempfile.TemporaryDirectory() as folder:  # stage 2 starts from the checkpoint of stage 1
            model.save_pretrained(folder)
            model = HMTWrapper.from_pretrained(folder, recall=True)
    model = train(model, task, recipe.stage_2_writes, READS, recipe.stage_2_steps, recipe, generator)
    seconds = round(time.process_time() - start, 1)

    entry = {"task": task_name, "method": method, "seed": seed, "training_cpu_seconds": seconds}
    entry["accuracy"] = accuracies(model, task, recipe, seed)
    if (task_name, method) == ("recall", "HMT, causal"):
        entry["looked"], entry["expected"] = distances(model, task, DISTANCES[-1], recipe, seed)
        entry["small_memory"] = {}
        for name, changes in SMALL_MEMORY.items():
            model.config.update(changes)
            entry["small_memory"][name] = accuracies(model, task, recipe, seed)
    return entry


def prove(out, work, seeds, recipe):
    """Do the runs that are missing in the journal, then write and draw all runs."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # no warning about the parameters that stage 2 adds
    logging.disable_progress_bar()
    with Journal(work / "hmt_recall.jsonl", {"recipe": asdict(recipe)}) as journal:
        keys = [(task_name, method, seed) for seed in seeds for task_name, method in RUNS]
        for key in keys:
            if key not in journal.done:
                journal.append(key, run(*key, recipe))
                print(format_entry(journal.done[key]), flush=True)
        runs = [journal.done[key] for key in keys]
    out.mkdir(parents=True, exist_ok=True)
    machine = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1}
    results = machine | {"recipe": asdict(recipe), "runs": runs}
    (out / "hmt_recall.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(runs, out / "hmt_recall.png")
    return runs


def format_entry(entry):
    shares = " ".join(f"{writes}:{share:.3f}" for writes, share in entry["accuracy"].items())
    small = "".join(f"  {name} {list(a.values())}" for name, a in entry.get("small_memory", {}).items())
    seconds = entry["training_cpu_seconds"]
    return f"{entry['task']:7}{entry['method']:15}seed {entry['seed']}  {shares}  {seconds} s{small}"


def draw(runs, path):
    """Accuracy over the number of facts for both tasks, means over seeds, and the distances of recall."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    axes = dict(zip((*TASKS, "distance"), figure.subplots(1, 3)))
    for task_name in TASKS:
        ax = axes[task_name]
        ax.set_title({"recall": "Answer after the question", "leak": "Answer before the question"}[task_name])
        ax.plot(DISTANCES, [1 / w for w in DISTANCES], ":", color="grey", label="one of W")
        for i, method in enumerate(METHODS):
            entries = [r for r in runs if (r["task"], r["method"]) == (task_name, method)]
            draw_accuracies(ax, [r["accuracy"] for r in entries], "o-", f"C{i}", method)
            for name, style in zip(SMALL_MEMORY, (":", "--")):
                small = [r["small_memory"][name] for r in entries if "small_memory" in r]
                draw_accuracies(ax, small, style, f"C{i}", f"{method}, {name}")
        ax.set(xscale="log", xlabel="W, facts in the text", ylabel="accuracy", ylim=(0, 1.03))
        ax.set_xticks(DISTANCES, [str(w) for w in DISTANCES])
        ax.minorticks_off()
        ax.legend(fontsize="small")
    looked, expected = ([d for r in runs for d in r.get(name, ())] for name in ("looked", "expected"))
    title = f"HMT, causal: recall among {DISTANCES[-1]} facts"
    draw_recall_distance(axes["distance"], looked, expected=expected, title=title)
    figure.savefig(path, dpi=110)


def draw_accuracies(axes, entries, style, colour, label):
    if entries:
        means = [sum(shares[str(w)] for shares in entries) / len(entries) for w in DISTANCES]
        axes.plot(DISTANCES, means, style, color=colour, label=label)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "model_cards" / "evidence", metavar="FOLDER")
    parser.add_argument("--work", type=Path, default=ROOT / "demo_output", metavar="FOLDER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    prove(args.out, args.work, args.seeds, Recipe())


if __name__ == "__main__":
    main()
