"""Load and fine-tune published models without hf_longctx: the logits must be the same, bit for bit."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import checks
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    pipeline,
)


assert importlib.util.find_spec("hf_longctx") is None
EXPECTED = load_file(sys.argv[1])
COMMITS = json.loads(Path(sys.argv[2]).read_text())
OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
BOB = "hf_of_" + "bob"


def load(name, auto_class=AutoModelForCausalLM, **options):
    return auto_class.from_pretrained(f"alice/{name}", **{"trust_remote_code": True} | options)


@torch.no_grad()
def same(model, name):
    outputs = model.eval()(input_ids=EXPECTED["ids"])
    actual = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    difference = (actual - EXPECTED[name]).abs().max().item()
    assert difference == 0, f"{name}: {difference}"


def refused(name, says, **options):
    try:
        load(name, **options)
    except (OSError, ValueError) as error:
        assert says in str(error), error
    else:
        raise AssertionError(f"{name} was loaded")


def check_configuration():
    assert type(load("fox", AutoConfig)).__module__.startswith("transformers_modules.alice.fox.")


def check_no_code_runs_without_trust():
    refused("fox", "trust_remote_code", trust_remote_code=False)


def check_every_kind_of_model():
    same(load("fox", AutoModel), "fox-base")
    same(load("fox"), "fox")
    same(load("classifier", AutoModelForSequenceClassification), "classifier")


def check_the_lines_of_the_cards():
    if OFFLINE:  # these calls are made above
        return
    for name in ("fox", "classifier", "hmt-fox"):
        code, names = re.search(r"```python\n(.*?)```", ModelCard.load(f"alice/{name}").text, re.DOTALL), {}
        exec(code[1], names)
        same(names["model"], name)
        assert names["tokenizer"]("The import statement").input_ids


def check_pipeline():
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    text = pipeline("text-generation", "alice/fox", trust_remote_code=True)("The import statement", **options)
    assert text[0]["generated_text"] == COMMITS["text"]


def check_sharded_and_private():
    if not OFFLINE:
        refused("private", "not a valid model identifier", token=False)
        refused("private", "not a valid model identifier", token=BOB)
    same(load("private"), "fox")


def check_pinned_revision_and_code():
    old, new = COMMITS["old"], COMMITS["new"]
    model = load("fox", revision=old)
    same(model, "old")
    assert f".{old}." in type(model).__module__
    model = load("fox", revision=old, code_revision=new)
    same(model, "old")
    assert f".{new}." in type(model).__module__


def check_hmt_around_a_llama():
    whole = load("hmt-llama")
    same(whole, "hmt-llama")
    # The weights of a pointer lie otherwise in memory, and products round by that: so its weights are compared.
    pointed = load("hmt-llama-pointer").state_dict()
    assert pointed.keys() == whole.state_dict().keys()
    assert all(torch.equal(pointed[name], weight) for name, weight in whole.state_dict().items())


def check_hmt_around_a_fox():
    for name in ("hmt-fox", "hmt-fox-pointer"):
        model = load(name)
        same(model, "hmt-fox")
        assert type(model.backbone).__module__.startswith(
            f"transformers_modules.alice.{name.replace('-', '_hyphen_')}"
        )
        if not OFFLINE:  # also loads from a folder
            model.save_pretrained(f"again-{name}")
            same(AutoModelForCausalLM.from_pretrained(f"again-{name}", trust_remote_code=True), "hmt-fox")


def check_an_adapter():
    if OFFLINE:
        return
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(load("fox", revision=COMMITS["new"]), config)
    model.push_to_hub("alice/adapter")
    with torch.no_grad():
        EXPECTED["adapter"] = model.eval()(input_ids=EXPECTED["ids"]).logits
    assert not torch.equal(EXPECTED["adapter"], EXPECTED["fox"])
    for model in (
        PeftModel.from_pretrained(load("fox", revision=COMMITS["new"]), "alice/adapter"),
        load("adapter", AutoPeftModelForCausalLM),
        load("adapter"),
    ):
        same(model, "adapter")


if __name__ == "__main__":
    checks.run(dict(globals()))
