"""A FoX whose kernels come from a repository of the Hub is the same FoX; other models get causal attention by them.

The kernel is the one that `build_kernel` makes, imported as the library `kernels` does, which is not needed here.
tests/hub/test_kernel.py loads it by its name.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch


pytest.importorskip("triton")
from test_triton_backend import (
    CACHES,
    DEVICE,
    close_gates,
    draw,
    holes,
    loss_and_gradients,
    make,
    pytestmark,  # noqa: F401
    rows,
)
from tiny_fox import check_logits, logits
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
)
from transformers.masking_utils import sdpa_mask

from hf_longctx.fox import PrunedCache, backend_fox, triton_fox
from hf_longctx.fox.backend_fox import check_implementation
from hf_longctx.hub import build_kernel


NAME = "alice/forgetting-attention@0123abc"


def register(name, function):
    """As transformers does once it has loaded a kernel."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def load(file, name):
    """As the library does."""
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    for path, content in build_kernel("alice/forgetting-attention")[f"v{triton_fox.FOX_INTERFACE}"].files.items():
        folder.joinpath(path).parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(path).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    module = load(folder / "build" / "torch-cuda" / "__init__.py", "_forgetting_attention_of_a_test")
    register(NAME, module.flash_attn_forward)
    yield module
    for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping, backend_fox.GATED):
        mapping.pop(NAME, None)
    for name in [name for name in sys.modules if name.startswith("_forgetting_attention")]:
        del sys.modules[name]


@pytest.fixture
def without_own_kernels(kernel, monkeypatch):
    """What must be the same is computed before."""

    def call():
        def fail(*args):
            raise AssertionError("the model's own kernel was called")

        for name in ("fox_forward", "fox_backward", "fox_decode"):
            monkeypatch.setattr(triton_fox, name, fail)

    return call


def with_kernel(model):
    model.config._attn_implementation = model.get_correct_attn_implementation(NAME)
    return model


def test_operators_are_in_the_namespace_of_the_kernel(kernel):
    assert {"fox_forward", "fox_backward", "fox_decode"} <= set(dir(getattr(torch.ops, kernel.__name__)))


def test_older_versions_of_the_library_get_the_same_functions(kernel):
    file = Path(kernel.__file__).parent / "forgetting_attention" / "__init__.py"
    older = load(file, "_forgetting_attention_of_an_older_loader")
    assert set(kernel.__all__) <= set(vars(older)) and older.FOX_INTERFACE == kernel.FOX_INTERFACE


def test_logits_and_gradients_are_the_same(without_own_kernels):
    ids, kwargs = rows("left padding")
    want, expected = loss_and_gradients(make("llama"), ids, **kwargs)
    without_own_kernels()
    got, gradients = loss_and_gradients(with_kernel(make("llama", "sdpa")), ids, **kwargs)
    assert torch.equal(got, want)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


def test_decoding_is_the_same(without_own_kernels):
    def run(model):
        past, seen = CACHES["static"](model.config), holes(2, 20, (0, 0), (0, 6))
        chunks = [(ids[:, :18], seen[:, :18]), (ids[:, 18:19], seen[:, :19]), (ids[:, 19:], seen)]
        return torch.cat([logits(model, x, attention_mask=mask, cache=past) for x, mask in chunks], dim=1)

    ids = draw(2, 20)
    want = run(make("llama"))
    without_own_kernels()
    assert torch.equal(run(with_kernel(make("llama", "sdpa"))), want)


def test_a_pruned_cache_is_the_same(without_own_kernels):
    def run(model):
        cache = PrunedCache(model, prune_every=8)
        pieces = [logits(model, chunk, cache=cache) for chunk in draw(1, 30).split([20, 1, 9], dim=1)]
        assert cache.dropped.min() > 0
        return torch.cat(pieces, dim=1)

    want = run(close_gates(make("pro with rope"), -12.0))
    without_own_kernels()
    assert torch.equal(run(with_kernel(close_gates(make("pro with rope", "sdpa"), -12.0))), want)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_another_interface_is_refused_with_the_branch_to_take(kernel, monkeypatch):
    monkeypatch.setattr(kernel, "FOX_INTERFACE", 2)
    with pytest.raises(ValueError, match=r"has interface 2 .* calls interface 1.*'alice/forgetting-attention@v1'"):
        check_implementation(NAME, 8)


def test_another_kernel_is_refused(kernel):
    register("alice/attention", lambda *args, **kwargs: None)
    try:
        with pytest.raises(ValueError, match="'alice/attention' does not compute forgetting attention"):
            check_implementation("alice/attention", 8)
    finally:
        AttentionInterface._global_mapping.pop("alice/attention")


def test_flash_attention_of_the_hub_is_flash_attention(monkeypatch):
    """transformers takes it where flash_attn is not installed; then it has to have the borders of documents, too."""
    name, calls = "kernels-community/flash-attn2", []

    def attention(module, q, k, v, mask, **kwargs):
        calls.append(kwargs["cu_seq_lens_q"].tolist())
        return q.transpose(1, 2), None

    monkeypatch.setattr(backend_fox, "flash_attention_forward", attention)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    try:
        check_implementation(name, 8)
        model = make("llama", "sdpa")
        model.config._attn_implementation = name
        model(draw(1, 5), position_ids=torch.tensor([[0, 1, 0, 1, 2]], device=DEVICE), use_cache=False)
    finally:
        for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
            mapping.pop(name)
    assert calls == [[0, 2, 5]]


# --- other models ----------------------------------------------------------------------------------------------------

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4)


def other(config_class, name, **options):
    torch.manual_seed(0)
    config = config_class(**SIZES, num_key_value_heads=2, **options)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    model.config._attn_implementation = name
    return model


@pytest.mark.parametrize(
    "config_class, spans, options",
    [
        (LlamaConfig, [(15, 18), (0, 0)], {}),
        (MistralConfig, [(0, 4), (0, 0)], {"sliding_window": 6}),
    ],
    ids=["right padding", "window"],
)
def test_other_models_get_causal_attention(kernel, config_class, spans, options):
    ids, mask = draw(2, 18), holes(2, 18, *spans)
    got, want = (logits(other(config_class, name, **options), ids, attention_mask=mask) for name in (NAME, "sdpa"))
    check_logits(got[mask.bool()], want[mask.bool()])


def test_another_model_generates(kernel):
    settings = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, attention_mask=holes(2, 9, (0, 0), (0, 4)))
    settings |= dict(cache_implementation="static", disable_compile=True)
    got, want = (other(LlamaConfig, name).generate(draw(2, 9), **settings) for name in (NAME, "sdpa"))
    assert torch.equal(got, want)


def test_autocast_rounds_what_norms_leave_in_float32(kernel):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16, generator=g).to(DEVICE) for _ in range(3))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        mixed, _ = kernel.flash_attn_forward(None, q, k, v.bfloat16(), None)
    assert torch.equal(mixed, kernel.flash_attn_forward(None, *(x.bfloat16() for x in (q, k, v)), None)[0])


def test_what_causal_attention_cannot_do_is_refused(kernel):
    q = torch.zeros(1, 2, 4, 16, device=DEVICE)
    for v in (q[..., :8], q.bfloat16()):
        with pytest.raises(NotImplementedError, match="one dtype and one head size"):
            kernel.flash_attn_forward(None, q, q, v, None)
    llama = other(LlamaConfig, NAME)
    with pytest.raises(NotImplementedError, match="this attention_mask"):
        llama(draw(2, 9), attention_mask=holes(2, 9, (3, 5), (0, 0)))
    with pytest.raises(ValueError, match="it must be boolean"):
        llama(draw(2, 9), attention_mask=torch.zeros(2, 1, 9, 9, device=DEVICE))
    with pytest.raises(NotImplementedError, match="no softcap"):
        llama(draw(2, 9), softcap=30.0)
    with pytest.raises(NotImplementedError, match="is causal here"):
        llama(draw(2, 9), is_causal=False)
    with pytest.raises(ValueError, match="attention weights"):
        llama(draw(2, 9), output_attentions=True)
