"""Repositories that nobody should load: refused, or harmless."""

import json
import pickle
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx import FoxConfig, FoxForCausalLM, HMTConfig, HMTWrapper
from hf_longctx.hub import build_bundle


TINY = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2)
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({ran!r}).touch()
class Config(LlamaConfig):
    model_type = "elsewhere"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


class Touch:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.slow
def test_hostile_repositories(run_client, publish, tmp_path):
    ran = str(tmp_path / "ran")

    def saved(model, **config):
        """Files of a model, with changes in its configuration."""
        model.save_pretrained(tmp_path / "model")
        files = dict(build_bundle(tmp_path / "model").files)
        values = json.loads((tmp_path / "model" / "config.json").read_text())
        return files | {"config.json": encoded(values | config)}

    def encoded(values):
        return json.dumps(values).encode()

    code = {"code.py": CODE.format(ran=ran).encode()}
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    chain = {name: f"mallory/evil--{value}" for name, value in auto_map.items()}
    llama, fox = LlamaForCausalLM(LlamaConfig(**TINY)), FoxForCausalLM(FoxConfig(**TINY))
    weights = saved(llama)

    publish({"../../outside.txt": b"out"}, "mallory/up")
    publish({"/outside.txt": b"out"}, "mallory/root")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../../outside.safetensors"}}
    publish({"config.json": weights["config.json"], "model.safetensors.index.json": encoded(index)}, "mallory/index")
    publish({"config.json": weights["config.json"], "pytorch_model.bin": pickle.dumps(Touch(ran))}, "mallory/pickle")
    publish(saved(llama, model_type="elsewhere", auto_map=auto_map) | code, "mallory/evil")
    publish(saved(llama, model_type="elsewhere", auto_map=chain), "mallory/unknown-chain")
    publish(saved(fox, auto_map=chain), "mallory/chain")
    publish(saved(fox, attn_implementation="mallory/kernel-with-code"), "mallory/kernel")
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    publish(weights | code | {"tokenizer_config.json": encoded(tokenizer)}, "mallory/tokenizer")
    hmt = HMTWrapper.from_backbone(llama, HMTConfig(segment_length=16, sensory_tokens=4))
    hmt.config.backbone_in_checkpoint, hmt.config.backbone_name_or_path = False, "mallory/evil"
    publish(saved(hmt), "mallory/hmt")

    files = saved(fox) | {"README.md": b"good"}
    (tmp_path / "hashes.json").write_text(json.dumps({"README.md": "0" * 64}))
    publish(files, "mallory/bytes")
    run_client("malicious.py", ran, "hashes.json", with_package=True)
    assert not Path(ran).exists()
