"""How far SmolLM2-135M retrieves, whose RoPE base lies below the bound for its context, and what another base changes.

    python -m scripts.fetch_smollm2 && python -m scripts.demo_corpus demo_output/corpus
    python -m scripts.evidence.rope_smollm2 [--lines 5 10 20] [--needles 1024 2048]
    python -m scripts.evidence.rope_smollm2 --device cuda --steps 200 --needles 2048 4096 8192 16384

Numbers of lines (LongEval) and needles in a held-out novel are read with the base of the model, and with the one that
`hf-longctx finetune --recipe rope-extend` takes for --length tokens. With --steps the command also trains the model
with that base; without, the base alone is changed. Answers count if they are given token for token.
"""

import subprocess
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import load_tokens
from hf_longctx.metrics import line_retrieval, needle_in_a_haystack, position_loss, rope_report
from hf_longctx.training.recipes import FinetuneSettings
from hf_longctx.training.starts import extend_rope
from scripts.bench import common
from scripts.evidence.parts import make_parser, measure_parts
from scripts.fetch_smollm2 import FOLDER


TEXT = common.ROOT / "demo_output" / "corpus"
DEPTHS = (0.0, 0.5, 1.0)
LINES = """
| model | base | lines | tokens | right | of | probability of the answer |
| {model} | {base:.0f} | {size} | {tokens:.0f} | {right} | {answers} | {probability:.1%} |
"""
NEEDLES = """
| model | base | tokens | right at depth 0 % | 50 % | 100 % | of | probability of the answer, mean |
| {model} | {base:.0f} | {size} | {d0} | {d50} | {d100} | {answers} | {probability:.1%} |
"""
LOSSES = """
| model | base | tokens | first half | second half |
| {model} | {base:.0f} | {size} | {first:.3f} | {second:.3f} |
"""


def load(name, args):
    if name == "trained":
        return AutoModelForCausalLM.from_pretrained(run_folder(args) / "model").to(args.device).eval()
    config = AutoConfig.from_pretrained(FOLDER)
    if name == "other base":
        extend_rope(config, FinetuneSettings(model=str(FOLDER), recipe="rope-extend", sequence_length=args.length))
    model = AutoModelForCausalLM.from_pretrained(FOLDER, config=config, dtype=torch.float32)
    return model.to(args.device).eval()


def run_folder(args):
    return args.work / "rope_smollm2"


def train(args):
    command = [sys.executable, "-m", "hf_longctx", "finetune", FOLDER, "--recipe", "rope-extend", "--batch-tokens"]
    options = [args.length, "--data", TEXT / "train", "--sequence-length", args.length, "--steps", args.steps]
    subprocess.run([str(x) for x in (*command, *options, "--output", run_folder(args))], check=True)


def lines(model, tokenizer, size, args):
    (point,) = line_retrieval(model, tokenizer, lines=[size], repeats=args.repeats, generate=False).points
    right = round(point.exact_rate * len(point.answers))
    return {
        "tokens": point.mean_tokens,
        "right": right,
        "answers": len(point.answers),
        "probability": point.probability,
    }


def needles(model, tokenizer, size, args):
    tokens = load_tokens(tokenizer, str(TEXT / "held_out.txt")).tokens
    grid = needle_in_a_haystack(
        model, tokenizer, tokens, lengths=[size], depths=DEPTHS, mode="easy", repeats=args.haystacks, generate=False
    )
    right = {f"d{cell.depth:.0%}".strip("%"): round(cell.exact_rate * args.haystacks) for cell in grid.cells}
    probability = sum(cell.probability for cell in grid.cells) / len(grid.cells)
    return right | {"answers": args.haystacks, "probability": probability}


def losses(model, tokenizer, size, args):
    tokens = load_tokens(tokenizer, str(TEXT / "held_out.txt")).tokens
    loss = position_loss(model, tokens, context_length=size, sequences=args.haystacks).loss
    return {"first": sum(loss[: size // 2]) / (size // 2), "second": sum(loss[size // 2 :]) / (size - size // 2)}


KINDS = {"lines": lines, "needles": needles, "loss": losses}


def one_part(kind, name, size, args):
    if name == "trained" and not (run_folder(args) / "model").exists():
        train(args)
    model = load(name, args)
    base = model.config.rope_parameters["rope_theta"]
    measured = KINDS[kind](model, AutoTokenizer.from_pretrained(FOLDER), size, args)
    return {"kind": kind, "model": name, "base": base, "size": size, **measured}


def measure(args):
    report = rope_report(AutoConfig.from_pretrained(FOLDER))
    (group,) = report.groups
    yield {"kind": "verdict", "verdict": report.verdict, "claimed": report.claimed_context, "base": group.base,
           "reach": group.context_bound, "minimum_base": group.minimum_base}  # fmt: skip
    sizes = {"lines": args.lines, "needles": args.needles, "loss": args.needles[-1:]}
    names = ["as it is", "other base", *["trained"][: args.steps]]
    keys = [(kind, name, size) for kind in KINDS for size in sizes[kind] for name in names]
    yield from measure_parts(one_part, keys, args)


def table(result):
    rows = {kind: [row for row in result["rows"] if row["kind"] == kind] for kind in ("verdict", *KINDS)}
    verdict = rows["verdict"][0]
    text = (
        f"The verdict of `hf-longctx rope`: {verdict['verdict']}. The model claims {verdict['claimed']} tokens with base "
        f"{verdict['base']:.0f}, which reaches {verdict['reach']}; {verdict['minimum_base']:.0f} is the lowest base that "
        "the bound allows."
    )
    parts = [
        ("Numbers in lines:", rows["lines"], LINES),
        ("Needles (easy mode) by the depth at which they are hidden:", rows["needles"], NEEDLES),
        (f"Loss of {result['settings']['haystacks']} stretches of the held-out novel:", rows["loss"], LOSSES),
    ]
    return "\n\n".join([text, *(f"{text}\n\n{common.markdown(lines, form)}" for text, lines, form in parts if lines)])


def main(arguments=None):
    sizes = {"lines": [5, 10, 20], "repeats": 4, "needles": [1024, 2048], "haystacks": 1, "length": 16384}
    parser = make_parser(__spec__.name, __doc__, "rope_smollm2", **sizes, steps=0, device="cpu")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
