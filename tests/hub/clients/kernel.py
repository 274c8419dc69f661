"""A FoX whose attention is computed by a kernel of the Hub; without hf_longctx."""

import os
import sys

import checks
import torch
from huggingface_hub import snapshot_download
from kernels import get_kernel, get_loaded_kernels
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


KERNEL = "alice/forgetting-attention"
COMMIT, LOCAL, EXPECTED = sys.argv[1:]
PINNED = f"{KERNEL}@{COMMIT}"
OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
expected = load_file(EXPECTED)


def load(kernel, **options):
    options = {"allow_all_kernels": True, "trust_remote_code": True} | options
    return AutoModelForCausalLM.from_pretrained("alice/fox", attn_implementation=kernel, **options).eval()


def refused(kernel, error, **options):
    """What the error says."""
    try:
        load(kernel, **options)
    except error as raised:
        return str(raised)
    raise AssertionError(f"{kernel} was loaded")


def check_by_its_name():
    """With padding, and without the Triton files that came with the model."""
    fox = load(PINNED if OFFLINE else KERNEL)
    triton_fox = sys.modules[type(fox).__module__.replace("modeling_fox", "triton_fox")]
    triton_fox.triton = triton_fox.fox_forward = triton_fox.fox_decode = None
    with torch.no_grad():
        logits = fox(expected["ids"], attention_mask=expected["mask"]).logits
    difference = (logits - expected["logits"])[expected["mask"].bool()].abs().max()
    assert difference <= 1e-4 * expected["logits"].abs().max(), difference
    inputs = {"input_ids": expected["ids"][:, :20], "attention_mask": expected["mask"][:, :20]}
    tokens = fox.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, expected["tokens"])
    assert "need triton" in refused("forgetting_triton", ImportError)


def check_pinned():
    fox = load(PINNED)
    assert fox.config._attn_implementation == PINNED
    with torch.no_grad():
        fox(expected["ids"])
    if not OFFLINE:  # kernels 0.17 loads one build, and finds it offline if the whole revision is in the cache
        snapshot_download(KERNEL, repo_type="kernel", revision=COMMIT)


def check_without_a_model():
    revision = {"revision": COMMIT} if OFFLINE else {"version": 1}
    kernel = get_kernel(KERNEL, **revision, trust_remote_code=True)
    q, k, v, log_f = torch.randn(1, 2, 9, 16), *torch.randn(2, 1, 2, 9, 16), -torch.rand(1, 2, 9)
    decay = log_f.cumsum(-1)
    weights = q @ k.mT / 4 + decay[..., None] - decay[..., None, :]
    weights = weights.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    torch.testing.assert_close(kernel.triton_attention(q, k, v, log_f), weights @ v, atol=1e-5, rtol=1e-5)
    (loaded,) = (loaded for loaded in get_loaded_kernels() if loaded.module is kernel)
    assert loaded.metadata.version == 1 and hasattr(getattr(torch.ops, loaded.metadata.id), "fox_forward")


def check_a_folder():
    os.environ["LOCAL_KERNELS"] = f"local/forgetting-attention={LOCAL}"
    fox = load("local/forgetting-attention", allow_all_kernels=False)
    with torch.no_grad():
        fox(expected["ids"])


def check_another_interface_is_refused():
    if not OFFLINE:
        error = refused("alice/next-attention@main", ValueError)
        assert "has interface 2" in error and "'alice/next-attention@v1'" in error


def check_a_kernel_that_is_not_there():
    assert "alice/no-attention" in refused("alice/no-attention", ValueError)


def check_consent_is_asked_for():
    if not OFFLINE:  # offline, the library asks nobody whom it may trust
        error = refused("alice/other-attention", ValueError, allow_all_kernels=False)
        assert "publisher" in error


if __name__ == "__main__":
    checks.run(dict(globals()))
