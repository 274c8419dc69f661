"""attn_implementation="auto" is a rule: our kernels for long training and prefill on a GPU, else SDPA."""

import pytest
import torch
from tiny_fox import TINY, make_from, tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, DynamicCache

from hf_longctx.fox import FoxConfig, PrunedCache, backend_fox
from hf_longctx.fox.backend_fox import KERNEL_TOKENS, choose_implementation, logit_bound_of_norms


def make():
    model = make_from(FoxConfig.pro(**TINY))
    model.set_attn_implementation("auto")
    return model


@pytest.fixture
def used(monkeypatch):
    """Return the names of the implementations that compute calls of models."""
    names, run = [], backend_fox.run_backend

    def run_backend(name, *args, **kwargs):
        names.append(name)
        return run(name, *args, **kwargs)

    monkeypatch.setattr(backend_fox, "run_backend", run_backend)
    return names


def test_without_a_gpu_auto_is_sdpa_and_is_not_saved(tmp_path, used):
    model, ids = make(), tokens()
    model.save_pretrained(tmp_path)
    assert "attn" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="auto")
    got = loaded(ids).logits
    assert loaded.config._attn_implementation == "auto" and set(used) == {"sdpa"}
    loaded.set_attn_implementation("sdpa")
    assert torch.equal(got, loaded(ids).logits)


def test_the_masks_of_generate_are_those_of_the_choice(monkeypatch, used):
    monkeypatch.setattr("hf_longctx.fox.backend_fox.choose_implementation", lambda *args: "eager")
    model, mask = make(), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    model.generate(tokens(2, 9), attention_mask=mask, max_new_tokens=3, pad_token_id=0)
    assert set(used) == {"eager"}


CASES = [  # rows, tokens of a row, changes of the configuration, with gradients, chosen
    (1, KERNEL_TOKENS, {}, True, "forgetting_triton"),
    (1, KERNEL_TOKENS, {}, False, "forgetting_triton"),
    (8, KERNEL_TOKENS // 8, {}, True, "forgetting_triton"),
    (1, 2048, {}, True, "sdpa"),
    (KERNEL_TOKENS, 1, {}, False, "sdpa"),
    (1, KERNEL_TOKENS, {"forget_gate": "none"}, True, "sdpa"),
    (1, KERNEL_TOKENS, {"attention_dropout": 0.1}, True, "sdpa"),
    (1, KERNEL_TOKENS, {"attention_dropout": 0.1}, False, "forgetting_triton"),
]


@pytest.mark.parametrize("rows, length, changes, training, chosen", CASES)
def test_the_rule(rows, length, changes, training, chosen, monkeypatch):
    """The tensor is on a GPU, but a fake one, so the test needs no GPU."""
    monkeypatch.setattr(backend_fox, "why_not", lambda head_dim, dtype, device: None)
    config = FoxConfig(**TINY, **changes)
    with FakeTensorMode(), torch.set_grad_enabled(training):
        x = torch.empty(rows, length, 32, device="cuda")
        assert choose_implementation(config, x) == chosen
        assert choose_implementation(config, x, cache=DynamicCache(config=config)) == chosen


@pytest.mark.parametrize("slots, chosen", [(None, "forgetting_triton"), (512, "sdpa")], ids=["dynamic", "static"])
def test_pruned_caches(slots, chosen, monkeypatch):
    config = FoxConfig.pro(**TINY)
    pruned = PrunedCache(make_from(config), 1e-4, max_cache_len=slots)
    monkeypatch.setattr(backend_fox, "why_not", lambda *args: None)
    with FakeTensorMode():
        x = torch.empty(1, KERNEL_TOKENS, 32, device="cuda", dtype=torch.bfloat16)
    assert choose_implementation(config, x, pruned) == chosen


def test_transforms_of_torch_func_take_sdpa(used):
    """No derivative is asked of kernels that have none."""
    model, embeds = make(), torch.randn(1, 5, 32)
    with sdpa_kernel(SDPBackend.MATH):
        torch.func.jvp(lambda x: model(inputs_embeds=x).logits, (embeds,), (embeds,))
        with forward_ad.dual_level():
            model(inputs_embeds=forward_ad.make_dual(embeds, embeds))
    assert set(used) == {"sdpa"}


def test_the_bound_of_the_logits_follows_new_weights_in_the_same_tensor():
    """FSDP2 gathers them so, without changing the version of the tensor."""
    attention = make().model.layers[0].self_attn
    before, _ = logit_bound_of_norms(attention, 4)
    attention.q_norm.weight.data.mul_(2)
    after, _ = logit_bound_of_norms(attention, 4)
    torch.testing.assert_close(after, 2 * before)
