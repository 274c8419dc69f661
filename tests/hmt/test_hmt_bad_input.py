"""Every mistake gets one error that says what to do."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    LlamaForCausalLM,
    LlamaModel,
    RwkvConfig,
    RwkvForCausalLM,
    XLNetLMHeadModel,
)

from hf_longctx.hmt import HMTConfig, HMTWrapper, from_official, official_parameters


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"segment_length": 33}, "must be above sensory_tokens . memory_tokens = 32 . 1"),
        ({"memory_tokens": 2}, "with recall it must be 1"),
        ({"memory_tokens": 0}, "memory_tokens is 0; it must be at least 1"),
        ({"sensory_tokens": -1}, "sensory_tokens is -1; it must be at least 0"),
        ({"sum_fraction": 0.0}, "would read 0 of 512"),
        ({"sum_fraction": 1.5}, "would read 768 of 512"),
        ({"recall_mode": "fast"}, "recall_mode is 'fast'"),
        ({"recall_init": "zero"}, "recall_init is 'zero'"),
        ({"loss_scope": "first"}, "loss_scope is 'first'"),
        ({"memory_size": 0}, "memory_size is 0"),
        ({"recalled_pages": 0}, "recalled_pages is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"recalled_pages": 2, "memory_size": None}, "pages hold what recall drops beyond memory_size"),
        ({"recalled_pages": 2, "recall": False}, "pages hold what recall drops beyond memory_size"),
        ({"bptt_segments": 0}, "bptt_segments is 0"),
        (
            {"backbone_config": {"model_type": "nothing"}},
            "'nothing', which this version of transformers does not know",
        ),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        HMTConfig(**settings)


def test_a_whole_segment_as_an_integer():
    assert HMTConfig(sum_fraction=1).summary_length == 512


def test_a_tie_goes_to_the_even_number():
    assert [HMTConfig(segment_length=n, sensory_tokens=0).summary_length for n in (13, 15, 16)] == [6, 8, 8]


def test_too_few_positions(llama):
    with pytest.raises(ValueError, match=r"allows 64 positions, and a segment needs 66.*segment_length to at most 62"):
        HMTWrapper.from_backbone(llama, HMTConfig(segment_length=64, sensory_tokens=0))
    with pytest.raises(ValueError, match="Lower sensory_tokens"):
        HMTWrapper.from_backbone(llama, HMTConfig(segment_length=100, sensory_tokens=50))
    model = HMTWrapper.from_backbone(llama, HMTConfig(segment_length=62, sensory_tokens=0))
    assert model.config.positions_per_segment == 64


class TokensOnly(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask)


def test_unsuitable_backbones(llama):
    config = HMTConfig(segment_length=8, sensory_tokens=3)
    with pytest.raises(ValueError, match=r"TokensOnly.forward takes no inputs_embeds"):
        HMTWrapper.from_backbone(TokensOnly(llama.config), config)
    with pytest.raises(ValueError, match="LlamaModel has no head"):
        HMTWrapper.from_backbone(LlamaModel(llama.config), config)
    bert = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=61)
    with pytest.raises(ValueError, match="BertModel"):
        HMTWrapper.from_backbone(BertModel(bert), config)
    llama.model.embed_tokens = None
    with pytest.raises(ValueError, match="LlamaForCausalLM has no input embeddings"):
        HMTWrapper.from_backbone(llama, config)
    with pytest.raises(ValueError, match="no backbone_config"):
        HMTWrapper(HMTConfig())


BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 61}
XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 61}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "model_class, sizes, remedy",
    [
        (BertLMHeadModel, {**BERT, "initializer_range": 0.3}, {"is_decoder": True}),
        (XLNetLMHeadModel, {**XLNET, "initializer_range": 0.3}, {"attn_type": "uni"}),
    ],
    ids=["BERT", "XLNet"],
)
def test_a_backbone_that_sees_ahead(model_class, sizes, remedy, dtype):
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes)).to(dtype)
    model.dropout_of_mine = torch.nn.Dropout().eval()
    modes = [m.training for m in model.modules()]
    with pytest.raises(ValueError, match=rf"{model_class.__name__} is not causal.*is_decoder=True.*attn_type='uni'"):
        HMTWrapper.from_backbone(model, HMTConfig(segment_length=8, sensory_tokens=3))
    assert [m.training for m in model.modules()] == modes and any(modes) and not all(modes)
    good = model_class(model_class.config_class(**sizes, **remedy)).to(dtype)
    assert HMTWrapper.from_backbone(good, HMTConfig(segment_length=8, sensory_tokens=3)).training


def test_tokens(make_wrapper, tokens):
    model = make_wrapper()
    for bad in (None, tokens[0], tokens[:, :0], tokens[:0]):
        with pytest.raises(ValueError, match="at least one token"):
            model(bad)
    with pytest.raises(ValueError, match="labels has shape"):
        model(tokens, labels=tokens[:, 1:])
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(tokens, attention_mask=torch.ones(2, 50))
    with pytest.raises(ValueError, match="labels need all logits"):
        model(tokens, labels=tokens, logits_to_keep=1)
    with pytest.raises(ValueError, match="labels need all logits"):
        model(tokens, labels=tokens, logits_to_keep=torch.arange(3))
    for positions in (torch.tensor([], dtype=torch.long), torch.tensor([43]), torch.tensor([-1]), torch.tensor([[0]])):
        with pytest.raises(ValueError, match="a list of positions of this call, 0 to 42"):
            model(tokens, logits_to_keep=positions)
    with pytest.raises(ValueError, match="logits_to_keep is -1"):
        model(tokens, logits_to_keep=-1)
    for positions in (torch.ones(43, dtype=torch.bool), torch.ones(2)):
        with pytest.raises(ValueError, match="must list positions as integers"):
            model(tokens, logits_to_keep=positions)
    with pytest.raises(ValueError, match=r"score_from is 4.*pass labels"):
        model(tokens, score_from=4)
    for position in (-1, 8):
        with pytest.raises(ValueError, match="within a segment, 0 to 7"):
            model(tokens, labels=tokens, score_from=position)
    with pytest.raises(ValueError, match="does not use position_ids"):
        model(tokens, position_ids=torch.arange(43)[None])
    with pytest.raises(ValueError, match="does not use inputs_embeds"):
        model(tokens, inputs_embeds=torch.zeros(2, 43, 16))


def test_padding(make_wrapper, tokens):
    ones = torch.ones_like(tokens)
    right, inside, empty = (ones.clone() for _ in range(3))
    right[1, 30:] = inside[1, 5:7] = empty[1] = 0
    causal, paper = make_wrapper(), make_wrapper(recall_mode="paper")
    for model in (causal, paper):
        with pytest.raises(ValueError, match="between tokens"):
            model(tokens, attention_mask=inside)
        with pytest.raises(ValueError, match="all padding"):
            model(tokens, attention_mask=empty)
    with pytest.raises(ValueError, match="all padding"):
        causal.generate(tokens, attention_mask=empty, max_new_tokens=2)
    with pytest.raises(ValueError, match="padded on the right"):
        paper(tokens, attention_mask=right)
    with pytest.raises(ValueError, match="padded on the right"):
        causal.generate(tokens, attention_mask=right, max_new_tokens=2)
    with pytest.raises(ValueError, match="all padding"):
        causal(tokens, attention_mask=torch.zeros_like(tokens), use_cache=True)


def test_a_backbone_that_ignores_the_mask(tokens):
    sizes = {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 61}
    rwkv = RwkvForCausalLM(RwkvConfig(**sizes)).eval()
    model = HMTWrapper.from_backbone(rwkv, HMTConfig(segment_length=8, sensory_tokens=3, recall_mode="paper"))
    mask = torch.ones_like(tokens)
    model(tokens, attention_mask=mask)
    mask[1, :9] = 0
    with pytest.raises(NotImplementedError, match="RwkvForCausalLM ignores the attention mask"):
        model(tokens, attention_mask=mask)


def test_nothing_to_score_costs_nothing(make_wrapper, tokens):
    loss = make_wrapper()(tokens, labels=torch.full_like(tokens, -100)).loss
    assert loss == 0


def test_official_parameters(llama, make_wrapper):
    params = dict(official_parameters(make_wrapper()))
    settings = {"segment_length": 8, "sensory_tokens": 3, "memory_size": 4}
    from_official(llama, {**params, "memory_cell.mem_map.linear.weight": torch.zeros(16, 16)}, **settings)
    with pytest.raises(ValueError, match=r"unknown .'typo'"):
        from_official(llama, {**params, "typo": torch.zeros(1)}, **settings)
    with pytest.raises(ValueError, match=r"missing .'mem'"):
        from_official(llama, {k: v for k, v in params.items() if k != "mem"}, **settings)
    with pytest.raises(ValueError, match=r"memory_cell.memory has shape \(1, 8\)"):
        from_official(llama, {**params, "memory_cell.memory": torch.zeros(1, 8)}, **settings)
    weights = {f"memory_cell.model.{k}": torch.zeros_like(v) for k, v in llama.state_dict().items()}
    assert not from_official(llama, {**params, **weights}, **settings).backbone.lm_head.weight.any()
