"""What a model remembers while it is trained: a small forgetting curve and samples, every so many steps."""

import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..metrics import forgetting_curve
from .progress import Progress, is_first_process, print_status


ROWS = 8  # that the curve takes its texts from
REPEATS = 4  # of a length of the curve
SHORTEST = 4  # length of the curve, in tokens
PROMPT, NEW, SAMPLES = 16, 32, 3  # tokens of a prompt and of what is written behind it; how many


class Measurements(TrainerCallback):
    """Writes a line to a JSONL file before the first step, and after every `every` steps.

    A line is {"step", "fine", "coarse", "curve", "samples"}: the paper's two lengths in tokens, 0 where even the
    shortest fails; a list of {"length", "copy", "lm"}, accuracies of `forgetting_curve`, up to the longest that fits
    into a row; and a list of {"prompt", "text"}, whose texts are written greedily. Losses and random states stay as
    they are.

    Args:
        file: JSONL.
        every: steps.
        rows: token ids of text, (T,) each.
        tokenizer: decodes the samples.
        progress: whose speed leaves out the time of measuring.
    """

    def __init__(self, file: Path, every: int, rows: Sequence[torch.Tensor], tokenizer: Any, progress: Progress):
        self.file, self.every, self.tokenizer, self.progress = file, every, tokenizer, progress
        self.rows = rows
        longest = (len(rows[0]) - 3) // 2  # it is read twice, with two BOS and an EOS
        if longest < SHORTEST or len(rows) * len(rows[0]) < 3 * longest:
            raise ValueError(
                f"--measure-steps needs rows of {2 * SHORTEST + 3} tokens or more, and two of them; these are {len(rows)} of "
                f"{len(rows[0])}. Raise --sequence-length, or leave it out."
            )
        self.lengths = sorted({longest >> halvings for halvings in range(5) if longest >> halvings >= SHORTEST})

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.measure(args, model, state)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:  # before a checkpoint of this step
            self.measure(args, model, state)

    def measure(self, args, model: Any, state) -> None:
        begin, was_training = time.monotonic(), model.training
        in_bfloat16 = torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), in_bfloat16, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few repeats, which are known
            special = {name: getattr(self.tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
            corpus = torch.cat(list(self.rows)).numpy()
            curve = forgetting_curve(model.eval(), corpus, lengths=self.lengths, repeats=REPEATS, **special)
            samples = [self.continue_text(model, row[:PROMPT]) for row in self.rows[:SAMPLES]]
        model.train(was_training)
        points = [{"length": p.length, "copy": p.copy_mean, "lm": p.lm_mean} for p in curve.points]
        lengths = {"fine": int(curve.fine_length), "coarse": int(curve.coarse_length)}
        line = {"step": state.global_step, **lengths, "curve": points, "samples": samples}
        if is_first_process():
            with open(self.file, "a") as file:
                file.write(json.dumps(line) + "\n")
        copied = ", ".join(f"{p.copy_mean:.0%} of {p.length}" for p in curve.points)
        print_status(f"step {state.global_step}  copies {copied} tokens; writes {samples[0]['text']!r}")
        self.progress.leave_out(time.monotonic() - begin)

    def continue_text(self, model: Any, prompt: torch.Tensor) -> dict[str, str]:
        ids = model.generate(
            prompt[None].to(model.device),
            attention_mask=torch.ones_like(prompt)[None].to(model.device),
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=True,
            pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
        )[0]
        begin, text = (self.tokenizer.decode(part) for part in (ids[: len(prompt)], ids[len(prompt) :]))
        return {"prompt": begin, "text": text}


__all__ = ["Measurements"]
