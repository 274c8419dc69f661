"""Regenerate model_cards/hmt-demo: an HMT around llama-demo, which knows again the passages that it has read.

    python -m scripts.train_hmt_demo [--work FOLDER]

Trains in the two stages of `hf-longctx finetune --recipe hmt`, by commands that are printed and kept in the card's
`training.txt`. A row of the first stage is a segment of text, twice; one of the second is `PASSAGES` segments and the
same in another order, so that a segment has to be found among the memories. A recall is made of the first half of a
segment, so that what follows the next token is predicted with a memory. After an interruption, the same command goes
on.
"""

import argparse
import contextlib
import random
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import load_text, load_tokens
from scripts import demo_corpus
from scripts.bench import common
from scripts.prove_hmt import changed_recall, shuffled_memories
from scripts.train_demo import CARDS, HELD_OUT, ROOT, measure, run, save


BACKBONE, CARD = CARDS / "llama-demo", CARDS / "hmt-demo"
SEGMENT, SENSORY, PASSAGES = 16, 4, 4
QUARTER = SEGMENT // 4
STAGES = (  # passages of a row, and what differs between the stages
    (1, "finetune llama-demo --steps 200"),
    (PASSAGES, "finetune {before}/model --steps 240"),
)
BATCH = 1024  # tokens
RECIPE = f"--recipe hmt --recall-mode single --segment-length {SEGMENT} --sensory-tokens {SENSORY} --full"
TRAINING = (
    "--learning-rate 1e-3 --schedule cosine --warmup-steps 10 --dtype bfloat16 --save-steps 40 --keep-checkpoints 1"
)
ROWS = 8192  # of the data of a stage
SCORED = SEGMENT // 2 - 1  # tokens of a segment that are predicted with what was recalled
DISTANCES, TEXTS = (1, 4, 16, 64), 64  # segments from one reading to the next
CURVE = (63, 127, 255, 511, 1023)  # lengths after which the second reading begins with a segment


def twice(tokens, passages, rng):
    """A row: segments of text, and the same ones in another order."""
    starts = [rng.randrange(len(tokens) - SEGMENT) for _ in range(passages)]
    starts += rng.sample(starts, passages)
    return np.concatenate([tokens[start : start + SEGMENT] for start in starts])


def train(work):
    """Train both stages; {folder of a stage: its command}."""
    if not (work / "llama-demo").exists():
        shutil.copytree(BACKBONE, work / "llama-demo")
    if not (work / "passages-1.npy").exists():
        tokenizer, rng = AutoTokenizer.from_pretrained(BACKBONE), random.Random(0)
        tokens = load_tokens(tokenizer, str(work / "corpus" / "train")).tokens.astype(np.uint16)
        for number, (passages, _) in reversed(list(enumerate(STAGES, start=1))):
            np.save(work / f"passages-{number}.npy", [twice(tokens, passages, rng) for _ in range(ROWS)])
    commands, before = {}, None
    for number, (passages, stage) in enumerate(STAGES, start=1):
        output, length = f"hmt-demo/stage-{number}", 2 * passages * SEGMENT
        sizes = f"--sequence-length {length} --batch-tokens {BATCH} --rows-at-once {BATCH // length}"
        data = f"--data passages-{number}.npy --tokenizer llama-demo --output {output}"
        commands[work / output] = f"hf-longctx {stage.format(before=before)} {RECIPE} {sizes} {TRAINING} {data}"
        before = output
    run(commands.values(), work)
    return commands


@torch.no_grad()
def recall(model, backbone, tokens):
    """Rows of figures: how well the last `SCORED` tokens of a segment are predicted when it comes again.

    The text between its two readings is new, so that a reader who remembers only some tokens predicts it as if it were
    new, too. The last column is the loss on plain text, all tokens of segments.
    """
    readers, window = {}, SENSORY + SEGMENT
    for distance in DISTANCES:
        rng = random.Random(distance)

        def piece(length, rng=rng):
            start = rng.randrange(len(tokens) - length)
            return tokens[start : start + length]

        texts = [(piece(SEGMENT), piece((distance - 1) * SEGMENT), piece(QUARTER)) for _ in range(TEXTS)]
        ids = torch.tensor(np.array([np.concatenate([first, new, first]) for first, new, _ in texts]))
        several, shifted = (x.split(16) for x in (ids, torch.tensor(np.array([shift(*text) for text in texts]))))
        scores = {
            "HMT": [score(model, x) for x in several],
            "HMT, memories of another text": [score(model, x, shuffled_memories) for x in several],
            "HMT, a quarter of a segment later": [score(model, x) for x in shifted],
            "llama-demo, a window of HMT's size": [score(backbone, x[:, -window:]) for x in several],
        }
        if ids.shape[1] <= backbone.config.max_position_embeddings:
            scores["llama-demo, the whole text"] = [score(backbone, x) for x in several]
        for reader, pairs in scores.items():
            loss, right = (torch.cat(x).mean().item() for x in zip(*pairs))
            for figure, value in (("loss, nats", loss), ("right tokens", right)):
                row = readers.setdefault((reader, figure), {"reader": reader, "figure": figure})
                row[f"{distance} segments later"] = value
    text = torch.tensor(np.array(tokens[: len(tokens) // 512 * 512]).reshape(-1, 512)[::16])
    windows = text[:, SEGMENT - SENSORY :].unfold(1, window, SEGMENT)  # (rows, segments, window)
    whole = torch.cat([nats(model(x).logits, x)[:, SEGMENT - 1 :] for x in text.split(4)])
    alone = nats(backbone(windows.flatten(0, 1)).logits, windows.flatten(0, 1))[:, SENSORY - 1 :]
    full = torch.cat([nats(backbone(x).logits, x)[:, SEGMENT - 1 :] for x in text.split(4)])
    plain = {"HMT": whole, "llama-demo, a window of HMT's size": alone, "llama-demo, the whole text": full}
    for reader, losses in plain.items():
        readers[reader, "loss, nats"]["plain text"] = losses.mean().item()
    return list(readers.values())


def shift(first, new, more):
    """A text in which the segment comes again a quarter later, as far as the end of a segment."""
    return np.concatenate([first, new, more, first[:-QUARTER]])


def score(model, ids, control=None):
    """Loss, and whether the arg-max is right, of the last tokens of a text, both (B, SCORED)."""
    with contextlib.nullcontext() if control is None else changed_recall(model, control, None, None):
        logits = model(input_ids=ids, logits_to_keep=SCORED + 1).logits
    return nats(logits, ids[:, -SCORED - 1 :]), (logits[:, :-1].argmax(-1) == ids[:, -SCORED:]).float()


def nats(logits, ids):
    """Loss of each token but the first, (B, T - 1)."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].mT.float(), ids[:, 1:], reduction="none")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "demo_output" / "hmt", metavar="FOLDER")
    work = parser.parse_args().work
    if not (work / "corpus").exists():
        demo_corpus.write(work / "corpus")
    model, tokenizer = save(train(work), CARD)
    backbone = AutoModelForCausalLM.from_pretrained(BACKBONE, dtype=torch.float32)
    tokens = tokenizer(load_text(str(HELD_OUT)), add_special_tokens=False, verbose=False)["input_ids"]
    result = {
        "command": "python -m scripts.train_hmt_demo",
        "commit": common.commit(),
        "machine": common.machine(),
        "versions": common.versions(),
        "settings": {"segment": SEGMENT, "sensory": SENSORY, "texts": TEXTS, "corpus": "Persuasion"},
        "rows": recall(model.float().eval(), backbone.eval(), np.array(tokens)),
    }
    common.save(CARD / "recall.json", result)
    for row in result["rows"]:
        print(row)
    measure(model, tokenizer, CARD, lengths=CURVE, train_length=2 * PASSAGES * SEGMENT)


if __name__ == "__main__":
    main()
