"""`hf-longctx push`, as one runs it, with the folder of a model as its argument."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import checks
from huggingface_hub import HfApi, ModelCard, get_session, hf_hub_download, snapshot_download
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx import FoxConfig, HMTConfig, cli, fox


LARGE, HMT_DEMO = sys.argv[1:]
DEMO = "demo"  # a copy with few weights, which main makes
TINY = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
api = HfApi()


def turn(**knobs):
    assert get_session().put(f"{api.endpoint}/knobs", json=knobs).status_code == 200


def push(*words, code=0, command="push"):
    """Run the command. Return its output."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = cli.main([command, *words])
    text = out.getvalue() + errors.getvalue()
    assert status == code, text
    assert "hf_of_" not in text
    return text


def titles(repo):
    return [commit.title for commit in api.list_repo_commits(repo)]


def check_a_killed_push_leaves_nothing_and_can_be_repeated():
    turn(slow=1)
    if (child := os.fork()) == 0:
        push(LARGE, "alice/killed")
        os._exit(0)
    while not api.repo_exists("alice/killed"):
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    turn()
    assert api.list_repo_files("alice/killed") == [".gitattributes"]
    push(DEMO, "alice/killed")
    assert len(titles("alice/killed")) == 2 and "model.safetensors" in api.list_repo_files("alice/killed")


def check_a_push_that_fails_says_what_the_hub_keeps():
    turn(fail="/commit/")
    assert "alice/failed was created, but the files were not pushed" in push(DEMO, "alice/failed", code=1)
    turn(fail="/tag/")
    text = push(DEMO, "alice/failed", "--tag", "v1", code=1)
    turn()
    sha = api.repo_info("alice/failed").sha
    assert f"The files were pushed to alice/failed in commit {sha}, but the tag was not created" in text
    assert "was created" not in text and push(DEMO, "alice/failed", "--tag", "v1")


def check_a_push_is_one_commit_of_what_is_in_the_folder():
    text = push(DEMO, "alice/fox", "--dry-run")
    assert "model.safetensors" in text and "training_log.jsonl" in text and "removes" not in text
    assert not api.repo_exists("alice/fox")
    text = push(DEMO, "alice/fox")
    assert titles("alice/fox")[1:] == ["initial commit"]
    sha = api.repo_info("alice/fox").sha
    assert f'AutoModelForCausalLM.from_pretrained("alice/fox", revision="{sha}", trust_remote_code=True)' in text
    contents = json.loads(Path(hf_hub_download("alice/fox", "hf_longctx.json")).read_text())
    assert set(contents["sha256"]) == set(api.list_repo_files("alice/fox")) - {".gitattributes", "hf_longctx.json"}
    for name, digest in contents["sha256"].items():
        content = Path(hf_hub_download("alice/fox", name)).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        if name.endswith(".py"):
            assert content == Path(fox.__file__).with_name(name).read_bytes()
    push(DEMO, "alice/fox")
    assert len(titles("alice/fox")) == 2, "a second push makes no commit"


def check_a_push_of_a_downloaded_folder_updates_the_code():
    push(DEMO, "alice/old")
    before = {name: Path(hf_hub_download("alice/old", name)).read_bytes() for name in api.list_repo_files("alice/old")}
    for name in ("old_fox.py", "modeling_fox.py", "other.py"):
        api.upload_file(path_or_fileobj=b"", path_in_repo=name, repo_id="alice/old")
    assert "removes old_fox.py from alice/old" in push(snapshot_download("alice/old", local_dir="old"), "alice/old")
    after = {name: Path(hf_hub_download("alice/old", name)).read_bytes() for name in api.list_repo_files("alice/old")}
    assert after.pop("other.py") == b"" and after == before


def check_branch_and_pull_request():
    shutil.copytree(DEMO, "changed")
    Path("changed/README.md").write_text("# Another")
    push("changed", "alice/fox", "--revision", "dev")
    assert len(titles("alice/fox")) == 2 and len(list(api.list_repo_commits("alice/fox", revision="dev"))) == 3
    assert "/discussions/1" in push("changed", "alice/fox", "--create-pr")
    assert len(titles("alice/fox")) == 2


def check_private():
    push(DEMO, "alice/fox-private", "--private")
    assert api.repo_info("alice/fox-private").private
    assert "alice/fox is public" in push(DEMO, "alice/fox", "--private", code=2)


def check_old_weights_do_not_stay_beside_new_ones():
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    model.save_pretrained("shards", max_shard_size="200KB")
    line, head = "removes model.safetensors from alice/fox-private", api.repo_info("alice/fox-private").sha
    for revision in ([], ["--revision", "new"]):
        assert line in push("shards", "alice/fox-private", "--dry-run", *revision)
    assert api.repo_info("alice/fox-private").sha == head
    assert line in push("shards", "alice/fox-private")
    files = api.list_repo_files("alice/fox-private")
    assert "model.safetensors" not in files and "model.safetensors.index.json" in files
    push(DEMO, "alice/fox-private")
    assert [name for name in api.list_repo_files("alice/fox-private") if "model" in name and ".py" not in name] == [
        "model.safetensors"
    ]


def check_an_adapter_pins_its_base_and_never_hides_a_model():
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(DEMO),
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    model.peft_config["default"].base_model_name_or_path = "alice/fox"
    model.save_pretrained("adapter")
    assert "the base model alice/fox is not pinned to a commit" in push("adapter", "alice/adapter", "--dry-run")
    assert "AutoPeftModelForCausalLM.from_pretrained" in push("adapter", "alice/adapter")
    config = json.loads(Path(hf_hub_download("alice/adapter", "adapter_config.json")).read_text())
    assert config["revision"] == api.repo_info("alice/fox").sha
    card = ModelCard.load("alice/adapter")
    lines = f"| base | alice/fox at {config['revision']} |", "| LoRA | rank 2, alpha 8 |", "trust_remote_code=True"
    assert all(line in card.text for line in lines) and "More Information Needed" not in card.text
    assert card.data.to_dict().items() >= {"library_name": "peft", "base_model_relation": "adapter"}.items()
    for words in ([], ["--dry-run"]):
        assert "alice/fox contains a model. A repository cannot" in push("adapter", "alice/fox", *words, code=2)
        assert "alice/adapter contains an adapter. A repository cannot" in push(DEMO, "alice/adapter", *words, code=2)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(api.list_repo_files("alice/adapter"))
    Path("adapter/adapter_config.json").write_text('{"base_model_name_or_path": "alice/no-such"}')
    assert "the base model alice/no-such (revision None) is not on the Hub" in push("adapter", "alice/adapter", code=2)


def check_a_memory_is_read_from_the_hub():
    """It knows one color of sixteen, which only the document has."""
    push(HMT_DEMO, "alice/hmt", "--tag", "v1")
    fact, question = (
        f"{word} Ada {rest}" for word, rest in (("remember", "red Ada the of Ada"), ("recall", "Ada is Ada"))
    )
    Path("novel.txt").write_text(f"{fact} Ada in Ada to Ada Ada was Ada a")
    push("alice/hmt", "novel.txt", "--revision", "v1", "--output", "state.safetensors", command="read")
    api.create_repo("alice/novel")
    api.upload_file(path_or_fileobj="state.safetensors", path_in_repo="state.safetensors", repo_id="alice/novel")
    question = f"{question} the Ada of Ada Ada and Ada answer"
    assert "answer red\n" in push("alice/hmt", "alice/novel@main", question, "--max-new-tokens", "1", command="read")


def check_a_tag_is_what_the_card_pins():
    push(DEMO, "alice/tagged", "--tag", "v1")
    sha = api.repo_info("alice/tagged").sha
    assert api.repo_info("alice/tagged", revision="v1").sha == sha
    card = ModelCard.load("alice/tagged")
    lines = 'AutoModelForCausalLM.from_pretrained("alice/tagged", revision="v1", trust_remote_code=True)'
    assert lines in card.text and {entry.source_name for entry in card.data.eval_results} == {"the results, as JSON"}
    push(DEMO, "alice/tagged", "--revision", "dev")
    for option, name, says in (
        ("--tag", "v1", "already has a tag or branch v1"),
        ("--tag", "dev", "already has a tag or branch dev"),
        ("--revision", "v1", "has a tag v1. A branch of this name would hide the tag"),
    ):
        assert says in push(DEMO, "alice/tagged", option, name, code=2)
    refs = api.list_repo_refs("alice/tagged")
    assert [ref.name for ref in (*refs.branches, *refs.tags)] == ["main", "dev", "v1"]


def check_the_configuration_of_an_hmt_goes_with_its_code():
    config = HMTConfig(backbone_config=FoxConfig(**TINY))
    config.save_pretrained("hmt-config", push_to_hub=True, repo_id="alice/hmt-config")
    files = api.list_repo_files("alice/hmt-config")
    assert {"config.json", "custom_backbone_hmt.py", "configuration_hmt.py", "modeling_fox.py"} <= set(files)


if __name__ == "__main__":
    shutil.copytree(LARGE, DEMO, ignore=shutil.ignore_patterns("*.png", "*.md", "forgetting_curve.json", "tokenizer*"))
    config = AutoConfig.from_pretrained(LARGE)
    config.update(TINY | {"vocab_size": config.vocab_size, "num_key_value_heads": 2, "head_dim": 16})
    AutoModelForCausalLM.from_config(config).save_pretrained(DEMO)
    checks.run(dict(globals()))
