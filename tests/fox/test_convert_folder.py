"""Conversion of checkpoint folders: the same as in memory, and all or nothing."""

import json
import shutil

import pytest
import torch
import transformers
from mistakes import refused
from safetensors.torch import load_file, save_file
from tiny_fox import SIZES as TINY
from tiny_fox import make_from as make
from transformers import AutoModelForCausalLM

import hf_longctx.fox as fox
from hf_longctx.fox import convert_folder


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "generation_config.json")


def save(folder, state_dict, config_dict, shards):
    """Write a checkpoint folder with a tokenizer and the tensors in `shards` files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_dict))
    if config_dict.get("tie_word_embeddings"):
        state_dict = {name: x for name, x in state_dict.items() if name != "lm_head.weight"}
    if shards == 1:
        save_file(state_dict, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(state_dict)}
        for file in set(weight_map.values()):
            save_file({name: x for name, x in state_dict.items() if weight_map[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name in TOKENIZER_FILES:
        (folder / name).write_text(json.dumps({"eos_token_id": 7}))
    (folder / "training_args.bin").write_bytes(b"stays")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return, for each format, a sharded checkpoint (do not write to it) and the result of the converter in memory."""
    tmp_path = tmp_path_factory.mktemp("sources")
    official = fox.to_official(make(fox.FoxConfig.pro(**TINY)))
    fla = fox.to_fla(make(fox.FoxConfig(**TINY, tie_word_embeddings=True, num_key_value_heads=2, qkv_bias=True)))
    llama = make(transformers.Qwen3Config(**TINY, num_key_value_heads=2, head_dim=8, max_position_embeddings=64))
    return {
        "official": (save(tmp_path / "official", *official, shards=3), fox.from_official(*official)),
        "fla": (save(tmp_path / "fla", *fla, shards=2), fox.from_fla(*fla)),
        "llama": (
            save(tmp_path / "llama", llama.state_dict(), {**llama.config.to_dict(), "dtype": "float32"}, shards=1),
            fox.from_llama(llama),
        ),
    }


def tensors_in(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize("kind", ["official", "fla", "llama"])
def test_a_folder_is_what_save_pretrained_writes_of_the_converted_model(kind, sources, tmp_path):
    source, model = sources[kind]
    target, saved = tmp_path / "new" / "target", tmp_path / "saved"
    convert_folder(source, target, kind)
    model.save_pretrained(saved)
    assert json.loads((target / "config.json").read_text()) == json.loads((saved / "config.json").read_text())
    expected = {path.name for path in saved.iterdir() if ".safetensors" not in path.name} | set(TOKENIZER_FILES)
    assert {path.name for path in target.iterdir() if ".safetensors" not in path.name} == expected
    assert json.loads((target / "generation_config.json").read_text()) == {"eos_token_id": 7}
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.generation_config.eos_token_id == 7
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert tensors_in(target).keys() == tensors_in(saved).keys()
    # A single file stays one, and no file outgrows the source's.
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    if kind == "llama":
        assert (target / "model.safetensors").is_file()
    else:
        assert max(path.stat().st_size for path in target.glob("*.safetensors")) < 1.1 * largest + 2000


def test_weights_keep_their_dtype(tmp_path):
    state_dict, config_dict = fox.to_official(make(fox.FoxConfig.pro(**TINY)))
    mixed = {name: x.bfloat16() if x.ndim == 2 else x for name, x in state_dict.items()}
    del config_dict["torch_dtype"]
    source = save(tmp_path / "source", mixed, config_dict, shards=2)
    convert_folder(source, tmp_path / "target", "official")
    convert_folder(tmp_path / "target", tmp_path / "back", "fox", "official")
    for name, tensor in tensors_in(tmp_path / "back").items():
        assert tensor.dtype == mixed[name].dtype and torch.equal(tensor, mixed[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert loaded.dtype == torch.float32


def change_shard(change):
    """Rewrite the tensors of a shard."""

    def write(folder):
        file = folder / "model-1.safetensors"
        save_file(change(load_file(file)), file)

    return write


def shrink(tensors):
    name = sorted(tensors)[0]
    return {**tensors, name: tensors[name][:-1].clone(), "extra": torch.ones(())}


def pickle(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def index(folder):
    """Return an index that points to valid weights next to the folder."""
    shutil.copy(folder / "model-1.safetensors", folder.parent / "outside.safetensors")
    weight_map = {"weight_map": {"a": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))


def link(folder):
    """Return a tokenizer file that is a link to a file next to the folder."""
    (folder.parent / "secret.json").write_text("{}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("../secret.json")


SHARD = "model-1.safetensors"
DAMAGE = {
    "truncated": (
        lambda folder: (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100]),
        r"model-1.safetensors is not a valid safetensors file .*truncated",
    ),
    "a shard is missing": (lambda folder: (folder / SHARD).unlink(), r"lacks model-1.safetensors"),
    "a tensor twice": (
        lambda folder: shutil.copy(folder / SHARD, folder / "model-2.safetensors"),
        r" is in both model-1.safetensors and model-2.safetensors",
    ),
    "pickled": (pickle, r"lacks model.safetensors.* Load and save the model to convert pytorch_model.bin"),
    "wrong tensors": (change_shard(shrink), r"(?s)shape of .*unknown: extra"),
    "another dtype": (
        change_shard(lambda tensors: {name: x.to(torch.float8_e4m3fn) for name, x in tensors.items()}),
        r"weights in torch.float8_e4m3fn are not supported",
    ),
    "configuration": (lambda folder: (folder / "config.json").write_text("{"), r"config.json is not JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), r"must contain a JSON object, got list"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), r"not a checkpoint folder.*hf download"),
    "weights beside the folder": (index, r"same folder, got '../outside.safetensors'"),
    "a tokenizer beside the folder": (link, "tokenizer.json is a link to .*secret"),
}


@pytest.fixture(scope="module")
def official():
    return fox.to_official(make(fox.FoxConfig.pro(**TINY)))


@pytest.mark.parametrize(
    "mistake",
    [refused(name, lambda call: call(), message) for name, (_, message) in DAMAGE.items()],
    ids=str,
)
def test_damage_is_named_and_nothing_is_written(mistake, official, tmp_path):
    source = save(tmp_path / "official", *official, shards=3)
    DAMAGE[mistake.name][0](source)
    before = sorted(tmp_path.rglob("*"))
    mistake.check(lambda: convert_folder(source, tmp_path / "target", "official"))
    assert sorted(tmp_path.rglob("*")) == before


def test_links_within_the_folder_and_the_cache_of_the_hub_are_followed(official, tmp_path):
    """The Hub's cache is links, snapshots/COMMIT/NAME to blobs/HASH."""
    folder = save(tmp_path / "snapshot", *official, shards=3)
    (tmp_path / "models--fox" / "snapshots").mkdir(parents=True)
    blobs, snapshot = tmp_path / "models--fox" / "blobs", tmp_path / "models--fox" / "snapshots" / "1a2b"
    folder.rename(snapshot)
    blobs.mkdir()
    for path in [*snapshot.iterdir()]:
        path.rename(blobs / f"hash-{path.name}")
        path.symlink_to(f"../../blobs/hash-{path.name}")
    (snapshot / "vocab.txt").symlink_to("vocab.json")
    (tmp_path / "here").symlink_to(snapshot)
    convert_folder(tmp_path / "here", tmp_path / "target", "official")
    for name in (*TOKENIZER_FILES, "vocab.txt"):
        copy = tmp_path / "target" / name
        assert not copy.is_symlink() and copy.read_bytes() == (snapshot / name).read_bytes()


REFUSED = {
    "the wrong format": (("llama",), r"for conversion to FoX, got 'forgetting_transformer-project_fox'"),
    "not a FoX": (("fox", "fla"), r"must be 'fox'.*Set the source format"),
    "no conversion": (("official", "fla"), r"cannot convert from 'official' to 'fla'"),
    "gates that are there": (("official", "fox", 100.0), r"decay_time=100.0 requires a model without gates"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused(arguments, message, sources, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert_folder(sources["official"][0], tmp_path / "target", *arguments)
    assert not (tmp_path / "target").exists()


def test_nothing_is_overwritten(sources, tmp_path):
    source, _ = sources["fla"]
    (tmp_path / "empty").mkdir()
    convert_folder(source, tmp_path / "empty", "fla")
    kept = (tmp_path / "empty" / "config.json").read_bytes()
    with pytest.raises(ValueError, match="not an empty folder"):
        convert_folder(source, tmp_path / "empty", "fla")
    assert (tmp_path / "empty" / "config.json").read_bytes() == kept
