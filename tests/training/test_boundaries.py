"""A kernel that takes the boundaries of packed documents gets them and no mask; losses are those of single ones."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from demo_model import DEMO, VOCABULARY
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainingArguments,
)

from hf_longctx import FoxConfig, FoxForCausalLM
from hf_longctx.training.boundaries import boundaries, takes_boundaries


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

from faults import log, make

from hf_longctx.training import run as run_module
from hf_longctx.training.run import train


SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
NAME = "flash_attention_stub"
CALLS = []
# before transformers 5.23 or so: gradient_checkpointing
CHECKPOINTING = next(
    n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n)
)


def stub(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **kwargs):
    """As FlashAttention, which reads the rows of a batch as one, and each document by itself."""
    CALLS.append((attention_mask, cu_seq_lens_q, max_length_q))
    B, heads, T, _ = query.shape
    ends = torch.arange(B + 1) * T if cu_seq_lens_q is None else cu_seq_lens_q
    q, k, v = (x.transpose(1, 2).flatten(0, 1).split(ends.diff().tolist()) for x in (query, key, value))
    done = [
        F.scaled_dot_product_attention(*(y.transpose(0, 1) for y in x), is_causal=True, scale=scaling, enable_gqa=True)
        for x in zip(q, k, v)
    ]
    return torch.cat(done, 1).transpose(0, 1).view(B, T, heads, -1), None


@pytest.fixture
def llama(tmp_path, monkeypatch):
    AttentionInterface.register(NAME, stub)
    set_attention = PreTrainedModel.set_attn_implementation  # which would look for the stub on the Hub
    monkeypatch.setattr(
        PreTrainedModel,
        "set_attn_implementation",
        lambda self, name: (
            setattr(self.config, "_attn_implementation", name) if name == NAME else set_attention(self, name)
        ),
    )
    CALLS.clear()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).save_pretrained(tmp_path / "llama")
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path / "llama")
    for number in range(30):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number:02}.txt").write_text("The fox forgets. " * (1 + number % 4))
    paths = dict(model=str(tmp_path / "llama"), data=str(tmp_path / "text"))
    sizes = dict(max_length=32, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3)
    sizes |= dict(recipe="lora", learning_rate=1e-2)
    return lambda name, **changes: make(dict(output_dir=str(tmp_path / name), **paths) | sizes | changes)


def losses(run):
    assert train(run) == 0
    return [entry.get("loss", entry.get("eval_loss")) for entry in log(Path(run.output_dir))]


def test_the_boundaries_are_those_of_documents_and_rows():
    found = boundaries(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]))
    assert found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 3, 5, 6, 10]
    assert found["max_length_q"] == found["max_length_k"] == 4 and found["cu_seq_lens_q"].dtype == torch.int32


def test_sequences_with_boundaries_have_the_losses_of_rows_with_a_mask(llama, tmp_path):
    evaluated = dict(eval_data=str(tmp_path / "text"), eval_steps=3)
    with_mask = losses(llama("mask", **evaluated))
    for checkpointing in (False, True):
        options = evaluated | {"attn_implementation": NAME, CHECKPOINTING: checkpointing}
        assert losses(llama(f"boundaries-{checkpointing}", **options)) == pytest.approx(with_mask, rel=1e-6)
    assert CALLS and all(mask is None and ends is not None for mask, ends, _ in CALLS)
    lengths = {length for _, ends, longest in CALLS for length in ends.diff().tolist() if length <= longest}
    assert len(lengths) > 3 and max(lengths) <= 32, "documents are attended to one by one"


def test_a_model_that_hands_no_boundaries_on_is_refused(llama, monkeypatch):
    monkeypatch.setattr(run_module, "takes_boundaries", lambda model: False)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM sees the boundaries .* in passes of one sequence only.*--packing false"
    ):
        train(llama("run", attn_implementation=NAME))


def test_boundaries_are_given_to_flash_attention_alone_and_a_fox_makes_its_own(llama):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert not takes_boundaries(model)
    model.set_attn_implementation(NAME)
    assert takes_boundaries(model) and not CALLS
    model.model.forward = lambda input_ids, use_cache=None: None
    assert not takes_boundaries(model)
    fox = FoxForCausalLM(FoxConfig(**SIZES))
    fox.config._attn_implementation = NAME
    assert not takes_boundaries(fox)
