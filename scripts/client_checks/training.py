"""Clients that train: TRL and PEFT."""

import numpy as np
import torch

from scripts.client_checks.checks import (
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


ADAPTERS = {
    "LoRA of all-linear": dict(target_modules="all-linear"),
    "DoRA of queries and values": dict(target_modules=["q_proj", "v_proj"], use_dora=True),
}


def adapt(name):
    """Return a check that trains an adapter, saves, reloads and merges it."""

    def measure(folder):
        from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
        from transformers import Trainer, TrainingArguments

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
