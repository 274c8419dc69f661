"""Retrieval of SmolLM2-135M, whose RoPE base lies below the bound for its context, and of another base.

    python -m scripts.fetch_model smollm2-135m && python -m scripts.demo_corpus demo_output/corpus
    python -m scripts.evidence.rope_smollm2 [--steps 8] [--lines 5 20 80] [--needles 1024 2048 4096]
    python -m scripts.evidence.rope_smollm2 --device cuda --steps 200 --length 8192 --needles 2048 4096 8192

Numbers of lines (LongEval), needles in a held-out novel and its loss are read with the base of the model; with the one
that `hf-longctx finetune --recipe rope-extend` takes for the context that the model claims; and, with --steps, after a
training with either base on the same rows of --length tokens: of norms, embeddings and LoRA, as that recipe trains.
Answers count if they are given token for token. The models are read in bfloat16.
"""

import subprocess
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import load_tokens
from hf_longctx.metrics import Run, line_retrieval, needle_in_a_haystack, position_loss, rope_report
from hf_longctx.training.config import FinetuneConfig
from hf_longctx.training.models import extend_rope
from scripts.bench import common
from scripts.evidence.parts import make_parser, measure_parts, require
from scripts.fetch_model import SMOLLM2


TEXT = common.ROOT / "demo_output" / "corpus"
DEPTHS = (0.0, 0.5, 1.0)
TRAINED = {"other base, trained": "other base", "as it is, trained": "as it is"}
IN_FULL = ["norm", "input_layernorm", "post_attention_layernorm", "embed_tokens"]
TABLE = """
| model | base | {headings} |
| {{model}} | {{base:.0f}} | {cells} |
"""


def model_folder(name, args):
    """SmolLM2 as it is; with the other base, made here; or what was trained of one of these."""
    folder = args.work / "rope_smollm2" / name.replace(", ", "_").replace(" ", "_")
    if name in TRAINED:
        return folder / "model"
    if name == "as it is":
        return SMOLLM2
    if not folder.exists():
        folder.mkdir(parents=True)
        for file in SMOLLM2.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        config = AutoConfig.from_pretrained(SMOLLM2)
        extend_rope(config, FinetuneConfig(model=str(SMOLLM2), data="-", output_dir="-", max_length=args.length))
        config.save_pretrained(folder)
    return folder


def train(name, args):
    """Fine-tune by the command, which goes on where it was interrupted."""
    command = [sys.executable, "-m", "hf_longctx", "finetune", "--model", model_folder(TRAINED[name], args), "--merge"]
    command += ["--lora_modules_to_save", *IN_FULL, "--lora_target_modules", "all-linear"]
    options = {"--data": TEXT / "train", "--max_length": args.length, "--gradient_accumulation_steps": 1}
    options |= {"--max_steps": args.steps, "--learning_rate": args.learning_rate, "--dtype": "float32"}
    options |= {"--save_steps": max(1, args.steps // 3), "--use_cpu": args.device == "cpu", "--bf16": "true"}
    options |= {"--output_dir": model_folder(name, args).parent}
    subprocess.run([*map(str, command), *(str(x) for option in options.items() for x in option)], check=True)


def lines(model, tokenizer, size, args, run):
    (point,) = line_retrieval(model, tokenizer, lines=[size], repeats=args.repeats, replies=False, run=run).points
    right = round(point.exact_rate * len(point.answers))
    return {
        "tokens": point.mean_tokens,
        "right": right,
        "answers": len(point.answers),
        "probability": point.probability,
    }


def needles(model, tokenizer, size, args, run):
    tokens = load_tokens(tokenizer, str(TEXT / "held_out.txt")).tokens
    grid = needle_in_a_haystack(
        model,
        tokenizer,
        tokens,
        lengths=[size],
        depths=DEPTHS,
        mode="easy",
        repeats=args.haystacks,
        replies=False,
        run=run,
    )
    right = {f"d{cell.depth:.0%}".strip("%"): round(cell.exact_rate * args.haystacks) for cell in grid.cells}
    probability = sum(cell.probability for cell in grid.cells) / len(grid.cells)
    return right | {"answers": args.haystacks, "probability": probability}


def losses(model, tokenizer, size, args, run):
    tokens = load_tokens(tokenizer, str(TEXT / "held_out.txt")).tokens
    loss = position_loss(model, tokens, context_length=size, sequences=args.haystacks, run=run).loss
    return {"first": sum(loss[: size // 2]) / (size // 2), "second": sum(loss[size // 2 :]) / (size - size // 2)}


KINDS = {"lines": lines, "needles": needles, "loss": losses}


def one_part(kind, name, size, args):
    folder = model_folder(name, args)
    if name in TRAINED and not folder.exists():
        train(name, args)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(args.device).eval()
    base = model.config.rope_parameters["rope_theta"]
    # what a part has measured is kept, too, as one of 8192 tokens takes minutes
    run = Run(journal=args.work / "rope_smollm2" / f"{name} {kind} {size}.jsonl")
    measured = KINDS[kind](model, AutoTokenizer.from_pretrained(SMOLLM2), size, args, run)
    return {"kind": kind, "model": name, "base": base, "size": size, **measured}


def measure(args):
    require(SMOLLM2, TEXT)
    report = rope_report(AutoConfig.from_pretrained(SMOLLM2))
    (group,) = report.groups
    yield {"kind": "verdict", "verdict": report.verdict, "claimed": report.claimed_context, "base": group.base,
           "reach": group.context_bound, "minimum_base": group.minimum_base}  # fmt: skip
    sizes = {"lines": args.lines, "needles": args.needles, "loss": args.needles[-1:]}
    names = ["as it is", "other base", *(TRAINED if args.steps else ())]
    keys = [(kind, name, size) for name in names for kind in KINDS for size in sizes[kind]]
    yield from measure_parts(one_part, keys, args)


def table(result):
    in_order = sorted(result["rows"], key=lambda row: row.get("size", 0))
    rows = {kind: [row for row in in_order if row["kind"] == kind] for kind in ("verdict", *KINDS)}
    s, verdict = result["settings"], rows["verdict"][0]
    text = (
        f"The verdict of `hf-longctx rope`: {verdict['verdict']}. The model claims {verdict['claimed']} tokens with base "
        f"{verdict['base']:.0f}, which reaches {verdict['reach']}; {verdict['minimum_base']:.0f} is the lowest base that "
        "the bound allows."
    )
    if s["steps"]:
        text += (
            f" Trained are {s['steps']} steps on one row of {s['length']} tokens each, with a learning rate of "
            f"{s['learning_rate']:g}."
        )
    parts = [text]
    parts.append("Needles: mean probability of a token of the answer, and right answers, by the tokens of the text.")
    parts.append(by_size(rows["needles"], "{probability:.0%}, {right} of {answers}"))
    parts.append(f"Loss of the second half of the held-out novel (stretches: {s['haystacks']}):")
    parts.append(by_size(rows["loss"], "{second:.3f}"))
    return "\n\n".join(parts)


def by_size(rows, cell):
    """Return a table with a line for each model and a column for each length of the text."""
    models = {}
    for row in rows:
        if "d0" in row:
            right = sum(row[f"d{depth:.0f}"] for depth in (0, 50, 100))
            row = row | {"right": right, "answers": row["answers"] * len(DEPTHS)}
        line = models.setdefault(row["model"], {"model": row["model"], "base": row["base"]})
        line[f"n{row['size']}"] = cell.format(**row)
    sizes = sorted({row["size"] for row in rows})
    form = TABLE.format(
        headings=" | ".join(f"{size} tokens" for size in sizes),
        cells=" | ".join(f"{{n{size}}}" for size in sizes),
    )
    return common.markdown(list(models.values()), form)


def main(arguments=None):
    sizes = {"lines": [5, 20, 80], "repeats": 4, "needles": [1024, 2048, 4096], "haystacks": 1}
    training = {"length": 2048, "steps": 0, "learning_rate": 2e-4}
    parser = make_parser(__spec__.name, __doc__, "rope_smollm2", **sizes, **training, device="cpu")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
