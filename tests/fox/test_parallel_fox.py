"""A model split over two processes is the model in one: logits, gradients, generated tokens, saved weights."""

import pytest
import torch
import torch.distributed as dist
import transformers
from tiny_fox import BACKENDS, TINY, both_backends, logits, make, tokens

from hf_longctx.fox import FoxConfig, FoxForCausalLM
from hf_longctx.fox.backend_fox import logit_bound_of_norms


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
        reason="plans are those of transformers 5.23",
    ),
]

TENSOR_PARALLEL = [
    "llama",
    "pro with grouped heads and rope",
    "one gate per key head",
    "only v shift, shared norm, biases",
    "bias only",
]
PIPELINE_PARALLEL = ["llama", "pro with grouped heads and rope"]


def bounds(model, heads):
    """What QK-norm promises of the logits of each layer's heads."""
    found = [logit_bound_of_norms(layer.self_attn, heads) for layer in model.model.layers]
    return torch.stack([unit * largest for largest, unit in found])


def against_one_process(folder, again, backend, **sizes):
    """How far the split model is from the whole one with stock attention, as a dictionary."""
    from transformers.distributed import DistributedConfig

    split = FoxForCausalLM.from_pretrained(
        folder, attn_implementation=backend, distributed_config=DistributedConfig(**sizes)
    )
    whole, ids = FoxForCausalLM.from_pretrained(folder), tokens()
    found = {"logits": (logits(split.eval(), ids) - logits(whole.eval(), ids)).abs().max().item()}
    settings = dict(
        max_new_tokens=6, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True
    )
    new, want = (model.generate(ids[:, :9], **settings) for model in (split, whole))
    found["generated logits"] = (torch.stack(new.logits) - torch.stack(want.logits)).abs().max().item()
    if "tp_size" in sizes:
        found["bounds"] = "no norms to read them from"
        if whole.config.qk_norm:
            heads = whole.config.num_attention_heads
            own, all_heads = bounds(split, heads // 2), bounds(whole, heads)
            if all_heads.shape[1] > 1:
                all_heads = all_heads.chunk(2, dim=1)[dist.get_rank()]
            found["bounds"] = torch.equal(own, all_heads)
        for model in (split.train(), whole.train()):
            model(ids, labels=ids).loss.backward()
        found["gradients"] = {
            name: (getattr(p.grad, "full_tensor", lambda p=p: p.grad)() - q.grad).abs().max().item()
            for (name, p), q in zip(split.named_parameters(), whole.parameters())
        }
        found["whole in each process"] = sorted(
            name.removeprefix("model.layers.0.")
            for name, p in split.named_parameters()
            if type(p.data) is torch.Tensor and "layers.1" not in name
        )
        split.save_pretrained(again)
        dist.barrier()
        saved = FoxForCausalLM.from_pretrained(again).state_dict()
        found["saved"] = all(torch.equal(x, saved[name]) for name, x in whole.state_dict().items())
        for model in (split, whole):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
        found["logits after a step"] = (logits(split.eval(), ids) - logits(whole.eval(), ids)).abs().max().item()
    return found


def tensor_parallel(folder, names, backend):
    found = {}
    for name in names:
        try:
            found[name] = against_one_process(folder / name, folder / f"{name} again", backend, tp_size=2)
        except ValueError as error:
            found[name] = str(error)
    return found


def pipeline_parallel(folder, names, backend):
    return {name: against_one_process(folder / name, None, backend, pp_size=2) for name in names}


def both(folder, by_heads, by_layers, backend):
    return tensor_parallel(folder, by_heads, backend), pipeline_parallel(folder, by_layers, backend)


@pytest.fixture(scope="module")
def found(two_processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    for name in [*TENSOR_PARALLEL, "fixed"]:
        make(name).save_pretrained(folder / name)
    FoxForCausalLM(FoxConfig.pro(**TINY, num_key_value_heads=1)).save_pretrained(folder / "one key head")
    by_heads = [*TENSOR_PARALLEL, "fixed", "one key head"]
    return {backend: two_processes(both, folder, by_heads, PIPELINE_PARALLEL, backend) for backend in BACKENDS}


@both_backends
@pytest.mark.parametrize("variant", TENSOR_PARALLEL)
def test_tensor_parallel(variant, backend, found):
    found = found[backend][0][variant]
    assert found["logits"] < 2e-5
    assert found["generated logits"] < 2e-5
    for name, error in found["gradients"].items():
        assert error < 1e-5, name
    assert found["logits after a step"] < 5e-5
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"}
    shared = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"} if "shared norm" in variant else set()
    assert set(found["whole in each process"]) == norms | shared
    assert found["saved"]
    assert found["bounds"]


@both_backends
@pytest.mark.parametrize(
    "variant, message", [("fixed", "leaves the 4 fixed gates"), ("one key head", "has split a head")]
)
def test_what_cannot_be_split_is_refused(variant, message, backend, found):
    assert message in found[backend][0][variant]


@both_backends
@pytest.mark.parametrize("variant", PIPELINE_PARALLEL)
def test_pipeline_parallel(variant, backend, found):
    found = found[backend][1][variant]
    assert found["logits"] < 2e-5
    assert found["generated logits"] < 2e-5
