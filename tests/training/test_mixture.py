"""Texts are mixed in the shares that are asked for, and a mixture goes on as any run."""

import csv
import json
import random
import signal
from itertools import islice

import pytest
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

from faults import log, make, terminate_at
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx.training.mixture import Mixture, StreamedMixture
from hf_longctx.training.prepare import prepare_datasets
from hf_longctx.training.run import train
from hf_longctx.training.trainer import LongContextTrainer


@pytest.mark.parametrize("seed", range(20))
def test_a_reading_has_all_rows_of_all_texts_in_their_shares(seed):
    rng = random.Random(seed)
    parts = [[(part, row) for row in range(rng.randint(1, 60))] for part in range(rng.randint(2, 4))]
    shares = [rng.randint(1, 9) for _ in parts]
    shares = [share / sum(shares) for share in shares]
    mixture = Mixture(parts, shares)
    rows = [mixture[i] for i in range(len(mixture))]
    for number, (part, share) in enumerate(zip(parts, shares)):
        own = [row for row in rows if row[0] == number]
        times = [own.count(row) for row in part]
        assert min(times) >= 1 and max(times) - min(times) <= 1
        assert abs(len(own) - share * len(rows)) <= len(parts)
    once = Mixture(parts, None)
    assert [once[i] for i in range(len(once))] == [row for part in parts for row in part]
    assert min(max(rows.count(row) for row in part) for part in parts) == 1, "of one text no row is read twice"


def test_a_stream_never_strays_from_its_shares_by_more_than_a_row():
    shares = [0.6, 0.3, 0.1]
    stream = StreamedMixture([iter(lambda n=n: n, None) for n in range(3)], shares)
    drawn = list(islice(stream, 1000))
    for count in (10, 77, 1000):
        for number, share in enumerate(shares):
            assert abs(drawn[:count].count(number) - share * count) <= 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model that trains in no time."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def mixture(tmp_path, llama):
    """A table with another column than text, a text that is small for its share, and settings that mix both."""
    with open(tmp_path / "large.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["body", "n"])
        table.writerows([f"Text {n}, which nothing remembers. " * 3, n] for n in range(60))
    (tmp_path / "small.jsonl").write_text(json.dumps({"body": "The fox forgets what it no longer needs. " * 9}))
    data = f"{tmp_path / 'large.csv'}=3,{tmp_path / 'small.jsonl'}=1"
    paths = dict(data=data, model=llama, tokenizer=str(DEMO), output_dir=str(tmp_path / "run"), text_column="body")
    sizes = dict(max_length=32, per_device_train_batch_size=2, gradient_accumulation_steps=1, max_steps=3)
    return dict(recipe="lora", lora_dropout=0.1, **paths, **sizes)


@pytest.mark.parametrize("changes", [{"streaming": True}, {}, {"packing": False}], ids=str)
def test_a_mixture_resumes_to_the_same_losses(changes, mixture, tmp_path, monkeypatch):
    run = mixture | changes
    assert train(make(run | {"output_dir": str(tmp_path / "whole")})) == 0
    with monkeypatch.context() as patch:
        patch.setattr(LongContextTrainer, "training_step", LongContextTrainer.training_step)
        terminate_at(1)
        assert train(make(run)) == signal.SIGTERM
    assert train(make(run)) == 0
    assert log(tmp_path / "run") == log(tmp_path / "whole")


@pytest.mark.parametrize("missing", ["data", "eval_data"])
def test_sources_are_opened_before_any_is_packed(missing, mixture, tmp_path):
    mixture |= {missing: f"{mixture['data']},{tmp_path / 'nothere.csv'}=1"}
    with pytest.raises(FileNotFoundError, match=r"nothere\.csv is neither a file nor a folder"):
        train(make(mixture))
    assert not (tmp_path / "run" / "data").exists()


def test_conversations_in_a_mixture_of_streams_are_refused_before_the_run_begins(mixture, tmp_path, capsys):
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    small = tmp_path / "text.jsonl"
    small.write_text(json.dumps({"text": "The fox forgets what it no longer needs. " * 9}))
    with pytest.raises(ValueError, match="must hold text to be streamed, got conversations"):
        train(make(mixture | dict(data=f"{small}=1,{chats}=1", streaming=True, text_column=None)))
    assert "step" not in capsys.readouterr().err


def test_conversations_are_packed_again_where_the_chat_template_has_changed(mixture, tmp_path, monkeypatch):
    """A run that was stopped before its first checkpoint has packed with the old one."""
    chats, tokenizer = tmp_path / "chats.jsonl", AutoTokenizer.from_pretrained(DEMO)
    turns = [{"role": "user", "content": "Who forgets? " * 9}, {"role": "assistant", "content": "The fox. " * 9}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    args = make(mixture | dict(data=str(chats), text_column=None))
    packed = []
    for header in ("", "<user>"):
        tokenizer.chat_template = header + tokenizer.chat_template
        packed.append(prepare_datasets(args, tokenizer, False).train.tokens.tolist())
    assert packed[0] != packed[1]


def test_other_shares_and_texts_are_refused_before_anything_is_lost(mixture, tmp_path):
    train(make(mixture | {"max_steps": 1, "save_steps": 1}))
    (tmp_path / "run" / "model").rename(tmp_path / "model")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"other settings \(data: "):
        train(make(mixture | {"max_steps": 1, "save_steps": 1, "data": mixture["data"].replace("=3", "=1")}))
    with pytest.raises(ValueError, match="is not the data that the run in"):
        train(make(mixture | {"max_steps": 1, "data": ",".join(mixture["data"].split(",")[::-1])}))
    assert before.items() <= {path: path.read_bytes() for path in before}.items()
