"""A mixture of sources resumes as any run, and each source is opened before any is packed."""

import csv
import json
import signal

import pytest
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

from faults import log, make, terminate_at
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx.training.data import load_datasets
from hf_longctx.training.run import train
from hf_longctx.training.trainer import LongContextTrainer


CHAT = [{"role": "user", "content": "Who forgets? " * 9}, {"role": "assistant", "content": "The fox. " * 30}]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model that trains in no time."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def mixture(tmp_path, llama):
    """Settings that mix a table of text and a conversation that is small for its share."""
    with open(tmp_path / "large.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "n"])
        table.writerows([f"Text {n}, which nothing remembers. " * 3, n] for n in range(60))
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    data = f"{tmp_path / 'large.csv'}=3,{tmp_path / 'chat.jsonl'}=1"
    paths = dict(data=data, model=llama, tokenizer=str(DEMO), output_dir=str(tmp_path / "run"))
    sizes = dict(max_length=32, per_device_train_batch_size=2, gradient_accumulation_steps=1, max_steps=3)
    return dict(recipe="lora", lora_dropout=0.1, **paths, **sizes)


@pytest.mark.parametrize("changes", [{}, {"packing": False}], ids=str)
def test_a_mixture_resumes_to_the_same_losses(changes, mixture, tmp_path, monkeypatch):
    run = mixture | changes
    assert train(make(run | {"output_dir": str(tmp_path / "whole")})) == 0
    with monkeypatch.context() as patch:
        patch.setattr(LongContextTrainer, "training_step", LongContextTrainer.training_step)
        terminate_at(1)
        assert train(make(run)) == signal.SIGTERM
    assert train(make(run)) == 0
    assert log(tmp_path / "run") == log(tmp_path / "whole")


def test_conversations_are_packed_again_where_the_chat_template_has_changed(mixture):
    """A run that was stopped before its first checkpoint has packed with the old one."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    args = make(mixture | dict(data=mixture["data"].split(",")[1].removesuffix("=1")))
    packed = []
    for header in ("", "<user>"):
        tokenizer.chat_template = header + tokenizer.chat_template
        packed.append(load_datasets(args, tokenizer, False)[0].datasets[0].tokens.tolist())
    assert packed[0] != packed[1]


def test_other_shares_and_sources_are_refused_before_anything_is_lost(mixture, tmp_path):
    train(make(mixture | {"max_steps": 1, "save_steps": 1}))
    (tmp_path / "run" / "model").rename(tmp_path / "model")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for data in (mixture["data"].replace("=3", "=1"), ",".join(mixture["data"].split(",")[::-1])):
        with pytest.raises(ValueError, match=r"other settings \(data: "):
            train(make(mixture | {"max_steps": 1, "save_steps": 1, "data": data}))
    assert before.items() <= {path: path.read_bytes() for path in before}.items()
