"""Clients that train: Trainer, TRL, PEFT, accelerate."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from scripts.client_checks.checks import (
    NotApplicable,
    check,
    difference,
    load,
    load_tokenizer,
    logits,
    texts,
    token_ids,
    write_jsonl,
)


OPTIONS = dict(
    max_steps=4, per_device_train_batch_size=2, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True
)


def equal_rows(rows=8, length=40):
    return [{"input_ids": ids, "labels": ids} for ids in token_ids(rows, length)]


@check("Trainer, eval_strategy and resume", "transformers", "difference of losses between a run and one resumed", 1e-5)
def trainer(folder):
    from transformers import Trainer, TrainingArguments

    def run(**resume):
        args = TrainingArguments(
            folder / "trainer", eval_strategy="steps", eval_steps=2, save_steps=2, logging_steps=1, **OPTIONS
        )
        worker = Trainer(load(folder), args, train_dataset=equal_rows(), eval_dataset=equal_rows(4))
        worker.train(**resume)
        losses = [entry["loss"] for entry in worker.state.log_history if "loss" in entry]
        return torch.tensor([*losses[-2:], worker.evaluate()["eval_loss"]])

    return difference(run(), run(resume_from_checkpoint=str(folder / "trainer" / "checkpoint-2")))


@check("TRL, SFT", "trl", "loss after training as a share of that before", 0.99)
def sft(folder):
    worker = sft_trainer(folder, max_length=512)
    before = worker.evaluate()["eval_loss"]
    worker.train()
    return worker.evaluate()["eval_loss"] / before


@check("TRL, SFT with packing", "trl", "difference of eval losses between packed and padded samples", 1e-5)
def sft_packing(folder):
    return sft_difference(folder, dict(packing=True, eval_packing=True))


@check("TRL, SFT padding-free", "trl", "difference of eval losses between concatenated and padded samples", 1e-5)
def sft_padding_free(folder):
    return sft_difference(folder, dict(padding_free=True, max_length=None))


CHATML = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}{{ eos_token }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def conversations():
    """Return chats with one and two questions, and prompts with completions."""
    turns = [
        [{"role": "user", "content": text[:40]}, {"role": "assistant", "content": text[40:]}] for text in texts(8)
    ]
    chats = [first + second if i % 2 else first for i, (first, second) in enumerate(zip(turns, turns[::-1]))]
    return {
        "messages": [{"messages": chat} for chat in chats],
        "completions": [{"prompt": text[:40], "completion": text[40:]} for text in texts(8)],
        "completions of chats": [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats],
    }


@check("TRL, SFT of chats", "trl", "difference of losses between SFTTrainer and our packing of the same chats", 1e-5)
def sft_chats(folder):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from hf_longctx.training.data import TokenDataset, collate, pack

    if folder.name == "hmt":
        raise NotApplicable("HMT reads across the end of a document")
    tokenizer, differences = load_tokenizer(folder), []
    tokenizer.chat_template = CHATML
    for kind, rows in conversations().items():
        options = dict(per_device_eval_batch_size=8, max_length=None, assistant_only_loss=kind == "messages")
        args = SFTConfig(folder / "sft", **OPTIONS, **options)
        data = Dataset.from_list(rows)
        worker = SFTTrainer(load(folder), args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
        expected = worker.evaluate()["eval_loss"]
        tokens = folder / "tokens.npy"
        pack(write_jsonl(folder / "chats.jsonl", rows), tokenizer, tokens)
        packed = TokenDataset(tokens, len(np.load(tokens)), tokenizer.eos_token_id, len(tokenizer))
        with torch.no_grad():
            loss = load(folder)(**collate([packed[0]]), use_cache=False).loss.item()
        differences.append(abs(loss - expected))
    return max(differences)


def sft_trainer(folder, **layout):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(folder / "sft", per_device_eval_batch_size=8, learning_rate=1e-3, **OPTIONS, **layout)
    data, tokenizer = Dataset.from_dict({"text": texts(8)}), load_tokenizer(folder)
    return SFTTrainer(load(folder), args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


def sft_difference(folder, layout):
    """Return the difference between the eval losses of two layouts of the same samples; then train with the first."""
    joined, padded = sft_trainer(folder, **layout), sft_trainer(folder, max_length=512)
    before, expected = (worker.evaluate()["eval_loss"] for worker in (joined, padded))
    joined.train()
    if not (after := joined.evaluate()["eval_loss"]) < before:
        raise AssertionError(f"training took the loss from {before} to {after}")
    return abs(before - expected)


@check("TRL, DPO", "trl", "last loss as a share of the first", 0.99)
def dpo(folder):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    prompts = texts(8)
    data = {"prompt": prompts, "chosen": [" a key"] * len(prompts), "rejected": [" the value of all"] * len(prompts)}
    worker = DPOTrainer(
        load(folder),
        args=DPOConfig(folder / "dpo", logging_steps=1, learning_rate=1e-3, **OPTIONS),
        train_dataset=Dataset.from_dict(data),
        processing_class=load_tokenizer(folder),
    )
    worker.train()
    losses = [entry["loss"] for entry in worker.state.log_history if "loss" in entry]
    return losses[-1] / losses[0]


GATE = "LoRA of the gate by target_parameters"
ADAPTERS = {
    "LoRA of all-linear": dict(target_modules="all-linear"),
    "DoRA of queries and values": dict(target_modules=["q_proj", "v_proj"], use_dora=True),
    GATE: dict(target_modules=[], target_parameters=["f_proj.weight"]),
}


def adapt(name):
    """Return a check that trains an adapter, saves, reloads and merges it."""

    def measure(folder):
        from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
        from transformers import Trainer, TrainingArguments

        if name == GATE and folder.name == "llama":
            raise NotApplicable("a Llama does not have a gate")
        model = get_peft_model(load(folder), LoraConfig(task_type="CAUSAL_LM", r=4, **ADAPTERS[name]))
        args = TrainingArguments(folder / "peft", learning_rate=1e-2, save_strategy="no", **OPTIONS)
        Trainer(model, args, train_dataset=equal_rows()).train()
        trained = logits(model.eval())
        if not difference(trained, logits(load(folder))) > 1e-3:
            raise AssertionError("training changed nothing")
        model.save_pretrained(folder / "adapter")
        reloaded = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter").eval()
        changes = [difference(trained, logits(reloaded))]
        reloaded.merge_and_unload().save_pretrained(folder / "merged")
        return max(*changes, difference(trained, logits(load(folder / "merged"))))

    return measure


for name in ADAPTERS:
    check(f"PEFT, {name}", "peft", "difference of logits after reload, and after merge and reload", 1e-4)(adapt(name))


STRATEGIES = {  # options of `accelerate launch`, which calls two processes two GPUs; Trainer runs on the CPU
    "DDP": ["--multi_gpu"],
    "FSDP2": [
        *("--use_fsdp", "--fsdp_version", "2", "--fsdp_state_dict_type", "FULL_STATE_DICT"),
        *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),  # the layers that the model names
    ],
}


def launch(strategy):
    """Return a check that trains in two processes, each with half of the batch of one process."""

    def measure(folder):
        one, two = (folder / f"{strategy} {processes}" for processes in (1, 2))
        train_briefly(folder, one, batch=4)
        command = [sys.executable, "-m", "accelerate.commands.launch", *STRATEGIES[strategy]]
        command += ["--num_machines", "1", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no"]
        command += ["--main_process_port", "0", "-m", "scripts.client_checks.training", folder, two]
        subprocess.run(command, check=True)
        return difference(logits(load(one)), logits(load(two)))

    return measure


def train_briefly(folder, output, batch):
    from transformers import Trainer, TrainingArguments

    options = OPTIONS | dict(per_device_train_batch_size=batch, learning_rate=1e-3, save_strategy="no")
    worker = Trainer(load(folder), TrainingArguments(output, **options), train_dataset=equal_rows(16))
    worker.train()
    worker.save_model(output)


for name in STRATEGIES:
    check(
        f"accelerate launch, {name}", "accelerate", "difference of logits between 2 processes and 1", 1e-4, minutes=6
    )(launch(name))


if __name__ == "__main__":  # a process of `accelerate launch`
    train_briefly(Path(sys.argv[1]), Path(sys.argv[2]), batch=2)
