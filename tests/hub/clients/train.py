"""Adapters and Trainer with the Hub, in a process that has no hf_longctx."""

import importlib.util
import sys

import checks
import torch
from huggingface_hub import HfApi
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


assert importlib.util.find_spec("hf_longctx") is None
FOX, COMMIT = "alice/fox-to-train", sys.argv[1]
IDS = torch.arange(3, 53)[None]
PINNED = {"revision": COMMIT, "trust_remote_code": True}
api = HfApi()


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def check_an_adapter():
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(FOX, **PINNED), config)
    model.push_to_hub("alice/adapter")
    expected = logits(model)
    base = AutoModelForCausalLM.from_pretrained(FOX, **PINNED)
    assert not torch.equal(logits(base), expected)
    for model in (
        PeftModel.from_pretrained(base, "alice/adapter"),
        AutoPeftModelForCausalLM.from_pretrained("alice/adapter", trust_remote_code=True),
        AutoModelForCausalLM.from_pretrained("alice/adapter", trust_remote_code=True),
    ):
        assert torch.equal(logits(model), expected), type(model).__name__


def check_the_trainer_pushes_what_loads():
    model = AutoModelForCausalLM.from_pretrained(FOX, **PINNED)
    before = logits(model)
    arguments = TrainingArguments(
        output_dir="trained",
        max_steps=2,
        save_steps=2,
        push_to_hub=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.push_to_hub()
    assert {"model.safetensors", "modeling_fox.py", "config.json"} <= set(api.list_repo_files("alice/trained"))
    again = AutoModelForCausalLM.from_pretrained("alice/trained", trust_remote_code=True)
    saved = AutoModelForCausalLM.from_pretrained("trained", trust_remote_code=True)
    assert torch.equal(logits(again), logits(saved)) and not torch.equal(logits(again), before)


if __name__ == "__main__":
    checks.run(dict(globals()))
