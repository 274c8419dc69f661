"""Repositories that want to run code by way of this package: it does not run."""

import contextlib
import sys
from pathlib import Path

import checks
import torch
from huggingface_hub import HfApi
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx.hmt.reading import load_state


RAN = Path(sys.argv[1])  # the file that the code would create
load = AutoModelForCausalLM.from_pretrained


def refused(function, *arguments, says="", **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        assert says in str(error), f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("it was loaded")
    assert not RAN.exists(), "code was run"


def runs(function, *arguments, **options):
    """Check that the repository's code runs if the call allows it."""
    with contextlib.suppress(Exception):
        function(*arguments, **options)
    assert RAN.exists(), "no code was run"
    RAN.unlink()


def numbered(name):
    """Yield the repositories mallory/NAME-0, mallory/NAME-1, ... that exist."""
    number = 0
    while HfApi().repo_exists(id := f"mallory/{name}-{number}"):
        yield id
        number += 1
    assert number, f"mallory/{name}-0 does not exist"


def check_code_of_another_repository_needs_trust():
    """Check that transformers asks for trust, and that a FoX always has the code of the installed package."""
    config = AutoConfig.from_pretrained("mallory/chain", trust_remote_code=True)
    assert type(config).__module__.startswith("hf_longctx.") and not RAN.exists()
    refused(AutoConfig.from_pretrained, "mallory/unknown-chain", says="mallory/evil", trust_remote_code=False)


def check_generate_is_that_of_the_package():
    runs(load, "mallory/generate-llama", trust_remote_code=True)
    for id in ("mallory/generate-fox", "mallory/generate-hmt"):
        model = load(id, trust_remote_code=True)
        assert "partial" not in type(model.generate).__name__ and not RAN.exists()
        ids, options = torch.ones(1, 3, dtype=torch.long), {"max_new_tokens": 2, "do_sample": False}
        assert model.generate(ids, **options).shape[1] in (4, 5)  # a random model may end after a token
        refused(model.generate, ids, custom_generate=id, trust_remote_code=True, says="pass its function")


def check_a_memory_runs_no_code():
    model = load("mallory/generate-hmt")
    for id in numbered("state"):
        refused(load_state, id, model, says="state.safetensors ")


def check_fields_that_name_code():
    """Check that a field is an error, or has no effect."""
    for id in numbered("field"):
        try:
            load(id)
        except Exception as error:
            print(id, type(error).__name__)
        assert not RAN.exists(), id


def check_a_kernel_needs_trust_by_its_own_name():
    """Check a kernel that the repository's config names, and one that the call names."""
    refused(load, "mallory/field-8", trust_remote_code=True, says="publisher trust")
    refused(load, "mallory/generate-fox", attn_implementation="mallory/kernel", says="publisher trust")
    runs(load, "mallory/generate-fox", attn_implementation="mallory/kernel", allow_all_kernels=True)


def check_a_backbone_needs_trust_by_its_own_name():
    refused(load, "mallory/hmt", says="backbone_trust_remote_code=True", trust_remote_code=True)
    runs(load, "mallory/hmt", trust_remote_code=True, backbone_trust_remote_code=True)


if __name__ == "__main__":
    checks.run(dict(globals()))
