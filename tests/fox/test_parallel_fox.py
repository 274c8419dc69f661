"""A model split over two processes is the model in one: logits, gradients, saved weights."""

import pytest
import torch
import torch.distributed as dist
import transformers
from tiny_fox import BACKENDS, TINY, VARIANTS, logits, make_from, skip_without_triton, tokens

from hf_longctx.fox import FoxConfig, FoxForCausalLM
from hf_longctx.fox.backend_fox import logit_bound_of_norms


pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="plans are those of transformers 5.23"
)

TENSOR_PARALLEL = ["pro with grouped heads and rope", "one gate per key head", "only v shift, shared norm, biases"]
REFUSED = {"fixed": "cannot shard the 4 fixed gates", "one key head": "don't multiply up to the size"}
# Our kernels differ between a gate per query head and one per key head, and are interpreted on a CPU.
SPLIT = {"sdpa": [*TENSOR_PARALLEL, *REFUSED], "forgetting_triton": TENSOR_PARALLEL[:2]}


def bounds(model, heads):
    """Return the bound on the logits that follows from QK-norm, for each layer and head."""
    bounds_of_layers = [logit_bound_of_norms(layer.self_attn, heads) for layer in model.model.layers]
    return torch.stack([unit * largest for largest, unit in bounds_of_layers])


def against_one_process(folder, again, backend, **sizes):
    """Return the differences between the split model and the whole one with stock attention, keyed by name."""
    from transformers.distributed import DistributedConfig

    split = FoxForCausalLM.from_pretrained(
        folder, attn_implementation=backend, distributed_config=DistributedConfig(**sizes)
    )
    whole, ids = FoxForCausalLM.from_pretrained(folder), tokens(1, 18)
    settings = dict(max_new_tokens=2, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    for model in (split.eval(), whole.eval()):
        model.generated = torch.stack(model.generate(ids[:, :9], output_logits=True, **settings).logits)
    results = {
        "logits": (logits(split, ids) - logits(whole, ids)).abs().max().item(),
        "generated logits": (split.generated - whole.generated).abs().max().item(),
    }
    if "tp_size" in sizes:
        results["bounds"] = "no norms to read them from"
        if whole.config.qk_norm:
            heads = whole.config.num_attention_heads
            part, all_heads = bounds(split, heads // 2), bounds(whole, heads)
            if all_heads.shape[1] > 1:
                all_heads = all_heads.chunk(2, dim=1)[dist.get_rank()]
            results["bounds"] = torch.equal(part, all_heads)
        for model in (split.train(), whole.train()):
            model(ids, labels=ids).loss.backward()
        results["gradients"] = {
            name: (getattr(p.grad, "full_tensor", lambda p=p: p.grad)() - q.grad).abs().max().item()
            for (name, p), q in zip(split.named_parameters(), whole.parameters())
        }
        split.save_pretrained(again)
        dist.barrier()
        saved = FoxForCausalLM.from_pretrained(again).state_dict()
        results["saved"] = all(torch.equal(x, saved[name]) for name, x in whole.state_dict().items())
    return results


def compare(folder, backend):
    results = {}
    for name in SPLIT[backend]:
        try:
            results[name] = against_one_process(folder / name, folder / f"{name} again", backend, tp_size=2)
        except (RuntimeError, ValueError) as error:
            results[name] = str(error)
    if backend == "sdpa":
        results["two layers"] = against_one_process(folder / "two layers", None, backend, pp_size=2)
    return results


@pytest.fixture(scope="module")
def results(two_processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    for name in [*TENSOR_PARALLEL, "fixed"]:
        config = VARIANTS[name]()
        config.num_hidden_layers = 1
        make_from(config).save_pretrained(folder / name)
    make_from(VARIANTS[TENSOR_PARALLEL[0]]()).save_pretrained(folder / "two layers")
    FoxForCausalLM(FoxConfig.pro(**TINY, num_key_value_heads=1)).save_pretrained(folder / "one key head")
    return {backend: two_processes(compare, folder, backend) for backend in BACKENDS}


@pytest.mark.parametrize(
    "variant, backend",
    [(variant, "sdpa") for variant in TENSOR_PARALLEL]
    + [pytest.param(variant, "forgetting_triton", marks=skip_without_triton) for variant in TENSOR_PARALLEL[:2]],
)
def test_tensor_parallel(variant, backend, results):
    result = results[backend][variant]
    assert result["logits"] < 2e-5
    assert result["generated logits"] < 2e-5
    for name, error in result["gradients"].items():
        assert error < 1e-5, name
    assert result["saved"]
    assert result["bounds"]


@pytest.mark.parametrize("variant, message", REFUSED.items())
def test_what_cannot_be_split_is_refused(variant, message, results):
    assert message in results["sdpa"][variant]


def test_pipeline_parallel(results):
    assert max(results["sdpa"]["two layers"].values()) < 2e-5
