"""The chunked loss is the model's own loss, with the same gradients and less memory."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_longctx.training.chunked_loss import chunk_loss


SIZES = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "llama": {},
    "fox": {},
    "qwen2": dict(tie_word_embeddings=True),
    "gemma2": dict(final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "granite": dict(logits_scaling=7.0),
    "cohere": dict(logit_scale=0.3),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, vocab_size=101),
    "falcon_h1": dict(lm_head_multiplier=0.4, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
}


def make_model(name):
    torch.manual_seed(0)
    sizes = MODELS[name] if name == "gpt2" else SIZES | MODELS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).double().eval()  # disables dropout
    with torch.no_grad():  # initial ones hardly differ from each other, and a wrong cap would not be seen
        model.get_output_embeddings().weight.mul_(20)
    return model


def make_batch(batch=3, length=17):
    ids = torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100), "use_cache": False}


def loss_and_gradients(model, **options):
    model.zero_grad()
    output = model(**make_batch(), **options)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name):
    model, options = make_model(name), {"num_items_in_batch": torch.tensor(77)}
    own, gradients = loss_and_gradients(model, **options)
    assert chunk_loss(model, logits_at_once=4 * 101)
    chunked, others = loss_and_gradients(model, **options)
    torch.testing.assert_close(chunked.loss, own.loss, rtol=1e-6, atol=0, check_dtype=False)
    assert gradients.keys() == others.keys()
    for key, gradient in gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(others[key], gradient, rtol=0, atol=1e-6 * scale, msg=key)
    assert chunked.logits.shape[-1] == 32


def test_an_adapter_of_the_head_is_trained_too():
    model = make_model("llama")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)).double()
    own, gradients = loss_and_gradients(adapted)
    assert chunk_loss(adapted.get_base_model(), logits_at_once=4 * 101)
    chunked, others = loss_and_gradients(adapted)
    torch.testing.assert_close(chunked.loss, own.loss, rtol=1e-6, atol=0, check_dtype=False)
    assert any("lm_head" in name for name in gradients)
    for key, gradient in gradients.items():
        torch.testing.assert_close(others[key], gradient, rtol=1e-5, atol=1e-8)


def test_logits_that_are_changed_in_an_unknown_way_are_not_chunked():
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 1.01)
    assert not chunk_loss(model)
    assert model(**make_batch()).logits.shape[-1] == 101 and model.loss_function is ForCausalLMLoss


def test_models_of_other_losses_and_of_other_decoders():
    model = make_model("llama")
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    assert not chunk_loss(model)
    mamba = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1))
    # before transformers 5.23 or so, it reads more of the decoder's output
    assert chunk_loss(mamba) == hasattr(TrainingArguments, "activation_checkpointing")
