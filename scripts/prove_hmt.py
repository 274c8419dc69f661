"""Train and evaluate HMT and its baselines on a recall task over segments, on one CPU core.

    python -m scripts.prove_hmt --small     # 4 of the runs, 10 minutes of one core
    python -m scripts.prove_hmt [--seeds 0 1 2]

A tiny Llama learns `RecallTask` (facts, one per segment, then questions about them) from scratch in two stages, as in
the paper: without recall on one fact and one question, until it answers 95 % of them, then with recall on two or four
facts and two questions. It is evaluated on sequences of 2 to 64 facts. The baselines are a sliding attention window
with as many positions as HMT sees at a time, full attention, and RMT (one and four memory tokens, no recall). The last
two train on two facts until they answer 95 % of the questions. Each stage is limited to four rounds of steps. The
single-pass mode is also trained with a recall after a quarter of each segment, instead of the default half.

Three settings make the task harder: less filler that repeats a segment's key (`topic`), noise segments between facts
and questions, and more facts. On the *leak* task the answer comes before the question: accuracy above one in the
number of facts means that a model has read ahead.

Each trained HMT is also evaluated with two controls: with the recall forced to the fact's segment ("oracle recall":
remaining errors come from writing and reading, not from the search), and with another sequence's memories ("shuffled
memories": correct answers do not come from memories). One mode is also evaluated with four memories, without and with
pages.

Results are written to scripts/results/hmt_recall.json and a figure; with --small, to demo_output/prove_hmt. Completed
runs are skipped: the same command resumes after an interruption, and other seeds add rows to the same file.
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.utils import logging

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.metrics.result import commit
from scripts.bench import common
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import PICTURES
from scripts.recall_task import RecallTask


METHODS = {  # fields of HMTConfig in stage 2, in the order of the runs
    "HMT, single pass": {"recall_mode": "single_pass"},
    "HMT, single pass, no recurrence": {"recall_mode": "single_pass", "recurrence": False},
    "window": None,
    "RMT": {"recall": False, "recall_mode": "paper"},
    "RMT, 4 tokens": {"recall": False, "recall_mode": "paper", "memory_tokens": 4},
    "full attention": None,
    "HMT, paper": {"recall_mode": "paper"},
    "HMT, single pass, j = L'/4": {"recall_mode": "single_pass", "sum_fraction": 0.25},
}
SMALL = common.ROOT / "demo_output" / "prove_hmt"  # where --small writes
LEFT_OUT = ("RMT, 4 tokens", "full attention", "HMT, paper", "HMT, single pass, j = L'/4")  # by --small
UNTIL_SOLVED = ("RMT", "RMT, 4 tokens", "full attention")
SMALL_MEMORY = {  # fields that are changed in the trained single-pass mode
    "4 memories": {"memory_size": 4},
    "4 memories and pages": {"memory_size": 4, "recalled_pages": 4, "page_size": 1},
}
FACTS = (2, 4, 8, 16, 32, 64)
READS = 2  # questions per sequence from stage 2 on
SOLVED = 0.95  # accuracy
ANSWER_AT = {"recall": 13, "leak": 2}
CONDITIONS = {  # (task, topic, noise segments): title; the most informative one first
    ("recall", 0.6, 0): "The answer after the question",
    ("leak", 0.6, 0): "The answer before the question",
    ("recall", 0.6, 3): "Three segments of noise before the questions",
    ("recall", 0.2, 0): "Keys are a fifth of the filler",
    ("recall", 0.2, 3): "Keys are a fifth of the filler, and three segments of noise",
}
PLOTTED = {  # lines of the figure: labels
    "HMT, single pass": "HMT, single pass",
    "HMT, paper": "HMT as published",
    "RMT": "RMT",
    "window": "window",
    "full attention": "full attention",
    "HMT, single pass: shuffled memories": "memories of another text",
}
HEADINGS = ("after the question", "before the question", "noise", "rare keys", "rare keys and noise")


class Run(NamedTuple):
    task: str
    topic: float
    noise_segments: int
    seed: int
    method: str

    def recall_task(self, recipe):
        sizes = {"keys": recipe.keys, "topic": self.topic, "noise_segments": self.noise_segments}
        return RecallTask(answer_at=ANSWER_AT[self.task], **sizes)


@dataclass(frozen=True)
class Recipe:
    """The sizes and steps of all runs."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    keys: int = 64
    sensory_tokens: int = 2
    stage_1_steps: int = 200
    stage_2_steps: int = 700
    stage_2_writes: tuple[int, ...] = (2, 4)  # numbers of facts, alternating
    rounds: int = 4  # maximum rounds of a stage's steps until its task is solved
    batch: int = 32
    learning_rate: float = 2e-3
    texts: int = 128


def list_runs(seeds, small):
    """Return all runs, most informative first."""
    if small:
        return [Run("recall", 0.6, 0, seeds[0], method) for method in METHODS if method not in LEFT_OUT]
    runs = [Run(*x, seed, method) for x, seed, method in itertools.product(CONDITIONS, seeds, METHODS)]
    # methods that train longest come last: they fail on the easiest task, so harder tasks add little information
    return sorted(runs, key=lambda run: run.method in UNTIL_SOLVED and (run.topic, run.noise_segments) != (0.6, 0))


# Training.


def new_model(run, task, recipe):
    """Return the untrained model of stage 1."""
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
    if run.method == "window":
        window = HMTConfig(**hmt, recall_mode="single_pass").positions_per_segment
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    backbone = LlamaForCausalLM(LlamaConfig(**sizes))
    if run.method == "full attention":
        return backbone
    return HMTWrapper.from_backbone(backbone, HMTConfig(**hmt, **METHODS[run.method] | {"recall": False}))


def train(model, task, writes, reads, steps, recipe, generator):
    """Train on the answers, with each number of facts in `writes` in turn.

    AdamW with 50 steps of warm-up, then linear decay of the learning rate to a tenth; gradients are clipped at 1.
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


def trained(run, recipe):
    """Train both stages, and return the model and the steps of each stage."""
    torch.manual_seed(run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    task = run.recall_task(recipe)
    first = Run(run.task, run.topic, 0, run.seed, run.method).recall_task(recipe)
    solvable = run.task == "recall"
    model = new_model(run, task, recipe)
    steps = [train_rounds(model, first, (1,), 1, recipe.stage_1_steps, solvable, run, recipe, generator)]
    if run.method.startswith("HMT"):
        with tempfile.TemporaryDirectory() as folder:  # stage 2 starts from the checkpoint of stage 1
            model.save_pretrained(folder)
            model = HMTWrapper.from_pretrained(folder, recall=True)
    until_solved = solvable and run.method in UNTIL_SOLVED
    writes = (2,) if until_solved else recipe.stage_2_writes
    steps += [train_rounds(model, task, writes, READS, recipe.stage_2_steps, until_solved, run, recipe, generator)]
    return model, steps


def train_rounds(model, task, writes, reads, steps, until_solved, run, recipe, generator):
    """Train for one round of `steps`, or until the smallest number of facts is solved; return the steps."""
    done = 0
    for _ in range(recipe.rounds):
        train(model, task, writes, reads, steps, recipe, generator)
        done += steps
        if not until_solved or ask(model, task, writes[0], run, recipe, reads=reads)[0] >= SOLVED:
            break
    return done


# Evaluating.


@torch.no_grad()
def ask(model, task, writes, run, recipe, control=None, reads=READS):
    """Return the accuracy (argmax over the vocabulary), and the share of recalls with most weight at the fact.

    Args:
        control: one of `CONTROLS`. The second value is None without recall, or with a control.
    """
    generator = torch.Generator().manual_seed(1000 + run.seed)
    texts = task.sample(writes, reads, recipe.texts, generator)
    first_question = writes + task.noise_segments
    right, hits = [], []
    for ids, labels, facts in zip(*(x.split(64) for x in texts)):
        if control is None:
            recalls = isinstance(model, HMTWrapper) and model.config.recall
            out = model(input_ids=ids, **{"output_recall": True} if recalls else {})
            if recalls:
                distances = out.recall_distance[-reads:].T  # (rows, reads)
                hits.append(distances == first_question + torch.arange(reads) - facts)
        else:
            with changed_recall(model, control, facts, first_question):
                out = model(input_ids=ids)
        answers = labels[:, 1:] != -100
        right.append((out.logits[:, :-1].argmax(-1) == labels[:, 1:])[answers])
    return torch.cat(right).float().mean().item(), torch.cat(hits).float().mean().item() if hits else None


def oracle_recall(recall, query, bank, valid, facts, first_question):
    """Force every question to recall its fact's memory."""
    question = bank.shape[1] - first_question
    if question < 0:
        return recall(query, bank, valid)
    weights = F.one_hot(facts[:, question], bank.shape[1]).to(bank)
    return weights[:, None] @ bank, weights


def shuffled_memories(recall, query, bank, valid, facts, first_question):
    """Force every sequence to recall from another sequence's memories."""
    return recall(query, bank.roll(1, 0), valid)


CONTROLS = {"oracle recall": oracle_recall, "shuffled memories": shuffled_memories}


@contextmanager
def changed_recall(model, control, facts, first_question):
    """Replace `HMTMemory.recall` with a control, for one call that starts at the beginning of a sequence."""
    recall = model.memory.recall
    model.memory.recall = lambda query, bank, valid: control(recall, query, bank, valid, facts, first_question)
    try:
        yield
    finally:
        del model.memory.recall  # restore the class's method


def measure(run, recipe):
    """Train and evaluate one model, and return its result row."""
    begin = time.process_time()
    model, (first_steps, steps) = trained(run, recipe)
    row = run._asdict() | {
        "commit": commit(common.ROOT),  # rows of older commits stay
        "first_steps": first_steps,
        "steps": steps,
        "training_cpu_seconds": round(time.process_time() - begin, 1),
    }
    task = run.recall_task(recipe)

    def ask_all(control=None):
        return {str(writes): ask(model, task, writes, run, recipe, control) for writes in FACTS}

    shares = ask_all()
    row["accuracy"] = {writes: share for writes, (share, _) in shares.items()}
    if run.method.startswith("HMT"):
        row["hits"] = {writes: share for writes, (_, share) in shares.items()}
        controls = {name: ask_all(control) for name, control in CONTROLS.items()} if run.task == "recall" else {}
        if (run.task, run.topic, run.noise_segments, run.method) == ("recall", 0.6, 0, "HMT, single pass"):
            for name, changes in SMALL_MEMORY.items():
                model.config.update(changes)
                controls[name] = ask_all()
        row["controls"] = {
            name: {writes: share for writes, (share, _) in shares.items()} for name, shares in controls.items()
        }
    return row | {"cpu_seconds": round(time.process_time() - begin, 1)}


# The result.


def prove(result, output, runs, recipe):
    """Run whatever is missing in `output`, and save after each run.

    Raises:
        ValueError: `output` contains runs of another recipe.
    """
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # no warning about the parameters that stage 2 adds
    logging.disable_progress_bar()
    result["settings"] = json.loads(json.dumps(asdict(recipe)))
    if output.exists():
        before = json.loads(output.read_text())
        if before["settings"] != result["settings"]:
            raise ValueError(f"{output} holds runs of another recipe, {before['settings']}. Choose another --output.")
        result["rows"] = before["rows"]
    done = {run_of(row) for row in result["rows"]}
    for run in runs:
        if run not in done:
            result["rows"].append(measure(run, recipe))
            common.save(output, result)
            print(result["rows"][-1], file=sys.stderr, flush=True)
    return result


def run_of(row):
    return Run(*(row[name] for name in Run._fields))


def series(rows):
    """Return {method or control: {number of facts: [share for each seed]}}."""
    shares = {}
    for row in sorted(rows, key=lambda row: list(METHODS).index(row["method"])):
        several = {
            row["method"]: row["accuracy"],
            **{f"{row['method']}: {x}": y for x, y in row.get("controls", {}).items()},
        }
        for name, accuracy in several.items():
            for facts, share in accuracy.items():
                shares.setdefault(name, {}).setdefault(int(facts), []).append(share)
    return shares


def table(result):
    s = result["settings"]
    most = FACTS[-1]
    text = (
        f"{s['layers']} layers of width {s['hidden_size']}. Share of right answers among {most} facts, mean over seeds; "
        "chance is 1 in 16. The columns are the panels of the figure."
    )
    lines = {}
    for condition, heading in zip(CONDITIONS, HEADINGS):
        rows = [row for row in result["rows"] if run_of(row)[:3] == condition]
        for name, shares in series(rows).items():
            if ":" in name and name.partition(":")[0] != "HMT, single pass":
                continue
            line = lines.setdefault(name, {"name": name})
            line[heading.replace(" ", "_")] = statistics.mean(shares[most])
    cells = " | ".join(f"{{{heading.replace(' ', '_')}:.2f}}" for heading in HEADINGS)
    form = f"""
    | model | {" | ".join(HEADINGS)} |
    | {{name}} | {cells} |
    """
    return f"{text}\n\n{common.markdown(list(lines.values()), form)}"


def draw(result, path):
    """Plot accuracy over the number of facts, with one panel per condition."""
    panels = {}
    for condition, heading in CONDITIONS.items():
        shares = series([row for row in result["rows"] if run_of(row)[:3] == condition])
        if shares:
            panels[heading] = [
                Line(label, list(shares[name]), list(shares[name].values()), control=":" in name)
                for name, label in PLOTTED.items()
                if name in shares
            ]
    draw_panels(
        path,
        "HMT finds a fact among many; the baselines guess",
        panels,
        across="facts in the sequence",
        up="right answers",
        notes="areas: range over seeds",
        percent=True,
        log="x",
        ticks={facts: str(facts) for facts in FACTS},
    )


def main(arguments=None):
    parser = common.make_parser("scripts.prove_hmt", __doc__, "hmt_recall", seeds=[0, 1, 2])
    parser.add_argument("--small", action="store_true", help="run a few models with one seed, on the first task")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="figure (default: model_cards/evidence/hmt_recall.png)"
    )
    args = parser.parse_args(arguments)
    if args.small:
        SMALL.mkdir(parents=True, exist_ok=True)
        args.output = args.output or SMALL / "hmt_recall.json"
    args.picture = args.picture or (SMALL if args.small else PICTURES) / "hmt_recall.png"
    if args.table is not None:
        result = json.loads(args.table.read_text())
    else:
        result = common.describe_run(parser, args, arguments)
        prove(result, args.output, list_runs(args.seeds, args.small), Recipe())
    draw(result, args.picture)
    print(f"`{result['command']}` on {common.place(result)}\n\n{table(result)}")


if __name__ == "__main__":
    main()
