"""Repositories that want to run code, or to write where they should not: nothing of the kind happens."""

import os
import sys
from pathlib import Path

import checks
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_longctx.hub import check


RAN = Path(sys.argv[1])  # what the code of each repository would create


def refused(function, *arguments, says="", **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        assert says in str(error), f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("it was loaded")
    assert not RAN.exists(), "code was run"


def check_paths_that_lead_out():
    """Nothing is written outside of the cache, or of the folder that is asked for."""
    for id in ("mallory/up", "mallory/root"):
        refused(snapshot_download, id)
        refused(snapshot_download, id, local_dir="here")
    refused(hf_hub_download, "mallory/up", "../../outside.txt", local_dir="here")
    assert not list(Path().glob("**/outside.txt")) and not Path("/outside.txt").exists()


def check_shards_that_lead_out():
    refused(AutoModelForCausalLM.from_pretrained, "mallory/index", trust_remote_code=True)


def check_a_pickle_runs_no_code():
    refused(AutoModelForCausalLM.from_pretrained, "mallory/pickle", trust_remote_code=True)


def check_code_of_another_repository_needs_trust():
    """With trust, transformers runs it; but a FoX is the package's own, where the package is installed."""
    config = AutoConfig.from_pretrained("mallory/chain", trust_remote_code=True)
    assert type(config).__module__.startswith("hf_longctx.") and not RAN.exists()
    refused(AutoConfig.from_pretrained, "mallory/unknown-chain", says="mallory/evil", trust_remote_code=False)


def check_a_backbone_needs_trust_by_its_own_name():
    load = AutoModelForCausalLM.from_pretrained
    refused(load, "mallory/hmt", says="backbone_trust_remote_code=True", trust_remote_code=True)


def check_a_tokenizer_with_code_needs_trust():
    refused(AutoTokenizer.from_pretrained, "mallory/tokenizer", trust_remote_code=False)


def check_a_kernel_named_by_a_file_is_not_loaded():
    refused(AutoModelForCausalLM.from_pretrained, "mallory/kernel", trust_remote_code=True)


def check_other_bytes_are_noticed_by_their_hashes():
    """The Hub's clients compare sizes only; see hf_longctx.hub.check."""
    commit = HfApi().repo_info("mallory/bytes").sha
    refused(check.main, "mallory/bytes", commit, sys.argv[2], "", "AutoModel", says="README.md has other bytes")


if __name__ == "__main__":
    os.makedirs("here", exist_ok=True)
    checks.run(dict(globals()))
