"""Pushed models load where hf_longctx is not installed, from the Hub and then offline, to the last bit."""

import json

import pytest
import torch
from demo_model import DEMO, VOCABULARY
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    pipeline,
)

from hf_longctx import FoxConfig, FoxForCausalLM, HMTConfig, HMTWrapper
from hf_longctx.fox import FoxForSequenceClassification, FoxModel
from hf_longctx.hub import build_bundle, with_card


TINY = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2)
SETTINGS = dict(segment_length=16, sensory_tokens=4)


def test_without_the_package(run_client, publish, tmp_path):
    for name in ("peft", "accelerate"):
        pytest.importorskip(name)
    tokenizer, expected, commits = AutoTokenizer.from_pretrained(DEMO), {}, {}
    ids = expected["ids"] = torch.randint(3, VOCABULARY, (1, 50), generator=torch.Generator().manual_seed(0))

    def save(model, name, **options):
        """Publish the model, and keep its logits, as they are from a file.

        Products round by how weights lie in memory, and in a file they lie otherwise than in a new model.
        """
        folder = tmp_path / "models" / name
        model.eval().save_pretrained(folder, **options)
        tokenizer.save_pretrained(folder)
        if not name.endswith("pointer"):
            with torch.no_grad():
                expected[name] = type(model).from_pretrained(folder)(ids).logits
        bundle = with_card(build_bundle(folder), f"alice/{name}")
        return publish(bundle.files, f"alice/{name}", private=name == "private")

    torch.manual_seed(0)
    old = FoxForCausalLM(FoxConfig.pro(**TINY))
    commits["old"] = save(old, "fox")
    expected["old"] = expected["fox"]
    fox = FoxForCausalLM(FoxConfig.pro(**TINY, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    commits["new"] = save(fox, "fox")
    base = FoxModel.from_pretrained(tmp_path / "models" / "fox")
    with torch.no_grad():
        expected["fox-base"] = base(ids).last_hidden_state
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    text = pipeline("text-generation", fox, tokenizer=tokenizer)("The import statement", **options)
    commits["text"] = text[0]["generated_text"]
    save(FoxForSequenceClassification(FoxConfig.pro(**TINY, num_labels=3, pad_token_id=0)), "classifier")
    save(fox, "private", max_shard_size="50kB")

    llama = LlamaForCausalLM(LlamaConfig(**TINY))
    for name, backbone in (("llama", llama), ("fox", old)):  # a pointer keeps to its commit
        commit = save(backbone, "llama") if name == "llama" else commits["old"]
        hmt = HMTWrapper.from_backbone(backbone, HMTConfig(**SETTINGS))
        save(hmt, f"hmt-{name}")
        hmt.config.backbone_in_checkpoint = False
        hmt.config.backbone_name_or_path, hmt.config.backbone_revision = f"alice/{name}", commit
        save(hmt, f"hmt-{name}-pointer")

    save_file(expected, tmp_path / "expected.safetensors")
    (tmp_path / "commits.json").write_text(json.dumps(commits))
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        run_client("load.py", "expected.safetensors", "commits.json", **variables)
