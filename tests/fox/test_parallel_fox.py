"""A model split over two processes is the model in one: logits, gradients, generated tokens, saved weights."""

import pytest
import torch
import torch.distributed as dist
import transformers
from tiny_fox import TINY, logits, make, tokens

from hf_longctx.fox import FoxConfig, FoxForCausalLM


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


def against_one_process(folder, again, **sizes):
    """How far the split model is from the whole one, as a dictionary."""
    from transformers.distributed import DistributedConfig

    split = FoxForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    whole, ids = FoxForCausalLM.from_pretrained(folder), tokens()
    found = {"logits": (logits(split.eval(), ids) - logits(whole.eval(), ids)).abs().max().item()}
    settings = dict(
        max_new_tokens=6, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True
    )
    new, want = (model.generate(ids[:, :9], **settings) for model in (split, whole))
    found["generated logits"] = (torch.stack(new.logits) - torch.stack(want.logits)).abs().max().item()
    if "tp_size" in sizes:
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
    return found


def tensor_parallel(folder, names):
    found = {}
    for name in names:
        try:
            found[name] = against_one_process(folder / name, folder / f"{name} again", tp_size=2)
        except ValueError as error:
            found[name] = str(error)
    return found


def pipeline_parallel(folder, names):
    return {name: against_one_process(folder / name, None, pp_size=2) for name in names}


def both(folder, by_heads, by_layers):
    return tensor_parallel(folder, by_heads), pipeline_parallel(folder, by_layers)


@pytest.fixture(scope="module")
def found(two_processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    for name in [*TENSOR_PARALLEL, "fixed"]:
        make(name).save_pretrained(folder / name)
    FoxForCausalLM(FoxConfig.pro(**TINY, num_key_value_heads=1)).save_pretrained(folder / "one key head")
    return two_processes(both, folder, [*TENSOR_PARALLEL, "fixed", "one key head"], PIPELINE_PARALLEL)


@pytest.mark.parametrize("variant", TENSOR_PARALLEL)
def test_tensor_parallel(variant, found):
    found = found[0][variant]
    assert found["logits"] < 2e-5
    assert found["generated logits"] < 2e-5
    for name, error in found["gradients"].items():
        assert error < 1e-5, name
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"}
    shared = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"} if "shared norm" in variant else set()
    assert set(found["whole in each process"]) == norms | shared
    assert found["saved"]


@pytest.mark.parametrize(
    "variant, message", [("fixed", "fixed gates not at all"), ("one key head", "has split a head")]
)
def test_what_cannot_be_split_is_refused(variant, message, found):
    assert message in found[0][variant]


@pytest.mark.parametrize("variant", PIPELINE_PARALLEL)
def test_pipeline_parallel(variant, found):
    found = found[1][variant]
    assert found["logits"] < 2e-5
    assert found["generated logits"] < 2e-5
