"""Repositories that nobody should load: refused, or harmless."""

import gzip
import json
import pickle
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx import FoxConfig, FoxForCausalLM, HMTConfig, HMTWrapper
from hf_longctx.hmt.state_hmt import weights_hash
from hf_longctx.hub import build_bundle


ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "model_cards" / "fox-demo"
TINY = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2)
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "elsewhere"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
METRIC = """
from pathlib import Path
import datasets
import evaluate
class Sum(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)
    def _compute(self, predictions):
        return {"sum": sum(predictions)}
"""
TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch RAN') }}",
    "{% for i in range(10**9) %}{% endfor %}",
)
FIELDS = (
    {"hidden_act": "__import__('pathlib').Path('RAN').touch()"},
    {"dtype": "__import__('pathlib').Path('RAN').touch()"},
    {"forget_gate": "__class__"},
    {"layer_types": ["__class__"]},
    {"num_hidden_layers": "9**9**9"},
    {"head_dim": -1},
    {"quantization_config": {"quant_method": "mallory/quantizer"}},
    {"use_kernels": True},
    {"attn_implementation": "mallory/kernel"},
    {"_attn_implementation": "mallory/kernel"},
    {"use_kernels": True, "kernel_config": {"kernel_mapping": {"RMSNorm": "mallory/kernel:RMSNorm"}}},
)
# A build of a kernel, as the library `kernels` reads it, but for its code.
KERNEL = {
    "README.md": b"",
    "build/torch-cpu/metadata.json": json.dumps(
        {
            "name": "kernel",
            "id": "_kernel_cpu_0123abc",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": "cpu"},
        }
    ).encode(),
}
HEADERS = (
    (2**62).to_bytes(8, "little"),
    (200_000_000).to_bytes(8, "little") + b"{}",
    (8).to_bytes(8, "little") + b"{" * 8,
)


class Touch:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_hostile_repositories(hub, run_client, publish, tmp_path):
    ran = str(tmp_path / "ran")

    def saved(model, **config):
        """Return files of a model, with changes in its configuration."""
        model.save_pretrained(tmp_path / "model")
        files = dict(build_bundle(tmp_path / "model").files)
        values = json.loads((tmp_path / "model" / "config.json").read_text())
        return files | {"config.json": encoded(values | config)}

    def encoded(values):
        return json.dumps(values).encode()

    good, bad = CODE.encode(), f"{CODE}Path({ran!r}).touch()\n".encode()
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    chain = {name: f"mallory/evil--{value}" for name, value in auto_map.items()}
    llama, fox = LlamaForCausalLM(LlamaConfig(**TINY)), FoxForCausalLM(FoxConfig(**TINY))
    weights = saved(llama)
    config, commits = {"config.json": weights["config.json"]}, {}

    publish(config | {"pytorch_model.bin": pickle.dumps(Touch(ran))}, "mallory/pickle")
    torch.save({"lm_head.weight": Touch(ran)}, tmp_path / "zipped.bin")
    publish(config | {"pytorch_model.bin": tmp_path / "zipped.bin"}, "mallory/zipped-pickle")

    for name in ("evil", "base"):
        publish(saved(llama, model_type="elsewhere", auto_map=auto_map) | {"code.py": bad}, f"mallory/{name}")
    publish(saved(llama, model_type="elsewhere", auto_map=chain), "mallory/unknown-chain")
    publish(saved(fox, auto_map=chain), "mallory/chain")
    for i, values in enumerate(FIELDS):
        text = json.dumps(values).replace("RAN", ran)
        publish(saved(fox, **json.loads(text)), f"mallory/field-{i}")
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    publish(weights | {"code.py": bad, "tokenizer_config.json": encoded(tokenizer)}, "mallory/tokenizer")
    processor = {"processor_class": "Tokenizer", "auto_map": {"AutoProcessor": "code.Tokenizer"}}
    publish(weights | {"code.py": bad, "processor_config.json": encoded(processor)}, "mallory/processor")
    generate = f"{bad.decode()}\ndef generate(model, *args, **options):\n    return None\n".encode()
    publish(saved(fox) | {"custom_generate/generate.py": generate}, "mallory/generate-fox")
    publish(weights | {"custom_generate/generate.py": generate}, "mallory/generate-llama")
    pipelines = {"custom_pipelines": {"text-generation": {"impl": "code.Tokenizer", "pt": ["AutoModelForCausalLM"]}}}
    publish(saved(fox, **pipelines) | {"code.py": bad}, "mallory/pipeline")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "mallory/base"}
    publish(saved(fox) | {"adapter_config.json": encoded(adapter)}, "mallory/adapter")
    # a module that fails is not cached, so it also runs in the next check
    entrance = f"from pathlib import Path\nPath({ran!r}).touch()\nraise ImportError\n".encode()
    for branch in ("main", "v1"):
        publish(KERNEL | {"build/torch-cpu/__init__.py": entrance}, "mallory/kernel", type="kernel", branch=branch)
    publish({"data.py": bad, "README.md": b"---\nconfigs: []\n---\n"}, "mallory/script", type="dataset")
    for i, template in enumerate(TEMPLATES):
        files = {name: DEMO / name for name in ("tokenizer.json", "tokenizer_config.json")}
        publish(files | {"chat_template.jinja": template.replace("RAN", ran).encode()}, f"mallory/template-{i}")
    hmt = HMTWrapper.from_backbone(llama, HMTConfig(segment_length=16, sensory_tokens=4))
    publish(saved(hmt) | {"custom_generate/generate.py": generate}, "mallory/generate-hmt")
    states = [pickle.dumps(Touch(ran)), *HEADERS]
    for i, metadata in enumerate(({"weights": "0"}, {"hmt_state": f"__import__('pathlib').Path({ran!r}).touch()"})):
        save_file(
            {"tail": torch.ones(1, 1)}, tmp_path / f"state-{i}", metadata={"weights": weights_hash(hmt)} | metadata
        )
        states.append(tmp_path / f"state-{i}")
    for i, content in enumerate(states):
        publish({"state.safetensors": content}, f"mallory/state-{i}")
    hmt.config.backbone_in_checkpoint, hmt.config.backbone_name_or_path = False, "mallory/evil"
    publish(saved(hmt), "mallory/hmt")

    rows = encoded({"text": "a" * 1000}) + b"\n"
    publish({"data.jsonl.gz": gzip.compress(rows * 100_000)}, "mallory/bomb", type="dataset")  # 100 MB

    moved = {name: f"mallory/changed--{value}" for name, value in auto_map.items()}
    commits["changed-chain"] = publish(saved(llama, model_type="elsewhere", auto_map=moved), "mallory/changed-chain")
    files = saved(llama, model_type="elsewhere", auto_map=auto_map)
    commits["changed"] = publish(files | {"code.py": good}, "mallory/changed")
    publish({"code.py": bad}, "mallory/changed")
    commits["metric"] = publish({"metric.py": METRIC.encode()}, "mallory/metric", type="space")
    publish({"metric.py": f"{METRIC}Path({ran!r}).touch()\n".encode()}, "mallory/metric", type="space")

    (tmp_path / "commits.json").write_text(json.dumps(commits))
    run_client("malicious.py", ran, "commits.json", package=True)
    assert not Path(ran).exists()
    assert not [request for request in hub.log if "mallory/quantizer" in request]
