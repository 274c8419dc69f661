"""Checkpoint files of the official HMT and RMT code become folders that load, with the logits of their authors."""

import json
from pathlib import Path

import pytest
import torch
from mistakes import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTForCausalLM

from hf_longctx.hmt import HMTConfig, HMTWrapper, official_parameters
from scripts.convert_hmt import load_official, main


SIZES = {"segment_length": 8, "sensory_tokens": 3}


def tiny_llama(vocab_size=4096, **settings):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = LlamaConfig(vocab_size=vocab_size, initializer_range=0.2, **sizes, **settings)
    return LlamaForCausalLM(config).eval()


def official_file(path, model, backbone=None, **changed):
    """Save a model under DDP as the official code does; None in `changed` leaves a name out."""
    params = {name: x.detach() for name, x in official_parameters(model).items()}
    backbone = (model.backbone if backbone is None else backbone).state_dict()
    params |= {f"memory_cell.model.{name}": x for name, x in backbone.items()}
    params |= {"memory_cell.mem_map.linear.weight": torch.zeros(2, 2)} | changed
    torch.save({f"module.{name}": x for name, x in params.items() if x is not None}, path)
    return path


@pytest.fixture
def model():
    return HMTWrapper.from_backbone(tiny_llama(), HMTConfig(recall_mode="paper", **SIZES))


@pytest.fixture
def base(model, tmp_path):
    """Save the wrapped model with other weights, and return its folder."""
    path = tmp_path / "base"
    LlamaForCausalLM(model.backbone.config).save_pretrained(path)
    return path


@pytest.mark.parametrize("case", ["llama_full", "llama_rmt_m2", "opt_full"])
def test_the_command_makes_a_folder_with_the_logits_of_the_authors(case, golden, tmp_path, capsys):
    manifest = json.loads((golden / "hmt" / "manifest.json").read_text())
    (info,) = [row for row in manifest["cases"] if row["name"] == case]
    tensors, of_backbone = load_file(golden / "hmt" / info["file"]), manifest["backbones"][info["backbone"]]
    model_class = {"llama": LlamaForCausalLM, "opt": OPTForCausalLM}[info["backbone"]]
    config = {k: v for k, v in of_backbone["config"].items() if k != "attn_implementation"}
    model_class.config_class(**config, architectures=[model_class.__name__]).save_pretrained(tmp_path / "base")
    weights = load_file(golden / "hmt" / of_backbone["file"])
    params = {f"memory_cell.model.{name}": x for name, x in weights.items()}
    params |= {name.removeprefix("params/"): x for name, x in tensors.items() if name.startswith("params/")}
    torch.save({"model_state_dict": params, "iteration": 3}, tmp_path / "model.pth")  # RMT's trainer saves such files
    sizes = {"--segment-length": info["L"], "--sensory-tokens": info["k"], "--memory-size": info.get("N")}
    options = [word for name, size in sizes.items() if size is not None for word in (name, str(size))]
    options += ["--base", str(tmp_path / "base")]
    command = [str(tmp_path / "model.pth"), str(tmp_path / "hmt"), *options]
    main(command)
    assert "does not have a tokenizer" in capsys.readouterr().out
    hmt = AutoModelForCausalLM.from_pretrained(tmp_path / "hmt")
    assert type(hmt) is HMTWrapper and hmt.config.recall_mode == "paper" and hmt.config.recall == info["recall"]
    logits = hmt(tensors["inputs/input_ids"]).logits
    torch.testing.assert_close(logits, tensors["expected/logits"], atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        main(command)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # from PEFT
@pytest.mark.parametrize("tied", [False, True])
def test_lora_is_added_to_its_layers(model, tied, tmp_path):
    peft = pytest.importorskip("peft")
    backbone = tiny_llama(tie_word_embeddings=tied)
    backbone.config.save_pretrained(tmp_path)
    targets = ["embed_tokens", "q_proj", "down_proj"]
    settings = dict(r=8, lora_alpha=32, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    lora = peft.get_peft_model(backbone, peft.LoraConfig(**settings)).eval()
    source = official_file(tmp_path / "model.pth", model, lora)
    loaded = load_official(source, tmp_path, **SIZES).backbone.eval()
    ids = torch.arange(9)[None]
    torch.testing.assert_close(loaded(ids).logits, lora(ids).logits, atol=1e-5, rtol=0)


def test_weights_that_the_file_lacks_are_those_of_the_base(model, base, tmp_path):
    params = {name: x.detach() for name, x in official_parameters(model).items()}
    torch.save(params, tmp_path / "model.pth", _use_new_zipfile_serialization=False)
    loaded = load_official(tmp_path / "model.pth", base, **SIZES)
    weights = load_file(base / "model.safetensors")
    assert torch.equal(loaded.backbone.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(loaded.memory.wq, model.memory.wq) and loaded.config.memory_size == 100


class Touch:
    """An object whose pickle creates a file when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def holding(content):
    def mistake(model, base, path):
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        load_official(path, base, **SIZES)

    return mistake


def changing(**changed):
    def mistake(model, base, path):
        load_official(official_file(path, model, **changed), base, **SIZES)

    return mistake


def of_another_base(model, base, path):
    tiny_llama(vocab_size=61).config.save_pretrained(base)
    load_official(official_file(path, model), base, **SIZES)


NORM, ARMT = "memory_cell.model.model.norm.weight", "memory_cell.model.model.layers.0.W_mq.weight"
MISTAKES = [
    refused("a pickle that runs code", holding({"memory_cell.memory": Touch()}), "holds more than tensors"),
    refused("an empty file", holding(b""), "is damaged"),
    refused("a text file", holding(b"version https://git-lfs.github.com/spec/v1"), "is damaged"),
    refused("a text file that is also a pickle", holding(b"hello"), "is damaged"),
    refused("a list", holding([torch.ones(1)]), "does not have memory_cell.memory"),
    refused("a folder", lambda model, base, path: load_official(base, base, **SIZES), "must be a file of weights"),
    refused("a file of ARMT", changing(**{ARMT: torch.ones(1)}), "a checkpoint of ARMT"),
    refused("an unknown name", changing(other=torch.ones(1)), r"unknown: \['other'\]"),
    refused("no projection", changing(**{"cross_attn.wk.weight": None}), r"Missing: \['cross_attn.wk.weight'\]"),
    refused("an absent tensor", changing(**{NORM: None}), r"missing keys: model\.norm\.weight\)\. --base must be"),
    refused("another base", of_another_base, "does not hold the weights of .*mismatched keys"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes(mistake, model, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake.check(model, base, tmp_path / "model.pth")
    assert not Path("ran").exists() and not Path("new").exists()
