"""`hf-longctx push`: what is taken, what is refused, one commit, and no secret anywhere."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from demo_model import DEMO
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError
from mistakes import refused
from safetensors.torch import load_file, save_file
from tiny_tokenizer import save_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_relative_import_files

import hf_longctx
from hf_longctx import FoxConfig, FoxForCausalLM, HMTWrapper
from hf_longctx.fox import modeling_fox
from hf_longctx.hub import Bundle, build_bundle, check_destination, loading_lines, pin_base, push
from hf_longctx.hub.push import removed_files


NORM = "model.norm.weight"
ADAPTER, Q = "adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj"
TINY = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture(scope="module")
def fox(tmp_path_factory):
    """Return a saved FoX without code and auto_map."""
    folder = tmp_path_factory.mktemp("fox")
    FoxForCausalLM(FoxConfig(**TINY)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", {name: value for name, value in config.items() if name != "auto_map"})
    save_tokenizer(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    return folder


@pytest.fixture
def folder(fox, tmp_path):
    return shutil.copytree(fox, tmp_path / "model")


@pytest.fixture
def adapter(fox, tmp_path):
    path = tmp_path / "adapter"
    path.mkdir()
    config = {"base_model_name_or_path": "alice/fox", "peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    write(path / "adapter_config.json", config)
    save_file({f"{Q}.lora_A.weight": torch.ones(2, 32), f"{Q}.lora_B.weight": torch.ones(32, 2)}, path / ADAPTER)
    return path


def write(path, values):
    path.write_text(json.dumps(values))


def change(path, **values):
    write(path, json.loads(path.read_text()) | values)


def test_a_bundle_has_known_files_and_the_code_of_the_package(folder):
    (folder / "modeling_fox.py").write_text("# of an older version")
    (folder / "notes.txt").write_text("private")
    (folder / "checkpoint-5").mkdir()
    (folder / ".gitattributes").touch()
    bundle = build_bundle(folder)
    code = {Path(path).name for path in get_relative_import_files(modeling_fox.__file__)} | {"modeling_fox.py"}
    assert {path for path in bundle.files if path.endswith(".py")} == code
    assert all(bundle.files[name] == Path(modeling_fox.__file__).with_name(name) for name in code)
    others = {"config.json", "generation_config.json", "hf_longctx.json", "model.safetensors"}
    assert set(bundle.files) == code | others | {"tokenizer.json", "tokenizer_config.json"}
    assert set(bundle.left_out) == {"checkpoint-5", "notes.txt"}
    assert json.loads(bundle.files["config.json"])["auto_map"]["AutoConfig"] == "configuration_fox.FoxConfig"
    contents = json.loads(bundle.files["hf_longctx.json"])
    assert contents["versions"]["hf_longctx"] == hf_longctx.__version__ and "commit" in contents


def test_a_bundle_of_an_adapter(adapter):
    bundle = build_bundle(adapter)
    assert set(bundle.files) == {"adapter_config.json", "adapter_model.safetensors", "hf_longctx.json"}
    assert 'AutoPeftModelForCausalLM.from_pretrained("alice/a", revision="b")' in loading_lines(bundle, "alice/a", "b")
    change(adapter / "adapter_config.json", task_type="SEQ_CLS")
    write(adapter / "base.json", {"model_type": "fox"})  # files of `hf-longctx finetune`
    bundle = build_bundle(adapter)
    assert "base.json" in bundle.files and bundle.auto_class == "AutoPeftModelForSequenceClassification"
    assert 'revision="b", trust_remote_code=True)' in loading_lines(bundle, "alice/a", "b")
    write(adapter / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["words.Tokenizer", None]}})
    (adapter / "words.py").touch()
    assert build_bundle(adapter).files["words.py"] == adapter / "words.py"


@pytest.mark.parametrize(
    "architecture, auto_class",
    [
        ("HMTWrapper", "AutoModelForCausalLM"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM"),
        ("FoxForSequenceClassification", "AutoModelForSequenceClassification"),
        ("FoxModel", "AutoModel"),
    ],
)
def test_the_loading_lines_name_the_right_class(architecture, auto_class):
    lines = loading_lines(Bundle({}, (), {"architectures": [architecture]}), "alice/fox", "b")
    assert lines == f'from transformers import {auto_class}\n{auto_class}.from_pretrained("alice/fox", revision="b")'


def test_the_code_of_a_backbone_is_pushed_and_not_the_name_of_its_folder(fox, tmp_path):
    HMTWrapper.from_backbone(FoxForCausalLM.from_pretrained(fox)).save_pretrained(tmp_path)
    assert str(fox) not in (tmp_path / "config.json").read_text()
    files = build_bundle(tmp_path).files
    assert "from .modeling_fox import FoxForCausalLM as MODEL_CLASS" in files["custom_backbone_hmt.py"].read_text()
    assert files["modeling_fox.py"] == Path(modeling_fox.__file__)
    HMTWrapper.from_backbone(LlamaForCausalLM(LlamaConfig(**TINY))).save_pretrained(tmp_path)
    assert "modeling_fox.py" not in build_bundle(tmp_path).files


def test_code_of_another_model_comes_from_its_folder(folder):
    change(folder / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Model"})
    (folder / "mine.py").write_text("from .more import x\nfrom .attention_fox import y\n")
    (folder / "more.py").touch()
    files = build_bundle(folder).files
    assert files["mine.py"] == folder / "mine.py" and files["more.py"] == folder / "more.py"
    assert files["attention_fox.py"] == Path(modeling_fox.__file__).with_name("attention_fox.py")
    assert files["config.json"] == folder / "config.json"


def built(prepare):
    """A mistake: what is done to the folder of a model before it is bundled."""

    def mistake(folder, adapter):
        prepare(folder)
        build_bundle(folder)

    return mistake


def adding(name, content=b""):
    return built(lambda folder: (folder / name).write_bytes(content))


def without(name):
    return built(lambda folder: (folder / name).unlink())


def with_config(**values):
    return built(lambda folder: change(folder / "config.json", **values))


def with_index(weight_map):
    return built(lambda folder: write(folder / "model.safetensors.index.json", {"weight_map": weight_map}))


def with_link(name, target):
    def link(folder):
        (folder / name).unlink(missing_ok=True)
        os.symlink(target, folder / name)

    return built(link)


def with_tensors(changed):
    def save(folder):
        path = folder / "model.safetensors"
        tensors = {name: tensor for name, tensor in (load_file(path) | changed).items() if tensor is not None}
        save_file(tensors, path, metadata={"format": "pt"})

    return built(save)


def with_file(name, **values):
    """Change fields of a JSON file."""
    return built(lambda folder: change(folder / name, **values))


def with_tokenizer(change_tokenizer):
    def save(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        change_tokenizer(tokenizer)
        tokenizer.save_pretrained(folder)

    return built(save)


def cut(name):
    return built(lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:500]))


def in_a_shard(name, changed):
    """Save the model in two shards, and change a tensor of the second one."""

    def save(folder):
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        shards = {"a": {NORM: tensors.pop(NORM)}, "b": tensors | {name: changed(tensors[name])}}
        for shard, content in shards.items():
            save_file(content, folder / f"{shard}.safetensors", metadata={"format": "pt"})
        weight_map = {key: f"{shard}.safetensors" for shard, content in shards.items() for key in content}
        write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})

    return built(save)


def with_one(value, dtype=torch.float32):
    """Return a function that replaces one number of a tensor."""

    def changed(tensor):
        tensor = tensor.clone()
        tensor.flatten()[5] = value
        return tensor.to(dtype)

    return changed


def with_adapter(tensors=None, **values):
    def mistake(folder, adapter):
        save_file((load_file(adapter / ADAPTER) if tensors is None else tensors), adapter / ADAPTER)
        change(adapter / "adapter_config.json", **values)
        build_bundle(adapter)

    return mistake


def with_base(name):
    def mistake(folder, adapter):
        change(adapter / "adapter_config.json", base_model_name_or_path=name)
        build_bundle(adapter)

    return mistake


def with_an_import_of_a_file_outside(folder):
    outside = folder.parent / "private.py"
    outside.touch()
    change(folder / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Model"})
    (folder / "mine.py").write_text(f'"""\nfrom .{outside.with_suffix("")} import x\n"""\n')


def with_one_more_layer(folder):
    FoxForCausalLM(FoxConfig(**TINY | {"num_hidden_layers": 2})).save_pretrained(folder)
    change(folder / "config.json", num_hidden_layers=1)


def with_the_config_of_a_llama(folder):
    LlamaConfig(**TINY, architectures=["LlamaForCausalLM"]).save_pretrained(folder)


def with_a_tied_head(folder):
    config = FoxConfig(**TINY, tie_word_embeddings=True)
    config.architectures = ["FoxForCausalLM"]
    config.save_pretrained(folder)


def with_large_values(folder):
    tensors = load_file(folder / "model.safetensors") | {NORM: torch.full((32,), 1e6)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder / "config.json", dtype="float16")


def with_a_wrong_index(folder):
    in_a_shard("lm_head.weight", torch.clone)(folder, None)
    index = folder / "model.safetensors.index.json"
    change(index, weight_map=json.loads(index.read_text())["weight_map"] | {NORM: "b.safetensors"})
    build_bundle(folder)


def save_in_float8(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {NORM: torch.full((32,), torch.nan).to(torch.float8_e4m3fn)}, folder / "model.safetensors")


GATE = "model.layers.0.self_attn.f_proj.bias"
LORA = {"A": torch.ones(2, 32), "B": torch.ones(32, 2)}
TOKENIZER = b'{"auto_map": {"AutoTokenizer": ["bob/code--tokenizer.Tokenizer", null]}}'
MISTAKES = [
    refused("arguments of the training", adding("training_args.bin"), r"training_args\.bin is a pickle.*token"),
    refused("state of the optimizer", adding("optimizer.pt"), r"optimizer\.pt is the state of a training run"),
    refused("a file of secrets", adding(".env"), r"\.env is a hidden file"),
    *(
        refused(f"{name} is a link to {target}", with_link(name, target), f"{name} is a link to")
        for name, target in [("model.safetensors", "/etc/hostname"), ("up", "..")]
    ),
    refused(
        "truncated weights", adding("model.safetensors", (2**9).to_bytes(8, "little")), "is not a .*safetensors file"
    ),
    refused("a tensor is absent", with_tensors({NORM: None}), f"the tensor {NORM} of the model"),
    refused(
        "a tensor of another shape",
        with_tensors({NORM: torch.ones(3, 3)}),
        r"shape \(32,\) according to config.json, got \(3, 3\)",
    ),
    refused("a tensor of NaN", with_tensors({NORM: torch.full((32,), torch.nan)}), "NaN in model.norm.weight"),
    *(
        refused(f"a configuration with {name} {value!r}", with_config(**{name: value}), says)
        for says, rows in {
            "transformers cannot load": [("hidden_size", "many"), ("rope_parameters", [1]), ("model_type", "hmt")],
            r"must have shape \(99, 32\) according to config.json": [("vocab_size", 99)],
            "must name classes from the same folder": [
                ("auto_map", 3),
                *(("auto_map", {"AutoConfig": name}) for name in ("../x.C", "mod", 3, "bob/code--mod.C")),
            ],
            "its auto_map needs": [("auto_map", {"AutoConfig": "os.system"})],
        }.items()
        for name, value in rows
    ),
    refused("NaN in float8", built(save_in_float8), "NaN in model.norm.weight"),
    *(
        refused(f"{value} in {name}", in_a_shard(name, with_one(value, dtype)), f"b.safetensors contains .* in {name}")
        for name, value, dtype in [
            ("lm_head.weight", torch.inf, torch.float32),
            (GATE.replace("bias", "weight"), -torch.inf, torch.bfloat16),
            ("model.embed_tokens.weight", torch.nan, torch.float64),
        ]
    ),
    refused("an infinite gate", with_tensors({GATE: torch.full((2,), torch.inf)}), f"infinity in {GATE}"),
    refused(
        "a value that overflows",
        built(with_large_values),
        "contains 1e[+]06 in model.norm.weight, which is infinite in torch.float16",
    ),
    *(
        refused(
            f"{dtype} weights", with_tensors({NORM: torch.ones(32, dtype=dtype)}), "must have a floating-point dtype"
        )
        for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64)
    ),
    refused("fewer layers", built(with_one_more_layer), "does not use .* of the tensors .*model.layers.1"),
    refused("an unknown tensor", with_tensors({"extra": torch.ones(1)}), "does not use 1 of the tensors .*extra"),
    refused("without its gates", with_config(forget_gate="none"), "does not use .*f_proj"),
    refused("the config of a Llama", built(with_the_config_of_a_llama), "LlamaForCausalLM that does not use .*f_proj"),
    refused(
        "another head than the tied one", built(with_a_tied_head), "ties lm_head.weight to .* but these .* differ"
    ),
    *(
        refused(f"the class {name}", with_config(architectures=[name]), "must name a class of the model type 'fox'")
        for name in ("LlamaForCausalLM", "FoxForCausallm")
    ),
    *(
        refused(f"the model type {name}", with_config(model_type=name), "must be a model type of transformers")
        for name in (None, "", "foxy")
    ),
    refused("a wrong index", built(with_a_wrong_index), "places model.norm.weight in b.safetensors"),
    *(refused(f"half of {name}", cut(name), f"{name} is not JSON") for name in ("tokenizer.json", "config.json")),
    *(
        refused(f"an empty {name}", adding(name), f"{name} is not JSON")
        for name in ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer_config.json")
    ),
    refused("only the settings of a tokenizer", without("tokenizer.json"), "cannot load the tokenizer in"),
    refused("a tokenizer of nothing", adding("tokenizer.json", b"{}"), "cannot load the tokenizer in"),
    refused(
        "a tokenizer with more words", with_tokenizer(lambda x: x.add_tokens(["new"])), "the token 'new' .* 0 to 60"
    ),
    refused("an unknown EOS", with_file("tokenizer_config.json", eos_token="<eos>"), "the token '<eos>' .* got 61"),
    refused(
        "a template that does not parse", adding("chat_template.jinja", b"{% for %}"), "not a valid jinja template"
    ),
    *(
        refused(
            f"the template {template}", adding("chat_template.jinja", template.encode()), "cannot render a user's turn"
        )
        for template in ("", "{{ messages[0].contents }}", "{{ messages[0].content + 1 }}")
    ),
    refused(
        "a number as a template", with_file("tokenizer_config.json", chat_template=3), "cannot load the tok|jinja"
    ),
    refused(
        "a template in JSON", adding("chat_template.json", b'{"chat_template": "{{"}'), "not a valid jinja template"
    ),
    *(
        refused(f"{name} {value}", with_file("generation_config.json", **{name: value}), f"{name} in .* must be an id")
        for name, value in [
            ("eos_token_id", [2, 61]),
            ("pad_token_id", -1),
            ("bos_token_id", "<s>"),
            ("decoder_start_token_id", 100),
            ("suppress_tokens", [1, 1000]),
            ("bad_words_ids", [[1], [2, 99]]),
            ("sequence_bias", [[[1, 99], 2.0]]),
        ]
    ),
    refused(
        "an EOS beyond the vocabulary", with_config(eos_token_id=61), "eos_token_id in .*/config.json must be an id"
    ),
    refused("a list as generation config", adding("generation_config.json", b"[]"), "must contain a JSON object"),
    refused("no new tokens", with_file("generation_config.json", max_new_tokens=0), "`max_new_tokens` must be"),
    refused("an infinite adapter", with_adapter({f"{Q}.lora_A.weight": LORA["A"] / 0}), "infinity in .*lora_A"),
    refused("an adapter of integers", with_adapter({"x": torch.ones(2).long()}), "must have a floating-point dtype"),
    refused("an empty adapter", with_adapter({}), "does not contain weights of its adapter"),
    refused("no LoRA in a LoRA", with_adapter({"a.weight": torch.ones(2)}), "does not contain weights of its adapter"),
    refused("a target that is not there", with_adapter(target_modules=["key"]), "got .*key.* for model.layers.0"),
    refused("another rank", with_adapter(r=8), r"a rank in \[8\], got .*lora_A.weight \(2, 32\)"),
    refused("half of a LoRA", with_adapter({f"{Q}.lora_A.weight": LORA["A"]}), "must contain pairs"),
    refused("no weights", without("model.safetensors"), "lacks model.safetensors"),
    refused("index of absent file", with_index({"lm_head.weight": "other.safetensors"}), "lacks other.safetensors"),
    refused("index to a file outside", with_index({"x": "../../x.safetensors"}), "got '../../x.safetensors'"),
    refused("code that is absent", with_config(auto_map={"AutoModel": "mod.C"}), r"does not contain mod\.py"),
    refused(
        "code that imports a file outside", built(with_an_import_of_a_file_outside), r"does not contain .*/private\.py"
    ),
    refused(
        "tokenizer's code elsewhere", adding("tokenizer_config.json", TOKENIZER), "auto_map in tokenizer_config.json"
    ),
    refused("no configuration", without("config.json"), "does not contain config.json or adapter_config.json"),
    *(
        refused(
            f"architectures of {value!r}", with_config(architectures=value), "architectures must be a list of strings"
        )
        for value in (3, "Fox", [3])
    ),
    refused("a list as model type", with_config(model_type=["x"]), "model_type and task_type in .* must be strings"),
    refused("configuration of half a file", adding("config.json", b"{"), "is not JSON"),
    refused("backbone in a folder", with_config(backbone_in_checkpoint=False, backbone_name_or_path="/m"), "got '/m'"),
    *(
        refused(f"the base {name!r}", with_base(name), "name of a repository on the Hub")
        for name in (None, "", "/m", "~/m", "../base", "a/b/c", "alice/fox@main")
    ),
    refused("pickled weights in capitals", adding("WEIGHTS.PT"), r"WEIGHTS\.PT is a pickle"),
    refused("no such folder", lambda folder, adapter: build_bundle(folder / "no"), "No such file"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes(mistake, folder, adapter):
    mistake.check(folder, adapter)


ADAPTERS = {
    "with biases": dict(target_modules=["q_proj"], lora_bias=True, bias="lora_only"),
    "all layers": dict(target_modules="all-linear", use_dora=True, rank_pattern={"k_proj": 3}),
    "embeddings": dict(target_modules=["embed_tokens"], modules_to_save=["lm_head"]),
    "a pattern": dict(target_modules=r".*self_attn\.(q|k)_proj"),
    "parameters": dict(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
}


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_of_peft_are_pushed(options, fox, tmp_path):
    peft = pytest.importorskip("peft")
    model = FoxForCausalLM.from_pretrained(fox)
    peft.get_peft_model(model, peft.LoraConfig(**options)).save_pretrained(tmp_path)
    change(tmp_path / "adapter_config.json", base_model_name_or_path="alice/fox")
    build_bundle(tmp_path)


def test_tensors_that_transformers_ignores_are_pushed(folder, tmp_path):
    """Buffers of old checkpoints, and a tied head that is saved twice."""
    config = LlamaConfig(**TINY, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tensors = load_file(tmp_path / "llama" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "llama" / "model.safetensors", metadata={"format": "pt"})
    build_bundle(tmp_path / "llama")
    change(folder / "config.json", quantization_config={"quant_method": "gptq"})
    tensors = load_file(folder / "model.safetensors") | {NORM: torch.ones(32, dtype=torch.int32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_bundle(folder)


def test_a_text_model_may_share_the_tokenizer_of_an_image_model(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens={"image_token": "<image>"})
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).get_vocab()["<image>"] == 61
    build_bundle(folder)


def test_an_old_file_does_not_hide_the_shards(folder):
    """transformers prefers model.safetensors, which is not pushed if there is an index."""
    old = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"infinity in lm_head\.weight"):
        in_a_shard("lm_head.weight", with_one(torch.inf))(folder, None)
    (folder / "model.safetensors").write_bytes(old)
    with pytest.raises(ValueError, match=r"infinity in lm_head\.weight"):
        build_bundle(folder)


def test_a_push_needs_a_token(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="No Hub token"):
        push(build_bundle(folder), "alice/fox")


def test_a_dry_run_without_a_network_does_not_retry(folder, monkeypatch, caplog):
    bundle = build_bundle(folder)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits to retry"))
    with pytest.raises(ConnectionError, match="cannot be reached"):
        removed_files(bundle, "alice/fox")
    assert not caplog.records


REPOSITORIES = ["alice", "/fox", "alice/fox/v1", "alice/a b", "https://huggingface.co/alice/fox", "alice/fox@v1"]
NAMES = ["", 40 * "a", "HEAD", "refs/pr/1", "-x", "x/", "a b", "a..b", "a~1", "v1."]


@pytest.mark.parametrize(
    "row, says",
    [
        *(((name,), "not the name of a repository") for name in REPOSITORIES),
        *((("alice/fox", *row), "not a valid name") for name in NAMES for row in ((name,), (None, name))),
        *((("alice/fox", *row), "the same name as a branch") for row in ((None, "main"), ("v1", "v1"))),
        (("alice/fox", None, "v1", True), "A pull request cannot be tagged"),
    ],
)
def test_names_that_confuse_are_refused(row, says):
    with pytest.raises(ValueError, match=says):
        check_destination(*row)


def test_a_gated_base_is_there(monkeypatch, adapter):
    response = SimpleNamespace(status_code=403, headers={}, request=None)
    monkeypatch.setattr(HfApi, "model_info", Mock(side_effect=GatedRepoError("gated", response=response)))
    with pytest.raises(PermissionError, match=r"lacks permission.* gated"):
        pin_base(build_bundle(adapter))


def test_pushes(run_client):
    pytest.importorskip("peft")
    run_client("push.py", DEMO, DEMO.with_name("hmt-demo"), package=True)
