"""Train and measure model_cards/hmt-demo: a small HMT that remembers facts in words.

    python -m scripts.train_hmt_demo

Trains the single-pass mode of `scripts.prove_hmt` with its recipe, in two minutes on one core. The tokens of
`RecallTask` are mapped to words, so that a sequence reads "remember Ada red Ada the Ada of ...", and answers can be
generated. The HMT is evaluated on new sequences, also with its recall forced to the correct segment, and with another
sequence's memories. The baseline is the Llama of `scripts.prove_hmt`, trained identically, with a sliding window as
long as an HMT segment's input.
"""

import json
from argparse import Namespace
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scripts import sample
from scripts.bench import common
from scripts.prove_hmt import CONTROLS, FACTS, READS, SIZES, RecallTask, ask, trained


CARD = common.ROOT / "model_cards" / "hmt-demo"
RECIPE = Namespace(**SIZES | {"texts": 64})
SEED = 0
SPECIAL = ["<pad>", "remember", "recall", "answer"]  # tokens of RecallTask other than keys, values and noise
NAMES = [
    "Ada", "Alan", "Alice", "Amos", "Anna", "Boris", "Bruno", "Carla", "Cecil", "Clara", "Cyrus", "Dora",
    "Doris", "Edgar", "Edith", "Elsa", "Erik", "Esther", "Felix", "Flora", "Frida", "Gita", "Greta", "Gus",
    "Hanna", "Hector", "Helga", "Hugo", "Ida", "Igor", "Ines", "Ingrid", "Irma", "Ivan", "Jonas", "Julia",
    "Karl", "Kira", "Lars", "Laura", "Leo", "Lena", "Linus", "Luisa", "Magda", "Marco", "Maya", "Miles", "Mina",
    "Nadia", "Nina", "Nora", "Olga", "Oscar", "Otto", "Paula", "Pavel", "Petra", "Rosa", "Ruben", "Sonja",
    "Tessa", "Vera", "Victor",
]  # fmt: skip
COLOURS = [
    "amber", "black", "blue", "brown", "copper", "cream", "gold", "gray", "green", "ivory", "orange", "pink", "purple",
    "red", "silver", "white",
]  # fmt: skip
NOISE = [
    "the", "of", "and", "a", "to", "in", "is", "it", "that", "was", "for", "on", "as", "with", "his", "they", "at", "be",
    "this", "from", "or", "had", "by", "but", "some", "what", "there", "we",
]  # fmt: skip
SAMPLE = (
    "remember Ada red Ada the of Ada Ada in Ada to Ada Ada was Ada a remember Boris gold Boris the of Boris Boris in Boris to "
    "Boris Boris was Boris a recall Ada Ada is Ada the Ada of Ada Ada and Ada answer"
)
TITLES = {
    None: "HMT",
    "window": "Llama with a window of the size of HMT's",
    "oracle recall": "HMT, its recall forced to the segment of the fact",
    "shuffled memories": "HMT, with the memories of another text",
}


def words(task):
    """Return the word of each token of a `RecallTask`."""
    return [*SPECIAL, *NAMES[: task.keys], *COLOURS[: task.values], *NOISE[: task.noise]]


def save(model, task, folder: Path):
    """Save the model and its tokenizer."""
    vocabulary = {word: i for i, word in enumerate(words(task))}
    assert len(vocabulary) == task.vocab_size, "a word occurs twice, or words are missing"
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.generation_config.update(
        bos_token_id=None, eos_token_id=None, pad_token_id=0
    )  # Llama's BOS and EOS ids are words here
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0]).save_pretrained(folder)
    for code in folder.glob("*.py"):  # in this repository, the model's code is the package
        code.unlink()
    config = json.loads((folder / "config.json").read_text())
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def accuracy(model, task, control=None):
    """Return a row with the accuracy for each number of facts."""
    shares = {f"{n} facts": ask(model, task, n, SEED, RECIPE, CONTROLS.get(control))[0] for n in FACTS}
    return {"model": TITLES[control]} | shares


def main():
    torch.set_num_threads(1)
    task = RecallTask(RECIPE.keys)
    model, steps = trained("HMT, single pass", SEED, task, RECIPE)
    CARD.mkdir(exist_ok=True)
    save(model, task, CARD)
    proof = json.loads((common.RESULTS / "hmt_recall.json").read_text())["rows"]
    window = next(row["accuracy"] for row in proof if (row["method"], row["seed"]) == ("window", SEED))
    command = "python -m scripts.train_hmt_demo"
    hmt = accuracy(model, task)
    of_task = {
        "task_type": "text-generation",
        "dataset_name": "facts drawn by RecallTask",
        "dataset_type": "recall-task",
    }
    result = common.origin(command) | {
        "settings": vars(RECIPE)
        | {"seed": SEED, "chance": 1 / task.values, "most_tokens": (FACTS[-1] + READS) * task.segment_length},
        "rows": [
            hmt,
            {"model": TITLES["window"]} | {f"{n} facts": window[str(n)] for n in FACTS},
            *(accuracy(model, task, control) for control in CONTROLS),
        ],
        "evaluations": [  # entry of the model-index
            of_task | {"metric_type": "accuracy", "metric_name": f"right answers, {name}", "metric_value": share}
            for name, share in hmt.items()
            if name != "model"
        ],
    }
    common.save(CARD / "recall.json", result)
    settings = {
        "recipe": "hmt",
        "sequence_length": (max(RECIPE.stage_2_writes) + READS) * task.segment_length,
        "first_stage_steps": steps[0],
        "steps": steps[1],
        "learning_rate": RECIPE.learning_rate,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "seed": SEED,
    }
    (CARD / "training.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    (CARD / "training.txt").write_text(f"{command}\n")
    sample.write(CARD, str(CARD.relative_to(common.ROOT)), SAMPLE, max_new_tokens=1)
    for row in result["rows"]:
        print(row)


if __name__ == "__main__":
    main()
