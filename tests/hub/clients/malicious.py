"""Repositories that want to run code, or to fill the machine: none of it happens."""

import contextlib
import itertools
import json
import os
import sys
from pathlib import Path

import checks
import evaluate
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, KernelConfig, pipeline

from hf_longctx.corpus import open_source
from hf_longctx.hmt.reading import load_state


RAN, COMMITS = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())  # RAN: what the code would create
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
    """The code runs: what the table in hub/README.md says of the call, and a control of the repository."""
    with contextlib.suppress(Exception):
        function(*arguments, **options)
    assert RAN.exists(), "no code was run"
    RAN.unlink()


def numbered(name):
    """Return the existing repositories mallory/NAME-0, mallory/NAME-1, ..."""
    for i in itertools.count():
        try:
            HfApi().repo_info(f"mallory/{name}-{i}")
        except RepositoryNotFoundError:
            assert i, f"there is no mallory/{name}-0"
            return
        yield f"mallory/{name}-{i}"


def check_a_pickle_runs_no_code():
    for id in ("mallory/pickle", "mallory/zipped-pickle"):
        refused(load, id, trust_remote_code=True)
        refused(load, id, says="does not appear to have a file named model.safetensors", use_safetensors=True)


def check_code_of_another_repository_needs_trust():
    """With trust, transformers runs the code. If the package is installed, a FoX uses the code of the package."""
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
        refused(model.generate, ids, custom_generate=id, trust_remote_code=True, says="Read it, and pass its ")


def check_a_memory_runs_no_code():
    model = load("mallory/generate-hmt")
    for id in numbered("state"):
        refused(load_state, id, model, says="state.safetensors ")


def check_an_adapter_names_whose_code_is_trusted():
    """The same holds for an adapter next to a FoX, whose files are then not read."""
    refused(load, "mallory/adapter", trust_remote_code=False)
    runs(load, "mallory/adapter", trust_remote_code=True)


def check_a_pipeline_with_code_needs_trust():
    options = {"task": "text-generation", "model": "mallory/pipeline"}
    refused(pipeline, **options, trust_remote_code=False)
    runs(pipeline, **options, trust_remote_code=True)


def check_a_processor_with_code_needs_trust():
    refused(AutoProcessor.from_pretrained, "mallory/processor", trust_remote_code=False)
    runs(AutoProcessor.from_pretrained, "mallory/processor", trust_remote_code=True)


def check_a_dataset_runs_no_code():
    refused(lambda: next(open_source("mallory/script")[1]))


def check_fields_that_name_code():
    """They are refused, or mean nothing: the model is loaded without them, and nothing else is."""
    for id in numbered("field"):
        try:
            load(id)
        except Exception as error:
            print(id, type(error).__name__)
        assert not RAN.exists(), id


def check_a_kernel_needs_trust_by_its_own_name():
    """Either a file of the repository or the call can name the kernel."""
    refused(load, "mallory/field-8", trust_remote_code=True, says="publisher trust")
    refused(load, "mallory/generate-fox", attn_implementation="mallory/kernel", says="publisher trust")
    runs(load, "mallory/generate-fox", attn_implementation="mallory/kernel", allow_all_kernels=True)


def check_a_kernel_of_a_layer_is_named_and_trusted_by_the_call():
    """A file of the repository cannot trust the kernel of a layer."""

    def load_with(kernel, **options):
        config = KernelConfig({"RMSNorm": kernel})
        return load("mallory/generate-fox", use_kernels=True, kernel_config=config, **options)

    for id in ("mallory/field-7", "mallory/field-10"):
        load(id, use_kernels=True, trust_remote_code=True)
        assert not RAN.exists(), id
    refused(load_with, "mallory/kernel:RMSNorm", says="publisher trust", trust_remote_code=True)
    runs(load_with, "mallory/kernel:RMSNorm", allow_all_kernels=True)
    runs(load_with, ("mallory/kernel:RMSNorm", {"version": 1, "trust_remote_code": True}))


def check_a_backbone_needs_trust_by_its_own_name():
    refused(load, "mallory/hmt", says="backbone_trust_remote_code=True", trust_remote_code=True)
    runs(load, "mallory/hmt", trust_remote_code=True, backbone_trust_remote_code=True)


def check_a_tokenizer_with_code_needs_trust():
    refused(AutoTokenizer.from_pretrained, "mallory/tokenizer", trust_remote_code=False)
    runs(AutoTokenizer.from_pretrained, "mallory/tokenizer", trust_remote_code=True)


def check_chat_templates():
    for id in numbered("template"):
        tokenizer = AutoTokenizer.from_pretrained(id)
        refused(tokenizer.apply_chat_template, [{"role": "user", "content": "x"}], tokenize=False)


def check_a_small_file_of_much_text():
    """A dataset is streamed: what is not read fills neither memory nor disk."""
    documents = open_source("mallory/bomb")[1]
    assert len(next(documents)) == 1000
    sizes = [path.stat().st_size for path in Path(os.environ["HF_HOME"]).rglob("*") if path.is_file()]
    assert sum(sizes) < 50_000_000, f"{sum(sizes)} bytes were written"


def check_what_upstream_runs_is_pinned_by_its_commit():
    """Code that its owner changes later is not run."""
    options = {"revision": COMMITS["changed"], "trust_remote_code": True}
    assert AutoConfig.from_pretrained("mallory/changed", **options).model_type == "elsewhere"
    options = {"revision": COMMITS["changed-chain"], "code_revision": COMMITS["changed"], "trust_remote_code": True}
    assert AutoConfig.from_pretrained("mallory/changed-chain", **options).model_type == "elsewhere"
    assert evaluate.load("mallory/metric", revision=COMMITS["metric"]).compute(predictions=[1, 2]) == {"sum": 3}
    assert not RAN.exists(), "other code was run"


if __name__ == "__main__":
    os.makedirs("here", exist_ok=True)
    checks.run(dict(globals()))
