"""Train and evaluate HMT and its baselines on a recall task over segments, on one CPU core.

    python -m scripts.prove_hmt [--seeds 0 1 2] [--methods "HMT, single pass" window RMT]

A tiny Llama learns `RecallTask` (facts, one per segment, then questions about them) from scratch in two stages, as in
the paper: without recall on one fact and one question, until it answers 95 % of them, then with recall on two or four
facts and two questions. It is evaluated on sequences of 2 to 64 facts. The baselines are a sliding attention window
with as many positions as HMT attends to, full attention, and RMT (one and four memory tokens, no recall). The last
two train on two facts until they answer 95 % of the questions. Each stage is limited to four rounds of steps.

Each trained HMT is also evaluated with two controls: with the recall forced to the fact's segment ("oracle recall":
remaining errors come from writing and reading, not from the search), and with another sequence's memories ("shuffled
memories": correct answers do not come from memories). One mode is also evaluated with four memories. Finished models
are saved, and the same command resumes.
"""

import itertools
import statistics
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.utils import logging

from hf_longctx.hmt import HMTConfig, HMTWrapper
from scripts.bench import common
from scripts.evidence.parts import make_parser, measure_parts


METHODS = {  # fields of HMTConfig in stage 2
    "HMT, single pass": {"recall_mode": "single_pass"},
    "window": None,
    "RMT": {"recall": False, "recall_mode": "paper"},
    "RMT, 4 tokens": {"recall": False, "recall_mode": "paper", "memory_tokens": 4},
    "full attention": None,
    "HMT, paper": {"recall_mode": "paper"},
}
UNTIL_SOLVED = ("RMT", "RMT, 4 tokens", "full attention")
SMALL_MEMORY = 4  # memory size of an additional evaluation of the single-pass mode
FACTS = (2, 4, 8, 16, 32, 64)
READS = 2  # questions per sequence from stage 2 on
SOLVED = 0.95  # accuracy
SIZES = {
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "keys": 64,
    "sensory_tokens": 2,
    "stage_1_steps": 200,
    "stage_2_steps": 700,
    "stage_2_writes": [2, 4],  # numbers of facts, alternating
    "rounds": 4,  # maximum rounds of a stage's steps until its task is solved
    "batch": 32,
    "learning_rate": 2e-3,
    "texts": 128,
}
TABLE = f"""
| model | {" | ".join(f"{facts} facts" for facts in FACTS)} |
| {{name}} | {" | ".join(f"{{of{facts}:.2f}}" for facts in FACTS)} |
"""
WRITE, READ, ANSWER = 1, 2, 3  # 0 is padding
FIRST_KEY = 4
ANSWER_AT = 13  # beyond the first half of a segment, which the published recall reads before predicting it
TOPIC = 0.6  # share of the filler that repeats the segment's key; the rest is noise


@dataclass(frozen=True)
class RecallTask:
    """A synthetic memory task: facts, one per segment, followed by questions about them.

        write   [W key value  filler ...]
        read    [R key  filler ...  A value  filler ...]

    Most filler tokens repeat the segment's key, as a document repeats its topic words, so that a summary of a few
    tokens shows the topic. The keys of a sequence differ. Questions draw keys with replacement; otherwise a model
    could answer by elimination. Without memory, accuracy is at most one in the number of facts.

    Args:
        keys: number of distinct keys, an upper bound on the facts per sequence.
        segment_length: tokens per fact or question.
        values: number of distinct values.
        noise: number of distinct noise tokens.
    """

    keys: int
    segment_length: int = 16
    values: int = 16
    noise: int = 28

    @property
    def vocab_size(self) -> int:
        return FIRST_KEY + self.keys + self.values + self.noise

    def sample(self, writes, reads, rows, generator):
        """Return random sequences of `writes` facts and `reads` questions.

        Args:
            writes: facts per sequence, 1 to `keys`.
            reads: questions per sequence.
            rows: number of sequences.
            generator: `torch.Generator`.

        Returns:
            ids (rows, (writes + reads) * segment_length), long; labels of the same shape, -100 except for the answers;
            question_facts (rows, reads), long, the fact of each question.
        """

        def draw(low, count, *shape):
            return low + torch.randint(count, shape, generator=generator)

        order = torch.rand(rows, self.keys, generator=generator).argsort(1)
        key, value = FIRST_KEY + order[:, :writes], draw(FIRST_KEY + self.keys, self.values, rows, writes)
        question_facts = draw(0, writes, rows, reads)
        key, value = (torch.cat([x, x.gather(1, question_facts)], 1) for x in (key, value))  # (rows, segments)

        shape = rows, writes + reads, self.segment_length
        noise = draw(FIRST_KEY + self.keys + self.values, self.noise, *shape)
        ids = torch.where(torch.rand(shape, generator=generator) < TOPIC, key[..., None], noise)
        fact, question = ids[:, :writes], ids[:, writes:]
        fact[..., 0], fact[..., 1], fact[..., 2] = WRITE, key[:, :writes], value[:, :writes]
        question[..., 0], question[..., 1] = READ, key[:, writes:]
        question[..., ANSWER_AT - 1], question[..., ANSWER_AT] = ANSWER, value[:, writes:]
        labels = torch.full_like(ids, -100)
        labels[:, writes:, ANSWER_AT] = value[:, writes:]
        return ids.flatten(1), labels.flatten(1), question_facts


# Training.


def new_model(method, task, args):
    """Return the untrained model of stage 1."""
    sizes = dict(
        vocab_size=task.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        initializer_range=0.1,
    )
    hmt = dict(segment_length=task.segment_length, sensory_tokens=args.sensory_tokens, summary_batch=1024)
    if method == "window":
        window = HMTConfig(**hmt, recall_mode="single_pass").positions_per_segment
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    backbone = LlamaForCausalLM(LlamaConfig(**sizes))
    if method == "full attention":
        return backbone
    return HMTWrapper.from_backbone(backbone, HMTConfig(**hmt, **METHODS[method] | {"recall": False}))


def train(model, task, writes, reads, steps, args, generator):
    """Train on the answers, with each number of facts in `writes` in turn.

    AdamW with 50 steps of warm-up, then linear decay of the learning rate to a tenth; gradients are clipped at 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1 - 0.9 * max(0, step - 50) / max(1, steps - 50))
    )
    model.train()
    for step in range(steps):
        ids, labels, _ = task.sample(writes[step % len(writes)], reads, args.batch, generator)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def trained(method, seed, task, args):
    """Train both stages, and return the model and the steps of each stage."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = new_model(method, task, args)
    steps = [train_rounds(model, task, (1,), 1, args.stage_1_steps, True, seed, args, generator)]
    if method.startswith("HMT"):
        with tempfile.TemporaryDirectory() as folder:  # stage 2 starts from the checkpoint of stage 1
            model.save_pretrained(folder)
            model = HMTWrapper.from_pretrained(folder, recall=True)
    until_solved = method in UNTIL_SOLVED
    writes = (2,) if until_solved else args.stage_2_writes
    steps += [train_rounds(model, task, writes, READS, args.stage_2_steps, until_solved, seed, args, generator)]
    return model, steps


def train_rounds(model, task, writes, reads, steps, until_solved, seed, args, generator):
    """Train for one round of `steps`, or until the smallest number of facts is solved; return the steps."""
    done = 0
    for _ in range(args.rounds):
        train(model, task, writes, reads, steps, args, generator)
        done += steps
        if not until_solved or ask(model, task, writes[0], seed, args, reads=reads)[0] >= SOLVED:
            break
    return done


# Evaluating.


@torch.no_grad()
def ask(model, task, writes, seed, args, control=None, reads=READS):
    """Return the accuracy (argmax over the vocabulary), and the share of recalls with most weight at the fact.

    Args:
        control: one of `CONTROLS`. The second value is None without recall, or with a control.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    texts = task.sample(writes, reads, args.texts, generator)
    right, hits = [], []
    for ids, labels, facts in zip(*(x.split(64) for x in texts)):
        if control is None:
            recalls = isinstance(model, HMTWrapper) and model.config.recall
            out = model(input_ids=ids, **{"output_recall": True} if recalls else {})
            if recalls:
                distances = out.recall_distance[-reads:].T  # (rows, reads)
                hits.append(distances == writes + torch.arange(reads) - facts)
        else:
            with changed_recall(model, control, facts, writes):
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


def one_model(method, seed, args):
    """Train and evaluate one model, and return its result row."""
    begin, task = time.process_time(), RecallTask(args.keys)
    model, (first_steps, steps) = trained(method, seed, task, args)
    row = {"method": method, "seed": seed, "first_steps": first_steps, "steps": steps, "controls": {}}

    def ask_all(control=None):
        return {str(facts): ask(model, task, facts, seed, args, control) for facts in FACTS}

    def accuracy(shares):
        return {facts: share for facts, (share, _) in shares.items()}

    shares = ask_all()
    row["accuracy"] = accuracy(shares)
    if method.startswith("HMT"):
        row["hits"] = {facts: share for facts, (_, share) in shares.items()}
        row["controls"] = {name: accuracy(ask_all(control)) for name, control in CONTROLS.items()}
    if method == "HMT, single pass":
        model.configure(memory_size=SMALL_MEMORY)
        row["controls"][f"{SMALL_MEMORY} memories"] = accuracy(ask_all())
    return row | {"cpu_seconds": round(time.process_time() - begin, 1)}


def measure(args):
    logging.set_verbosity_error()  # no warning about the parameters that stage 2 adds
    yield from measure_parts(one_model, itertools.product(args.methods, args.seeds), args)


def table(result):
    s, lines = result["settings"], {}
    for row in sorted(result["rows"], key=lambda row: list(METHODS).index(row["method"])):
        controls = {f"{row['method']}: {name}": shares for name, shares in row.get("controls", {}).items()}
        for name, shares in ({row["method"]: row["accuracy"]} | controls).items():
            line = lines.setdefault(name, {f"of{facts}": [] for facts in shares})
            for facts, share in shares.items():
                line[f"of{facts}"].append(share)
    rows = [
        {"name": name} | {column: statistics.mean(x) for column, x in line.items()} for name, line in lines.items()
    ]
    text = (
        f"{s['layers']} layers of width {s['hidden_size']}. Share of right answers for each number of facts, mean over "
        "seeds; chance is 1 in 16."
    )
    return f"{text}\n\n{common.markdown(rows, TABLE)}"


def main(arguments=None):
    options = SIZES | {"seeds": [0, 1, 2], "methods": list(METHODS), "device": "cpu"}
    common.run(make_parser(__spec__.name, __doc__, "hmt_recall", **options), measure, table, arguments)


if __name__ == "__main__":
    main()
