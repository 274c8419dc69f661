"""A small FoX that learns to remember: the model of the demo, trained on text in which passages are repeated.

Plain text rarely rewards remembering; a repeated passage rewards it at every token. Passages have every length (one
favoured length would teach a fixed offset instead of copying). A model soon memorises a small corpus, and repetitions
of memorised text teach nothing: most passages are therefore corrupted text, shuffled snippets or random tokens, which
only a model that has read them in the same row can predict.
"""

import hashlib
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ..fox import FoxConfig, FoxForCausalLM


BOS, EOS, PAD = "<s>", "</s>", "<pad>"
# Kinds of blocks in a training row and their probabilities.
BLOCKS = {"plain text": 0.15, "repeated text": 0.5, "repeated snippets": 0.15, "repeated random tokens": 0.2}
CHAT_TEMPLATE = r"{{ bos_token }}{{ messages | map(attribute='content') | join('\n') }}"  # it continues what was said
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}  # greedy, a model this small repeats itself
CORRUPTION = 0.2  # share of the tokens of repeated text that are replaced by random ones


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, which encodes every text, after a BOS, as every row of the training begins."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = begin_with_bos(tokenizer)
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special)


def begin_with_bos(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )


class RepeatedPassages(torch.utils.data.Dataset):
    """Rows of `context` tokens made of blocks: [bos] S [bos] S with a passage S of any length that fits, or [bos] and
    plain text.

    Row i depends on `seed` and i alone, so a resumed training sees the rows that an uninterrupted one sees.

    Raises:
        ValueError: the text is not longer than a row.
    """

    def __init__(self, tokens: list[int], context: int, vocab_size: int, rows: int, bos_token_id: int, seed: int):
        if len(tokens) <= context:
            raise ValueError(
                f"the text has {len(tokens)} tokens; rows of {context} tokens need a longer one. Give more text, or "
                "lower context."
            )
        self.tokens, self.context, self.vocab_size, self.rows = tokens, context, vocab_size, rows
        self.bos_token_id, self.seed = bos_token_id, seed

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        rng = random.Random(f"{self.seed}-{row}")
        ids, labels = [], []
        while (room := self.context - len(ids)) > 0:
            (kind,) = rng.choices(list(BLOCKS), BLOCKS.values())
            if kind == "plain text" or room < 32:
                passage = [self.bos_token_id, *self.text(rng, room)]
                ids += passage
                labels += passage
                continue
            length = rng.randint(8, room // 2 - 1)
            if kind == "repeated text":
                passage = [
                    rng.randrange(self.vocab_size) if rng.random() < CORRUPTION else token
                    for token in self.text(rng, length)
                ]
            elif kind == "repeated snippets":
                snippets = (self.text(rng, rng.randint(1, 6)) for _ in range(length))
                passage = [token for snippet in snippets for token in snippet][:length]
            else:
                passage = [rng.randrange(self.vocab_size) for _ in range(length)]
            passage = [self.bos_token_id, *passage]
            ids += passage * 2
            labels += [-100] * len(passage) + passage  # corrupted text is unpredictable the first time
        return {"input_ids": ids[: self.context], "labels": labels[: self.context]}

    def text(self, rng, length):
        begin = rng.randrange(len(self.tokens) - length)
        return self.tokens[begin : begin + length]


def train_demo_model(
    text: str,
    output: str | Path,
    *,
    steps: int = 600,
    context: int = 768,
    batch_size: int = 8,
    vocab_size: int = 1024,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> FoxForCausalLM:
    """Train a small FoX (Pro) from scratch on `text` and save it with its tokenizer in `output`.

    Checkpoints go to `output`/checkpoints; a second call with the same arguments resumes from the last checkpoint.

    Args:
        text: training text, of more than `context` tokens.
        output: folder for the model, its tokenizer and `trainer_state.json`, whose `log_history` has step, loss and
            learning rate.
        steps, learning_rate: of AdamW (0.9, 0.95) with warmup and cosine decay.
        context: tokens of a training row; repeated passages are at most half as long.
        batch_size: rows per step on each device.
        vocab_size: of the tokenizer, which is trained on `text`.
        seed: of the weights and the rows.

    Returns:
        The trained model, on the CPU.

    Raises:
        ValueError: the text is too short, or `output` holds checkpoints of a training on another text or with other
            settings (another number of `steps` is fine).
    """
    output = Path(output)
    settings = dict(
        context=context, batch_size=batch_size, vocab_size=vocab_size, learning_rate=learning_rate, seed=seed
    )
    last = _checkpoint_to_resume(output, {"text": hashlib.sha256(text.encode()).hexdigest(), **settings})
    tokenizer = train_tokenizer(text, vocab_size)
    config = FoxConfig.pro(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        decay_time_min=8,
        decay_time_max=2048,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = FoxForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=str(output / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, steps // 10),
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=max(1, steps // 100),
        save_steps=max(1, steps // 10),
        save_total_limit=1,
        report_to="none",
        seed=seed,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = RepeatedPassages(tokens, context, len(tokenizer), steps * batch_size * 16, tokenizer.bos_token_id, seed)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=_stack)
    trainer.train(resume_from_checkpoint=last)
    trainer.state.save_to_json(str(output / "trainer_state.json"))
    model = model.cpu().eval()
    model.generation_config.update(**SAMPLING)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return model


def _checkpoint_to_resume(output, recipe):
    """The last checkpoint in `output`, or None in a new folder; ValueError if the checkpoint has another recipe."""
    checkpoints, file = output / "checkpoints", output / "recipe.json"
    last = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
    if last is not None:
        before = json.loads(file.read_text())
        changed = [name for name in recipe if before[name] != recipe[name]]
        if changed:
            raise ValueError(
                f"{checkpoints} holds a training with another {' and '.join(changed)}. Resume it with the arguments "
                f"in {file}, or choose a new folder."
            )
    output.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(recipe, indent=1) + "\n")
    return last


def _stack(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
