"""Properties that are read from a model before it runs: its position table and its identity."""

import pytest
import torch
import transformers
from tiny_models import LLAMA, build, tiny_llama
from torch import nn

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.metrics.run.model import position_limit, weights_hash


GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2}

BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "is_decoder": True}


@pytest.mark.parametrize(
    "name, config, limit",
    [
        ("gpt2", GPT2 | {"n_positions": 12}, 12),
        ("ctrl", GPT2 | {"n_positions": 12, "dff": 8}, 12),
        ("opt", LLAMA | {"ffn_dim": 8, "word_embed_proj_dim": 8, "max_position_embeddings": 12}, 12),
        ("roberta", BERT | {"max_position_embeddings": 12, "pad_token_id": 1}, 10),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_position_table_is_found(name, config, limit):
    """The limit is exact: the model cannot read one more token."""
    model = build(name, **config)
    assert position_limit(model) == limit
    ids = torch.full((1, limit + 1), 5)
    with torch.no_grad():
        model(ids[:, :limit])
        with pytest.raises((IndexError, RuntimeError)):
            model(ids)


@pytest.mark.parametrize(
    "name, config",
    [
        ("llama", LLAMA | {"max_position_embeddings": 12}),
        ("xglm", {"d_model": 8, "num_layers": 1, "attention_heads": 2, "ffn_dim": 8, "max_position_embeddings": 12}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_position_table(name, config):
    model = build(name, **config)
    assert position_limit(model) is None
    with torch.no_grad():
        model(torch.full((1, 20), 5))


def test_position_tables_of_other_kinds():
    """A bare learned parameter counts; the table of an image encoder, relative positions and masks do not."""
    model = nn.Module()
    model.vision_tower = nn.Module()
    model.vision_tower.position_embedding = nn.Embedding(3, 4)
    model.relative_position_embedding = nn.Embedding(3, 4)
    model.register_buffer("position_ids", torch.arange(5)[None])
    assert position_limit(model) is None
    model.pos_emb = nn.Parameter(torch.zeros(1, 7, 4))
    assert position_limit(model) == 7


def test_a_model_is_its_weights_and_its_configuration(tmp_path):
    """The base of RoPE is in no parameter, and a folder, a dtype of loading or a way to run changes no model."""
    model = tiny_llama()
    hashed = weights_hash(model)
    assert weights_hash(tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0})) != hashed
    model.save_pretrained(tmp_path)
    model.config.use_cache = False
    assert weights_hash(transformers.LlamaForCausalLM.from_pretrained(tmp_path)) == hashed == weights_hash(model)
    wrapper = HMTWrapper.from_backbone(tiny_llama(), HMTConfig(segment_length=16, sensory_tokens=4))
    hashed = weights_hash(wrapper)
    wrapper.configure(segment_length=32)
    assert weights_hash(wrapper) != hashed


class Packed(torch.Tensor):
    """A quantized type that knows matrix products only."""

    def flatten(self, *_):
        raise NotImplementedError("flatten")


def test_values_that_cannot_be_indexed_are_left_out():
    model = tiny_llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Packed))
    hashed = weights_hash(model)
    assert hashed != weights_hash(tiny_llama())
    model.model.norm.weight.data += 1
    assert weights_hash(model) != hashed


def hash_while_spread():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = tiny_llama()
    hashed, mesh = weights_hash(model), init_device_mesh("cpu", (2,))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))
    assert weights_hash(model) == hashed


def test_a_model_spread_over_processes_is_the_same_model(two_processes):
    two_processes(hash_while_spread)
