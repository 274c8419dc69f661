"""Of conversations the assistant's tokens are scored, and packed ones have the losses that they have alone."""

import json

import pytest
import torch
from demo_model import DEMO
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx.training.conversations import SCORED, encode_conversation
from hf_longctx.training.data import FLAGS, TokenDataset, pack, stack


CHATML = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}</s>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
MARKED = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}{% else %}{{ message.content }}\
{% endif %}
{% endfor %}"""
LAST_ONLY = "{% for message in messages %}{{ message.content if loop.last else '...' }}{% endfor %}"
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who forgets?"},
    {"role": "assistant", "content": "The fox."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It no longer needs it."},
]
ROWS = [
    {"messages": TURNS},
    {"messages": TURNS[1:3]},
    {"messages": [TURNS[1], {"role": "assistant", "content": "Whoever has a gate."}]},
    {"messages": TURNS[:2]},
]


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = CHATML
    return tokenizer


def scored_text(row, tokenizer):
    ids, flags = encode_conversation(row, tokenizer)
    return tokenizer.decode(ids[flags & SCORED > 0])


def test_the_assistants_tokens_are_scored(tokenizer):
    assert scored_text(ROWS[0], tokenizer) == "The fox.</s>\nIt no longer needs it.</s>\n"
    halves = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    assert scored_text(halves, tokenizer) == "It no longer needs it.</s>\n"
    ids, _ = encode_conversation(ROWS[0], tokenizer)
    assert ids.tolist() == tokenizer.apply_chat_template(TURNS, return_dict=False)
    tokenizer.chat_template = MARKED
    assert scored_text(ROWS[0], tokenizer) == "The fox.</s>It no longer needs it.</s>"


def test_of_a_prompt_and_its_completion_the_completion_is_scored(tokenizer):
    assert (
        scored_text({"prompt": "The fox", "completion": " forgets."}, tokenizer) == f" forgets.{tokenizer.eos_token}"
    )


def test_a_template_that_rewrites_turns_is_refused(tokenizer):
    tokenizer.chat_template = LAST_ONLY
    with pytest.raises(ValueError, match="writes a turn otherwise when another one follows"):
        encode_conversation(ROWS[0], tokenizer)


def test_packed_conversations_have_the_losses_that_they_have_alone(tokenizer, tmp_path):
    source, target = tmp_path / "chats.jsonl", tmp_path / "tokens.npy"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pack(str(source), tokenizer, target)
    alone = [encode_conversation(row, tokenizer) for row in ROWS[:3]]  # the last has no answer
    length = sum(len(ids) for ids, _ in alone)
    rows = TokenDataset(target, length, tokenizer.eos_token_id, len(tokenizer))
    assert len(rows) == 1 and target.with_suffix(FLAGS).exists()
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).double()
    total = 0.0
    for ids, flags in alone:
        ids = torch.from_numpy(ids)[None]
        labels = ids.masked_fill(torch.from_numpy(flags & SCORED == 0)[None], -100)
        total += model(ids, labels=labels, num_items_in_batch=1).loss.item()
    packed = model(**stack([rows[0]]), use_cache=False, num_items_in_batch=1).loss
    assert packed.item() == pytest.approx(total, rel=1e-6)
    source.write_text("The fox forgets what it no longer needs.")
    pack(str(source.rename(tmp_path / "text.txt")), tokenizer, target)
    assert not target.with_suffix(FLAGS).exists()


def test_a_file_without_answers_is_refused(tokenizer, tmp_path):
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps(ROWS[3]) + "\n")
    with pytest.raises(ValueError, match="holds no conversation in which an assistant answers"):
        pack(str(source), tokenizer, tmp_path / "tokens.npy")
